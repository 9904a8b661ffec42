// RUN: attn-opt %s -p attn-narrow-integers | filecheck %s

// Positions and their differences fit 32 bits, an index of a load keeps 64, a product of positions may not fit.
// CHECK-LABEL: @bias
func.func @bias(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %w: tensor<?xf32>, %n: tensor<?xi64>) -> tensor<?x?x?x64xbf16> {
  %o = attn.attention %q, %k, %v scale %scale captures %w, %n : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?xf32>, tensor<?xi64> -> tensor<?x?x?x64xbf16>
  // CHECK: score_mod {
  score_mod {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %c: tensor<?xf32>, %l: tensor<?xi64>):
    // CHECK: %[[D:d]] = arith.subi %{{.*}}, %{{.*}} : i32
    %d = arith.subi %qi, %kv : i64
    // CHECK-NEXT: %[[WIDE:[a-z0-9_]+]] = arith.extsi %[[D]] : i32 to i64
    // CHECK-NEXT: attn.load %{{.*}}{{\[}}%[[WIDE]]{{\]}}
    %x = attn.load %c[%d] : tensor<?xf32> -> f32
    // CHECK-NEXT: arith.sitofp %[[D]] : i32 to f32
    %df = arith.sitofp %d : i64 to f32
    // CHECK-NEXT: arith.muli %qi, %kv : i64
    %p = arith.muli %qi, %kv : i64
    // CHECK-NEXT: arith.sitofp %{{.*}} : i64 to f32
    %pf = arith.sitofp %p : i64 to f32
    %a = arith.mulf %x, %df : f32
    %r = arith.addf %a, %pf : f32
    attn.yield %r : f32
  } mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %c: tensor<?xf32>, %l: tensor<?xi64>):
    // CHECK: mask {
    // CHECK: arith.cmpi sge, %{{.*}}, %{{.*}} : i32
    %causal = arith.cmpi sge, %qi, %kv : i64
    // CHECK: %[[LEN:len]] = attn.load
    // CHECK-NEXT: arith.cmpi slt, %{{.*}}, %[[LEN]] : i64
    %len = attn.load %l[%b] : tensor<?xi64> -> i64
    %in = arith.cmpi slt, %kv, %len : i64
    %m = arith.andi %causal, %in : i1
    attn.yield %m : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %c: tensor<?xf32>, %l: tensor<?xi64>):
    attn.yield %s : f32
  }
  func.return %o : tensor<?x?x?x64xbf16>
}
