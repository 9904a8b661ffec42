// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: flags are i32, got
%f, %i = "test.op"() : () -> (!tile.global<1 x f32>, i32)
tile.signal %f[%i] : !tile.global<1 x f32>

// -----

// CHECK: needs 2 indices, got 1
%f, %i = "test.op"() : () -> (!tile.global<2 x i32>, i32)
tile.await %f[%i] : !tile.global<2 x i32>
