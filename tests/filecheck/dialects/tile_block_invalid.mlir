// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: needs 4 coordinates, got 2
%d, %i = "test.op"() : () -> (!tile.descriptor<1x1x64x32xbf16>, i32)
%b = tile.load_block %d[%i, %i] : !tile.descriptor<1x1x64x32xbf16> -> tensor<64x32xbf16>

// -----

// CHECK: must have ones in front of its last two sizes
%d, %i = "test.op"() : () -> (!tile.descriptor<2x64x32xbf16>, i32)
%b = tile.load_block %d[%i, %i, %i] : !tile.descriptor<2x64x32xbf16> -> tensor<64x32xbf16>

// -----

// CHECK: is no tensor<32x64xbf16>
%d, %i, %v = "test.op"() : () -> (!tile.descriptor<64x32xbf16>, i32, tensor<32x64xbf16>)
tile.store_block %v, %d[%i, %i] : tensor<32x64xbf16>, !tile.descriptor<64x32xbf16>

// -----

// CHECK: needs 3 indices, got 1
%m, %i, %v = "test.op"() : () -> (!tile.global<3 x bf16>, i32, tensor<64x32xbf16>)
tile.set_aside %v, %m[%i] : tensor<64x32xbf16>, !tile.global<3 x bf16>

// -----

// CHECK: is no matrix of what
%m, %i = "test.op"() : () -> (!tile.global<1 x bf16>, i32)
%v = tile.take_back %m[%i] : !tile.global<1 x bf16> -> tensor<64x32xf32>
