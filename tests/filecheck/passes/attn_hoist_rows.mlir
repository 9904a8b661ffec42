// RUN: attn-opt %s -p attn-hoist-rows | filecheck %s

// The scaled row value moves to rows; the condition and the element's own work stay.
// CHECK-LABEL: @backward
func.func @backward(%q: tensor<?x?x?x64xf32>, %k: tensor<?x?x?x64xf32>, %v: tensor<?x?x?x64xf32>, %scale: f32, %o: tensor<?x?x?x64xf32>, %do: tensor<?x?x?x64xf32>, %lse: tensor<?x?x?xf32>) -> tensor<?x?x?x64xf32> {
  %dq = attn.backward %q, %k, %v scale %scale o %o, %do saved %lse init [] grad_captures [] : tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32> saved tensor<?x?x?xf32> -> dq tensor<?x?x?x64xf32>
  // CHECK: rows {
  rows {
  ^bb0(%b: i64, %h: i64, %qi: i64, %delta: f32, %l: f32):
    // CHECK: %[[C:.*]] = arith.constant 1.44269502 : f32
    // CHECK-NEXT: %[[SCALED:.*]] = arith.mulf %{{.*}}, %[[C]] : f32
    // CHECK-NEXT: attn.yield %{{.*}}, %[[SCALED]] : f32, f32
    attn.yield %l, %delta : f32, f32
  // CHECK: element {
  } element {
  // CHECK-NEXT: ^bb0(%[[X:.*]]: f32, %[[DP:.*]]: f32, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %[[D:.*]]: f32, %[[R:.*]]: f32):
  ^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %l: f32, %delta: f32):
    %c = arith.constant 1.44269502 : f32
    // CHECK-NOT: arith.mulf %[[R]]
    %r = arith.mulf %l, %c : f32
    // CHECK: %[[E:.*]] = arith.subf %[[X]], %[[R]] : f32
    %e = arith.subf %x, %r : f32
    %p = math.exp2 %e : f32
    // CHECK: arith.subf %[[DP]], %[[D]] : f32
    %t = arith.subf %dp, %delta : f32
    %dx = arith.mulf %p, %t : f32
    attn.yield %p, %dx : f32, f32
  }
  func.return %dq : tensor<?x?x?x64xf32>
}
