// RUN: attn-opt %s -p attn-analyze-mask | filecheck %s

// Causal: keys [0, q_hi) are visited, [0, q_lo + 1) are visible without asking.
// CHECK-LABEL: @causal
func.func @causal(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32) -> tensor<?x?x?x64xbf16> {
  %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16>
  mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    attn.yield %s : f32
  }
  // CHECK: blocks {
  // CHECK-NEXT: ^bb0(%q_lo: i64, %q_hi: i64, %{{[a-z0-9_]+}}: i64, %{{[a-z0-9_]+}}: i64, %sq: i64, %skv: i64):
  // CHECK-NEXT: %[[ZERO:[a-z0-9_]+]] = arith.constant 0 : i64
  // CHECK-NEXT: %[[END:[a-z0-9_]+]] = arith.minsi %q_hi, %skv : i64
  // CHECK-NEXT: %[[ONE:[a-z0-9_]+]] = arith.constant 1 : i64
  // CHECK-NEXT: %[[NEXT:[a-z0-9_]+]] = arith.addi %q_lo, %[[ONE]] : i64
  // CHECK-NEXT: %[[FULL:[a-z0-9_]+]] = arith.minsi %[[NEXT]], %[[END]] : i64
  // CHECK-NEXT: attn.yield %[[ZERO]], %[[ZERO]], %[[FULL]], %[[END]] : i64, i64, i64, i64
  // CHECK: blocks_t {
  // CHECK-NEXT: ^bb0(%kv_lo: i64, %kv_hi: i64,
  // CHECK: attn.yield
  func.return %o : tensor<?x?x?x64xbf16>
}

// A mask that is always true is no mask: it leaves no region.
// CHECK-LABEL: @everything
func.func @everything(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32) -> tensor<?x?x?x64xbf16> {
  // CHECK: attn.attention {{.*}} row {
  // CHECK-NOT: blocks
  %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16>
  mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64):
    %c = arith.cmpi sle, %qi, %qi : i64
    attn.yield %c : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    attn.yield %s : f32
  }
  func.return %o : tensor<?x?x?x64xbf16>
}

// Documents: a term of the query, one of the key, and what blocks are to each other by the ends of both.
// CHECK-LABEL: @documents
func.func @documents(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %doc: tensor<?xi64>) -> tensor<?x?x?x64xbf16> {
  %o = attn.attention %q, %k, %v scale %scale captures %doc : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?xi64> -> tensor<?x?x?x64xbf16>
  mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %ids: tensor<?xi64>):
    %x = attn.load %ids[%qi] : tensor<?xi64> -> i64
    %y = attn.load %ids[%kv] : tensor<?xi64> -> i64
    %c = arith.cmpi eq, %x, %y : i64
    attn.yield %c : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %ids: tensor<?xi64>):
    attn.yield %s : f32
  }
  // CHECK: query_terms {
  // CHECK-NEXT: ^bb0(%{{[a-z0-9_]+}}: i64, %{{[a-z0-9_]+}}: i64, %[[Q:[a-z0-9_]+]]: i64, %[[IDS:[a-z0-9_]+]]: tensor<?xi64>):
  // CHECK-NEXT: %[[X:[a-z0-9_]+]] = attn.load %[[IDS]][%[[Q]]]
  // CHECK-NEXT: attn.yield %[[X]] : i64
  // CHECK: key_terms {
  // CHECK: attn.load
  // CHECK: kinds {
  // CHECK-NEXT: ^bb0({{.*}}%[[QMIN:q_min0]]: i64, %[[QMAX:q_max0]]: i64, %[[KMIN:kv_min0]]: i64, %[[KMAX:kv_max0]]: i64,
  // CHECK-NEXT: %[[A:[a-z0-9_]+]] = arith.cmpi sle, %[[QMIN]], %[[KMAX]] : i64
  // CHECK-NEXT: %[[B:[a-z0-9_]+]] = arith.cmpi sle, %[[KMIN]], %[[QMAX]] : i64
  // CHECK-NEXT: %[[SOME:[a-z0-9_]+]] = arith.andi %[[A]], %[[B]] : i1
  // CHECK-NEXT: %[[C:[a-z0-9_]+]] = arith.cmpi eq, %[[QMIN]], %[[KMAX]] : i64
  // CHECK-NEXT: %[[D:[a-z0-9_]+]] = arith.cmpi eq, %[[QMAX]], %[[KMIN]] : i64
  // CHECK-NEXT: %[[EVERY:[a-z0-9_]+]] = arith.andi %[[C]], %[[D]] : i1
  // CHECK-NEXT: attn.yield %[[SOME]], %[[EVERY]] : i1, i1
  func.return %o : tensor<?x?x?x64xbf16>
}
