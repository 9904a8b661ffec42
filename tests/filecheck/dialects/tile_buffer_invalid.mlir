// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: a kernel allocates in shared or register, not in tmem
%s = tile.buffer_alloc : !tile.buffer<64x64xf32, tmem>

// -----

// CHECK: is no layout of shared memory
%s = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x4> : !tile.buffer<64x128xf32, shared>

// -----

// CHECK: is no layout of a fragment
%s = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x128xf32, register>

// -----

// CHECK: a fragment of shape (64, 64) does not divide into parts of (32, 128)
%s = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x4> : !tile.buffer<64x64xf32, register>

// -----

// CHECK: no instruction has the shape 32x16x8
%s = tile.buffer_alloc layout #tile.mfma<32x16x8, acc, 1x4> : !tile.buffer<64x64xf32, register>

// -----

// CHECK: value i32 does not match
%s, %v = "test.op"() : () -> (!tile.buffer<64xf32, register>, i32)
tile.buffer_fill %s, %v : !tile.buffer<64xf32, register>, i32

// -----

// CHECK: tensor<64x32xf32> does not match the elements of !tile.global<2 x f16>
%x, %s, %i = "test.op"() : () -> (!tile.global<2 x f16>, !tile.buffer<64x32xf32, shared>, i32)
tile.copy_in %x[%i, %i] dims [0, 1] into %s : !tile.global<2 x f16>, !tile.buffer<64x32xf32, shared>

// -----

// CHECK: dims [0] do not match the rank
%x, %s, %i = "test.op"() : () -> (!tile.global<2 x f32>, !tile.buffer<64x32xf32, register>, i32)
tile.copy_out %s, %x[%i, %i] dims [0] : !tile.buffer<64x32xf32, register>, !tile.global<2 x f32>

// -----

// CHECK: what is added is a fragment
%x, %s, %i = "test.op"() : () -> (!tile.global<1 x f32>, !tile.buffer<64xf32, shared>, i32)
tile.buffer_atomic_add %s, %x[%i] dims [0] : !tile.buffer<64xf32, shared>, !tile.global<1 x f32>

// -----

// CHECK: cannot be copied to
%a, %b = "test.op"() : () -> (!tile.buffer<64x32xf16, shared>, !tile.buffer<64x32xf32, register>)
tile.copy %a, %b : !tile.buffer<64x32xf16, shared>, !tile.buffer<64x32xf32, register>

// -----

// An accumulator becomes a left operand only through shared memory.
// CHECK: fragments are held differently
%a = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 2x2> : !tile.buffer<64x64xf32, register>
%b = tile.buffer_alloc layout #tile.mfma<32x32x8, a, 2x2> : !tile.buffer<64x64xf32, register>
tile.copy %a, %b : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, register>

// -----

// CHECK: the accumulator of a product is a fragment, got !tile.buffer<64x64xf32, shared>
%a, %c = "test.op"() : () -> (!tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, shared>)
tile.gemm %a, %a, %c ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, shared>

// -----

// CHECK: the accumulator of a product is also its operand
%a, %c = "test.op"() : () -> (!tile.buffer<64x64xf32, shared>, !tile.buffer<64x64xf32, register>)
tile.gemm %c, %a, %c ieee : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, shared>, !tile.buffer<64x64xf32, register>

// -----

// CHECK: products accumulate in f32
%a, %c = "test.op"() : () -> (!tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, register>)
tile.gemm %a, %a, %c ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, register>

// -----

// CHECK: shapes (64, 32) @ (64, 32) + (64, 64) do not fit
%a, %c = "test.op"() : () -> (!tile.buffer<64x32xf16, shared>, !tile.buffer<64x64xf32, register>)
tile.gemm %a, %a, %c ieee : !tile.buffer<64x32xf16, shared>, !tile.buffer<64x32xf16, shared>, !tile.buffer<64x64xf32, register>

// -----

// S is held with the waves along its rows: as a right operand every wave would need all of it.
// CHECK: operand b is held as
%a = "test.op"() : () -> !tile.buffer<32x128xf16, shared>
%p = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 4x1> : !tile.buffer<128x32xf16, register>
%c = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x1> : !tile.buffer<32x32xf32, register>
tile.gemm %a, %p, %c ieee : !tile.buffer<32x128xf16, shared>, !tile.buffer<128x32xf16, register>, !tile.buffer<32x32xf32, register>

// -----

// CHECK: a map writes fragments
%s = "test.op"() : () -> !tile.buffer<64xf32, shared>
tile.buffer_map (%s) axes [[0]] into (%s) : (!tile.buffer<64xf32, shared>) into (!tile.buffer<64xf32, shared>) {
^bb0(%e: f32):
  tile.yield %e : f32
}

// -----

// CHECK: operand 0: !tile.buffer<64xf32, register> does not match axes [1] of shape (64, 32)
%s, %m = "test.op"() : () -> (!tile.buffer<64x32xf32, register>, !tile.buffer<64xf32, register>)
tile.buffer_map (%m) axes [[1]] into (%s) : (!tile.buffer<64xf32, register>) into (!tile.buffer<64x32xf32, register>) {
^bb0(%e: f32):
  tile.yield %e : f32
}

// -----

// CHECK: a map writes the same buffer twice
%s = "test.op"() : () -> !tile.buffer<64xf32, register>
tile.buffer_map (%s) axes [[0]] into (%s, %s) : (!tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) {
^bb0(%e: f32):
  tile.yield %e, %e : f32, f32
}

// -----

