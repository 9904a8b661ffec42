// RUN: attn-opt %s -p triton-pass-sizes | filecheck %s

// One size, asked for twice, is one argument.
// CHECK: tile.kernel @kernel(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>, %x_size: i32)
tile.kernel @kernel(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>) {
  // CHECK-NOT: tile.dim
  %n = tile.dim %x, 1 : !tile.global<2 x f32>
  %m = tile.dim %x, 1 : !tile.global<2 x f32>
  // CHECK: arith.addi %x_size, %x_size : i32
  %s = arith.addi %n, %m : i32
  %t = tile.load %y[%s] dims [] : !tile.global<1 x f32> -> f32
  tile.store %t, %y[%n] dims [] : f32, !tile.global<1 x f32>
  tile.end
}

// CHECK-LABEL: tile.plan @plan
tile.plan @plan(%a: !tile.global<2 x f32>, %b: !tile.global<1 x f32>) {
  %one = arith.constant 1 : i32
  // CHECK: [[SIZE:%.*]] = tile.dim %a, 1 : !tile.global<2 x f32>
  // CHECK-NEXT: tile.launch @kernel grid(%one) args(%a, %b, [[SIZE]])
  tile.launch @kernel grid(%one) args(%a, %b) : !tile.global<2 x f32>, !tile.global<1 x f32>
  tile.end
}
