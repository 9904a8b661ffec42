// RUN: attn-opt %s -p gluon-hold-diagonals | filecheck %s

// No product gives these tiles their layout: they are loaded and added element by element.
// CHECK-LABEL: tile.kernel @alone
tile.kernel @alone(%numbers: !tile.global<2 x f32>, %sums: !tile.global<1 x f32>, %h: i32, %origin: i32) {
  %q0 = tile.program_id 0
  // CHECK: %d = tile.load_diagonals %numbers[%h, %origin] from %q0, %q0 : !tile.global<2 x f32> -> tensor<64x64xf32>
  %d = tile.load_diagonals %numbers[%h, %origin] from %q0, %q0 : !tile.global<2 x f32> -> tensor<64x64xf32>
  // CHECK: tile.add_diagonals %d, %sums[%origin] : tensor<64x64xf32>, !tile.global<1 x f32>
  tile.add_diagonals %d, %sums[%origin] : tensor<64x64xf32>, !tile.global<1 x f32>
  tile.end
}