// CHECK: the region must end in tile.yield of the outputs' element types
%s = "test.op"() : () -> !tile.buffer<64xf16, register>
tile.buffer_map (%s) axes [[0]] into (%s) : (!tile.buffer<64xf16, register>) into (!tile.buffer<64xf16, register>) {
^bb0(%e: f16):
  %x = arith.extf %e : f16 to f32
  tile.yield %x : f32
}

// -----

// CHECK: axis 1 of a map of shape (64,)
%s = "test.op"() : () -> !tile.buffer<64xi32, register>
tile.buffer_map () axes [] into (%s) : () into (!tile.buffer<64xi32, register>) {
^bb0:
  %x = tile.index 1
  tile.yield %x : i32
}

// -----

// CHECK: Unexpected attribute !tile.buffer<64xf32, register>
%m = "test.op"() : () -> !tile.buffer<64xf32, register>
%n = tile.keep %m : !tile.buffer<64xf32, register>

// -----

// CHECK: reducing axis 0 of !tile.buffer<64x32xf32, register> does not give
%s, %m = "test.op"() : () -> (!tile.buffer<64x32xf32, register>, !tile.buffer<64xf32, register>)
tile.buffer_reduce sum %s, 0 into %m : !tile.buffer<64x32xf32, register>, !tile.buffer<64xf32, register>

// -----

// CHECK: needs an attribute threads
tile.kernel @k() {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  tile.end
}

// -----

// CHECK: is for 256 threads, the kernel has 128
tile.kernel @k() attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x4> : !tile.buffer<64x128xf32, register>
  tile.end
}

// -----

// CHECK: tile.barrier in a kernel without explicit_barriers
tile.kernel @k() attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  tile.barrier
  tile.end
}

// -----

// CHECK: tile.buffer_alloc stands at the top of its kernel
tile.kernel @k(%c: i1) attributes {threads = 128 : i64} {
  scf.if %c {
    %s = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  }
  tile.end
}

// -----

// CHECK: a kernel with buffers has no values of type tensor<64xf32>
tile.kernel @k() attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  %t = arith.constant dense<0.0> : tensor<64xf32>
  tile.end
}

// -----

// CHECK: does not lie in !tile.buffer<64xf32, shared>: both are shared, the host no smaller
tile.kernel @k(%x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  %t = tile.buffer_alloc layout #tile.padded<4> in %s : !tile.buffer<16x4xf32, shared> in !tile.buffer<64xf32, shared>
  tile.end
}

// -----

// CHECK: a scan is of a fragment into one like it
tile.kernel @k(%x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64x16xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x16xf32, shared>
  tile.buffer_fill %s, %x : !tile.buffer<64x16xf32, register>, f32
  tile.buffer_scan sum %s, 0 into %t : !tile.buffer<64x16xf32, register>, !tile.buffer<64x16xf32, shared>
  tile.end
}

// -----

// CHECK: axis 1 of !tile.buffer<64xf32, register>; a scan takes a fragment of rank 1 or 2
tile.kernel @k(%x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, register>
  tile.buffer_fill %s, %x : !tile.buffer<64xf32, register>, f32
  tile.buffer_scan sum %s, 1 into %s : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  tile.end
}

// -----

// A loop may run not even once: what it alone writes is not written after it.
// CHECK: tile.copy reads buffer %s, which may not have been written before
tile.kernel @k(%n: i32, %x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64xf32, register>
  scf.for %i = %n to %n step %n : i32 {
    tile.buffer_fill %s, %x : !tile.buffer<64xf32, register>, f32
  }
  tile.copy %s, %t : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  tile.end
}

// -----

// An accumulator that nothing has cleared.
// CHECK: tile.gemm reads buffer %c, which may not have been written before
tile.kernel @k(%x: f16, %yes: i1, %y: f32) attributes {threads = 128 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %c = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  tile.buffer_fill %a, %x : !tile.buffer<64x64xf16, shared>, f16
  scf.if %yes {
    tile.buffer_fill %c, %y : !tile.buffer<64x64xf32, register>, f32
  }
  tile.gemm %a, %a, %c ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  tile.end
}

// -----

// Only what lies in shared memory can be read by any thread, and so as its transpose.
// CHECK: operand 0: axes [1, 0] are not ascending; only shared memory is read turned
tile.kernel @k(%x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  tile.buffer_fill %s, %x : !tile.buffer<64x64xf32, register>, f32
  tile.buffer_map (%s) axes [[1, 0]] into (%t) : (!tile.buffer<64x64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%e: f32):
    tile.yield %e : f32
  }
  tile.end
}

// -----

// CHECK: the region must end in tile.yield of an f32, 2 indices and an i1
tile.kernel @k(%x: f32, %w: !tile.global<2 x f32>) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, register>
  tile.buffer_fill %s, %x : !tile.buffer<64xf32, register>, f32
  tile.buffer_scatter_add (%s) axes [[0]] into %w : (!tile.buffer<64xf32, register>) into !tile.global<2 x f32> {
  ^bb0(%e: f32):
    %j = tile.index 0
    %yes = arith.constant true
    tile.yield %e, %j, %yes : f32, i32, i1
  }
  tile.end
}

// -----

// CHECK: a total is of a fragment of rank 1
tile.kernel @k(%x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  tile.buffer_fill %s, %x : !tile.buffer<64xf32, shared>, f32
  %t = tile.buffer_total sum %s : !tile.buffer<64xf32, shared> -> f32
  tile.end
}

// -----

// CHECK: tile.copy of a staged tile, which is only copied to shared memory
tile.kernel @k(%x: f32) attributes {threads = 256 : i64} {
  %s = tile.buffer_alloc layout #tile.staged<1> : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  tile.buffer_fill %s, %x : !tile.buffer<64x64xf32, register>, f32
  tile.copy %s, %t : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, register>
  tile.end
}
