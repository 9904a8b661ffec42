// RUN: attn-opt %s -p "tile-assign-memory{one_pipeline=true}" | filecheck %s

// Two loops that load: neither has stages.
// CHECK-LABEL: tile.kernel @two(
tile.kernel @two(%x: !tile.global<2 x f16>, %y: !tile.global<1 x f32>, %full: i32, %n: i32) attributes {num_warps = 4 : i64, num_stages = 2 : i64} {
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %q = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f16> -> tensor<64x32xf16>
  %none = arith.constant dense<0.0> : tensor<64x64xf32>
  // CHECK: scf.for %i
  // CHECK-NOT: stages
  %s = scf.for %i = %full to %n step %c64 iter_args(%old = %none) -> (tensor<64x64xf32>) : i32 {
    %a = tile.load %x[%i, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<64x32xf16>
    %at = tile.transpose %a : tensor<64x32xf16> -> tensor<32x64xf16>
    %new = tile.dot %q, %at, %old ieee : tensor<64x32xf16>, tensor<32x64xf16>, tensor<64x64xf32> -> tensor<64x64xf32>
    scf.yield %new : tensor<64x64xf32>
  }
  // CHECK: scf.for %j
  // CHECK-NOT: stages
  %t = scf.for %j = %c0 to %full step %c64 iter_args(%old = %s) -> (tensor<64x64xf32>) : i32 {
    %b = tile.load %x[%j, %c0] dims [0, 1] : !tile.global<2 x f16> -> tensor<64x32xf16>
    %bt = tile.transpose %b : tensor<64x32xf16> -> tensor<32x64xf16>
    %new = tile.dot %q, %bt, %old ieee : tensor<64x32xf16>, tensor<32x64xf16>, tensor<64x64xf32> -> tensor<64x64xf32>
    scf.yield %new : tensor<64x64xf32>
  }
  // CHECK: tile.buffer_reduce
  %r = tile.reduce sum %t, 1 : tensor<64x64xf32> -> tensor<64xf32>
  tile.store %r, %y[%c0] dims [0] : tensor<64xf32>, !tile.global<1 x f32>
  tile.end
}

// One: it has them.
// CHECK-LABEL: tile.kernel @one(
tile.kernel @one(%x: !tile.global<2 x f16>, %y: !tile.global<1 x f32>, %n: i32) attributes {num_warps = 4 : i64, num_stages = 2 : i64} {
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %q = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f16> -> tensor<64x32xf16>
  %none = arith.constant dense<0.0> : tensor<64x64xf32>
  // CHECK: scf.for %i
  // CHECK: } {stages = 2 : i64}
  %s = scf.for %i = %c0 to %n step %c64 iter_args(%old = %none) -> (tensor<64x64xf32>) : i32 {
    %a = tile.load %x[%i, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<64x32xf16>
    %at = tile.transpose %a : tensor<64x32xf16> -> tensor<32x64xf16>
    %new = tile.dot %q, %at, %old ieee : tensor<64x32xf16>, tensor<32x64xf16>, tensor<64x64xf32> -> tensor<64x64xf32>
    scf.yield %new : tensor<64x64xf32>
  }
  %r = tile.reduce sum %s, 1 : tensor<64x64xf32> -> tensor<64xf32>
  tile.store %r, %y[%c0] dims [0] : tensor<64xf32>, !tile.global<1 x f32>
  tile.end
}
