// RUN: attn-opt %s -p 'tile-expand-math{keep="math.erf"}' | filecheck %s

// Functions become arithmetic in kernels and in their maps; what a target has may be kept.
// CHECK-LABEL: tile.kernel @kernel
tile.kernel @kernel(%x: !tile.global<1 x f32>, %n: i32, %m: i32) {
  // CHECK: [[Q:%.*]] = arith.divsi %n, %m : i32
  // CHECK-NEXT: [[R:%.*]] = arith.remsi %n, %m : i32
  // CHECK: [[N:%.*]] = arith.cmpi ne, [[R]], %{{.*}} : i32
  // CHECK: arith.select %{{.*}}, %{{.*}}, [[Q]] : i32
  // CHECK-NOT: arith.floordivsi
  %i = arith.floordivsi %n, %m : i32
  %t = tile.load %x[%i] dims [0] : !tile.global<1 x f32> -> tensor<16xf32>
  // CHECK: tile.map
  %y = tile.map (%t) axes [[0]] : (tensor<16xf32>) -> tensor<16xf32> {
  ^bb0(%e: f32):
    // CHECK: math.erf %{{.*}} : f32
    %a = math.erf %e : f32
    // CHECK-NOT: math.tanh
    // CHECK: math.exp2
    // CHECK: arith.divf
    %b = math.tanh %a : f32
    tile.yield %b : f32
  }
  tile.store %y, %x[%i] dims [0] : tensor<16xf32>, !tile.global<1 x f32>
  tile.end
}

// The host has its own arithmetic.
// CHECK-LABEL: tile.plan @plan
tile.plan @plan(%x: !tile.global<1 x f32>, %m: i32) {
  %n = tile.dim %x, 0 : !tile.global<1 x f32>
  // CHECK: arith.floordivsi
  %b = arith.floordivsi %n, %m : i32
  tile.launch @kernel grid(%b) args(%x, %n, %m) : !tile.global<1 x f32>, i32, i32
  tile.end
}
