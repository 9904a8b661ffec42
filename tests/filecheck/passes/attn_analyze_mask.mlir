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
