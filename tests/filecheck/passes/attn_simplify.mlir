// RUN: attn-opt %s -p attn-simplify | filecheck %s

// Neutral elements go, a division by a power of two is a product, an unused load is dropped.
// CHECK-LABEL: @score
func.func @score(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %w: tensor<?xf32>) -> tensor<?x?x?x64xbf16> {
  %o = attn.attention %q, %k, %v scale %scale captures %w : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?xf32> -> tensor<?x?x?x64xbf16>
  // CHECK: score_mod {
  // CHECK-NEXT: ^bb0(%[[S:[a-z0-9_]+]]: f32, %{{[a-z0-9_]+}}: i64, %[[H:[a-z0-9_]+]]: i64,
  score_mod {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %c: tensor<?xf32>):
    %one = arith.constant 1.0 : f32
    %eight = arith.constant 8.0 : f32
    %three = arith.constant 3.0 : f32
    %unused = attn.load %c[%b] : tensor<?xf32> -> f32
    %l0 = attn.load %c[%h] : tensor<?xf32> -> f32
    %l1 = attn.load %c[%h] : tensor<?xf32> -> f32
    %a = arith.mulf %one, %s : f32
    // CHECK-NEXT: %[[THREE:[a-z0-9_]+]] = arith.constant 3.000000e+00 : f32
    // CHECK-NEXT: %[[W:[a-z0-9_]+]] = attn.load %{{.*}}{{\[}}%[[H]]{{\]}}
    // CHECK-NEXT: %[[EIGHTH:[a-z0-9_]+]] = arith.constant 1.250000e-01 : f32
    // CHECK-NEXT: %[[A:[a-z0-9_]+]] = arith.mulf %[[S]], %[[EIGHTH]] : f32
    %d = arith.divf %a, %eight : f32
    // CHECK-NEXT: %[[T:[a-z0-9_]+]] = arith.divf %[[A]], %[[THREE]] : f32
    %t = arith.divf %d, %three : f32
    // CHECK-NEXT: %[[TWO:[a-z0-9_]+]] = arith.constant 2.000000e+00 : f32
    // CHECK-NEXT: %[[LL:[a-z0-9_]+]] = arith.mulf %[[W]], %[[TWO]] : f32
    %ll = arith.addf %l0, %l1 : f32
    // CHECK-NEXT: %[[R:[a-z0-9_]+]] = arith.addf %[[T]], %[[LL]] : f32
    // CHECK-NEXT: attn.yield %[[R]] : f32
    %r = arith.addf %t, %ll : f32
    attn.yield %r : f32
  // not (q < kv) is q >= kv; `and true` and the second negation go.
  // CHECK: mask {
  // CHECK-NEXT: ^bb0(%{{[a-z0-9_]+}}: i64, %{{[a-z0-9_]+}}: i64, %[[Q:[a-z0-9_]+]]: i64, %[[KV:[a-z0-9_]+]]: i64,
  // CHECK-NEXT: %[[C:[a-z0-9_]+]] = arith.cmpi sge, %[[Q]], %[[KV]] : i64
  // CHECK-NEXT: attn.yield %[[C]] : i1
  } mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %c: tensor<?xf32>):
    %true = arith.constant true
    %lt = arith.cmpi slt, %qi, %kv : i64
    %n = arith.xori %lt, %true : i1
    %nn = arith.xori %n, %true : i1
    %nnn = arith.xori %nn, %true : i1
    %m = arith.andi %nnn, %true : i1
    attn.yield %m : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %c: tensor<?xf32>):
    attn.yield %s : f32
  }
  func.return %o : tensor<?x?x?x64xbf16>
}

// x + 0.0 turns -0.0 into 0.0 and x - x may be NaN: both stay.
// CHECK-LABEL: @kept
func.func @kept(%x: f32) -> (f32, f32) {
  %zero = arith.constant 0.0 : f32
  // CHECK: arith.addf
  %a = arith.addf %x, %zero : f32
  // CHECK-NEXT: arith.subf
  %b = arith.subf %x, %x : f32
  func.return %a, %b : f32, f32
}
