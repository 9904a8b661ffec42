// RUN: attn-opt %s --split-input-file --parsing-diagnostics --verify-diagnostics | filecheck %s

tile.kernel @indices(%numbers: !tile.global<2 x f32>, %i: i32) {
  // CHECK: !tile.global<2 x f32> needs 2 indices, got 1
  %d = tile.load_diagonals %numbers[%i] from %i, %i : !tile.global<2 x f32> -> tensor<64x32xf32>
  tile.end
}

// -----

tile.kernel @vector(%numbers: !tile.global<1 x f32>, %i: i32) {
  // CHECK: tensor<64xf32> has no diagonals
  %d = tile.load_diagonals %numbers[%i] from %i, %i : !tile.global<1 x f32> -> tensor<64xf32>
  tile.end
}

// -----

tile.kernel @elements(%numbers: !tile.global<1 x f32>, %i: i32) {
  // CHECK: tensor<64x32xf16> does not match the elements of !tile.global<1 x f32>
  %d = tile.load_diagonals %numbers[%i] from %i, %i : !tile.global<1 x f32> -> tensor<64x32xf16>
  tile.end
}
