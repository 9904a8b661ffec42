// RUN: attn-opt %s -p hip-transpose | filecheck %s

// The product of the transposes, the other way round; the transpose of what is loaded is a load.
// CHECK-LABEL: tile.kernel @scores
tile.kernel @scores(%q: !tile.global<2 x f16>, %k: !tile.global<2 x f16>, %o: !tile.global<1 x f32>, %n: i32, %d: i32) {
  %c0 = arith.constant 0 : i32
  // CHECK: %zero = arith.constant dense<0.000000e+00> : tensor<32x64xf32>
  %zero = arith.constant dense<0.0> : tensor<64x32xf32>
  // CHECK: %q_tile = tile.load %q[%c0, %c0] dims [1, 0] bounded [0, 1] limits(%d, %n) : !tile.global<2 x f16> -> tensor<128x64xf16>
  %q_tile = tile.load %q[%c0, %c0] dims [0, 1] bounded [0, 1] limits(%n, %d) : !tile.global<2 x f16> -> tensor<64x128xf16>
  // CHECK-NEXT: %k_tile = tile.load %k[%c0, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<32x128xf16>
  %k_tile = tile.load %k[%c0, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<32x128xf16>
  // CHECK-NOT: tile.transpose
  %t = tile.transpose %k_tile : tensor<32x128xf16> -> tensor<128x32xf16>
  // CHECK: %s = tile.dot %k_tile, %q_tile, %zero ieee : tensor<32x128xf16>, tensor<128x64xf16>, tensor<32x64xf32> -> tensor<32x64xf32>
  %s = tile.dot %q_tile, %t, %zero ieee : tensor<64x128xf16>, tensor<128x32xf16>, tensor<64x32xf32> -> tensor<64x32xf32>
  %i = tile.range %c0 : tensor<64xi32>
  // CHECK: tile.map (%s, %i) axes {{\[\[}}0, 1], [1]]
  %w = tile.map (%s, %i) axes [[0, 1], [0]] : (tensor<64x32xf32>, tensor<64xi32>) -> tensor<64x32xf32> {
  ^bb0(%x: f32, %y: i32):
    %f = arith.sitofp %y : i32 to f32
    %r = arith.addf %x, %f : f32
    tile.yield %r : f32
  }
  // CHECK: tile.reduce max %w, 0 : tensor<32x64xf32> -> tensor<64xf32>
  %m = tile.reduce max %w, 1 : tensor<64x32xf32> -> tensor<64xf32>
  tile.store %m, %o[%c0] dims [0] bounded [0] limits(%n) : tensor<64xf32>, !tile.global<1 x f32>
  tile.end
}
