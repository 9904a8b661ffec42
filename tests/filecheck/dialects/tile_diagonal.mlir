// RUN: attn-opt %s | attn-opt | filecheck %s

// A tile of numbers that its rows and columns share by their distance, and one that is added to such numbers.
// CHECK-LABEL: tile.kernel @distances(%numbers: !tile.global<2 x f32>, %sums: !tile.global<1 x f32>, %h: i32, %origin: i32)
tile.kernel @distances(%numbers: !tile.global<2 x f32>, %sums: !tile.global<1 x f32>, %h: i32, %origin: i32) {
  %q0 = tile.program_id 0
  %n0 = tile.program_id 1
  // CHECK: %d = tile.load_diagonals %numbers[%h, %origin] from %q0, %n0 : !tile.global<2 x f32> -> tensor<64x32xf32>
  %d = tile.load_diagonals %numbers[%h, %origin] from %q0, %n0 : !tile.global<2 x f32> -> tensor<64x32xf32>
  // CHECK: %t = tile.load_diagonals %numbers[%h, %origin] from %n0, %q0 turned : !tile.global<2 x f32> -> tensor<32x64xf32>
  %t = tile.load_diagonals %numbers[%h, %origin] from %n0, %q0 turned : !tile.global<2 x f32> -> tensor<32x64xf32>
  // CHECK: %u = tile.load_diagonals %numbers[%h, %origin] from %n0, %q0 turned held : !tile.global<2 x f32> -> tensor<32x64xf32>
  %u = tile.load_diagonals %numbers[%h, %origin] from %n0, %q0 turned held : !tile.global<2 x f32> -> tensor<32x64xf32>
  // CHECK: tile.add_diagonals %d, %sums[%origin] held : tensor<64x32xf32>, !tile.global<1 x f32>
  tile.add_diagonals %d, %sums[%origin] held : tensor<64x32xf32>, !tile.global<1 x f32>
  // CHECK: tile.add_diagonals %d, %sums[%origin] : tensor<64x32xf32>, !tile.global<1 x f32>
  tile.add_diagonals %d, %sums[%origin] : tensor<64x32xf32>, !tile.global<1 x f32>
  tile.end
}
