// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: another rank or element type
tile.plan @describe(%x: !tile.global<3 x f16>) {
  %d = tile.describe %x : !tile.global<3 x f16> -> !tile.descriptor<64x64xf16>
  tile.end
}

// -----

// CHECK: a ring is in shared memory
%r = tile.ring : !tile.buffer<2x64xf16, register>

// -----

// CHECK: is not a stage of
%r, %i = "test.op"() : () -> (!tile.buffer<2x64x64xf16, shared>, i32)
%s = tile.slot %r[%i] : !tile.buffer<2x64x64xf16, shared> -> !tile.buffer<2x64xf16, shared>

// -----

// CHECK: is not the transpose of
%s = "test.op"() : () -> !tile.buffer<64x32xf16, shared>
%t = tile.transposed_slot %s : !tile.buffer<64x32xf16, shared> -> !tile.buffer<64x32xf16, shared>

// -----

// CHECK: does not give tensor<64x32xf32>
%s = "test.op"() : () -> !tile.buffer<64x32xf16, shared>
%t = tile.read %s : !tile.buffer<64x32xf16, shared> -> tensor<64x32xf32>

// -----

// CHECK: does not fill
%s, %t = "test.op"() : () -> (!tile.buffer<64x32xf16, shared>, tensor<32x64xf16>)
tile.write %t, %s : tensor<32x64xf16>, !tile.buffer<64x32xf16, shared>

// -----

// CHECK: cells are a buffer of rank 1
%s, %i = "test.op"() : () -> (!tile.buffer<2x1xi32, shared>, i32)
%t = tile.cell_read %s[%i] : !tile.buffer<2x1xi32, shared> -> i32

// -----

// CHECK: is not an element of
%s, %i = "test.op"() : () -> (!tile.buffer<2xf32, shared>, i32)
tile.cell_write %i, %s[%i] : !tile.buffer<2xf32, shared>

// -----

// CHECK: a counter is a !tile.global<1 x i32>
%s, %i = "test.op"() : () -> (!tile.global<1 x f32>, i32)
%t = tile.fetch_add %s[%i], %i : !tile.global<1 x f32>

// -----

// CHECK: a phase needs at least one arrival, got 0
%b = tile.make_barriers count 0 : !tile.barriers<2>

// -----

// A barrier expects the bytes of the copies onto it, no more and no less.
// CHECK: the barrier expects 4096 bytes, copies onto it bring 8192
%d, %s, %b, %i = "test.op"() : () -> (!tile.descriptor<64x64xf16>, !tile.buffer<64x64xf16, shared>, !tile.barriers<2>, i32)
tile.barrier_expect %b[%i], 4096 : !tile.barriers<2>
tile.async_load %d[%i, %i], %s, %b[%i] : !tile.descriptor<64x64xf16>, !tile.buffer<64x64xf16, shared>, !tile.barriers<2>

// -----

// CHECK: needs 2 coordinates, got 1
%d, %s, %b, %i = "test.op"() : () -> (!tile.descriptor<64x64xf16>, !tile.buffer<64x64xf16, shared>, !tile.barriers<2>, i32)
tile.async_load %d[%i], %s, %b[%i] : !tile.descriptor<64x64xf16>, !tile.buffer<64x64xf16, shared>, !tile.barriers<2>

// -----

// CHECK: does not fit
%d, %s, %i = "test.op"() : () -> (!tile.descriptor<2x64x64xf16>, !tile.buffer<64x64xf16, shared>, i32)
tile.async_store %s, %d[%i, %i, %i] : !tile.buffer<64x64xf16, shared>, !tile.descriptor<2x64x64xf16>

// -----

// CHECK: an asynchronous reduction is on f32, f16 or bf16
%d, %s, %i = "test.op"() : () -> (!tile.descriptor<64x64xi32>, !tile.buffer<64x64xi32, shared>, i32)
tile.async_reduce_add %s, %d[%i, %i] : !tile.buffer<64x64xi32, shared>, !tile.descriptor<64x64xi32>

// -----

// CHECK: pending is a count, got -1
tile.async_store_wait -1

// -----

// CHECK: do not fit
%a, %b = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<32x64xf16, shared>)
%p = tile.async_dot %a, %b layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<32x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>

// -----

// CHECK: operands differ in type
%a, %b = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xbf16, shared>)
%p = tile.async_dot %a, %b layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xbf16, shared> -> !tile.pending<tensor<64x64xf32>>

// -----

// A product that nothing waits for.
// CHECK: a pending product is used by one tile.wait or as one accumulator, nothing else
%a, %b = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>)
%p = tile.async_dot %a, %b layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>

// -----

// A pending product is no value.
// CHECK: a pending product is used by one tile.wait or as one accumulator, nothing else
%a, %b = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>)
%p = tile.async_dot %a, %b layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
"test.op"(%p) : (!tile.pending<tensor<64x64xf32>>) -> ()

// -----

// CHECK: the accumulator is consumed by more than one product
%a, %b, %c = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>, tensor<64x64xf32>)
%p = tile.async_dot %a, %b, %c layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>, tensor<64x64xf32> -> !tile.pending<tensor<64x64xf32>>
%q = tile.async_dot %a, %b, %c layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>, tensor<64x64xf32> -> !tile.pending<tensor<64x64xf32>>
%x, %y = tile.wait 0, %p, %q : !tile.pending<tensor<64x64xf32>>, !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>, tensor<64x64xf32>

// -----

// A product in flight across the back edge of a loop.
// CHECK: a pending product is waited for in the block that starts it
%a, %b, %i, %n = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>, i32, i32)
scf.for %j = %i to %n step %n : i32 {
  %p = tile.async_dot %a, %b layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
  scf.for %k = %i to %n step %n : i32 {
    %x = tile.wait 0, %p : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>
  }
}

// -----

// CHECK: with 1 products in flight, one with 0 started after it may be unfinished
%a, %b = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>)
%p = tile.async_dot %a, %b layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
%x = tile.wait 1, %p : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>

// -----

// CHECK: do not divide the columns of
%x = "test.op"() : () -> tensor<64x20xf32>
%l = tile.reduce_partial sum %x groups 4 width 2 : tensor<64x20xf32> -> tensor<64x4xf32>

// -----

// CHECK: trees of 4 do not divide 2 elements
%x = "test.op"() : () -> tensor<64x16xf32>
%l = tile.reduce_partial max %x groups 4 width 2 tree 4 : tensor<64x16xf32> -> tensor<64x4xf32>

// -----

// CHECK: a pin is on f32 tiles
%x = "test.op"() : () -> tensor<64x4xf16>
%l = tile.pin %x : tensor<64x4xf16>

// -----

// CHECK: a role takes no tiles: tensor<64xf32> must go through shared memory
%x = "test.op"() : () -> tensor<64xf32>
tile.roles (%x) : (tensor<64xf32>) role count 1 warps 4 registers 240 {
^bb0(%n: i32, %y: tensor<64xf32>):
  tile.end
}

// -----

// CHECK: a role's arguments are its number (i32) and the captures
%x = "test.op"() : () -> i32
tile.roles (%x) : (i32) role count 1 warps 4 registers 240 {
^bb0(%n: i32):
  tile.end
}

// -----

// CHECK: a role of 1 x 4 warps with 20 registers
tile.roles () : () role count 1 warps 4 registers 20 {
^bb0(%n: i32):
  tile.end
}

// -----

// CHECK: warps along the rows come in fours, got 2x1
%x = "test.op"() : () -> tensor<64x4xf16>
%l = tile.dot_operand %x layout <2x1, 64> : tensor<64x4xf16>

// -----

// CHECK: an array of barriers holds at least one, got 0
%b = tile.make_barriers count 1 : !tile.barriers<0>

// -----

// CHECK: is not a part of
%s, %n = "test.op"() : () -> (!tile.buffer<64x32xf16, shared>, i32)
%t = tile.part %s axis 1 [%n] : !tile.buffer<64x32xf16, shared> -> !tile.buffer<64x48xf16, shared>

// -----

// CHECK: the index of a part is a constant or the number of the role's instance
%s, %n = "test.op"() : () -> (!tile.buffer<64x32xf16, shared>, i32)
%t = tile.part %s axis 1 [%n] : !tile.buffer<64x32xf16, shared> -> !tile.buffer<64x16xf16, shared>

// -----

// CHECK: are not the same bytes
%s = "test.op"() : () -> !tile.buffer<64x32xf32, shared>
%t = tile.alias_slot %s : !tile.buffer<64x32xf32, shared> -> !tile.buffer<64x32xf16, shared>

// -----

// CHECK: instructions of 64 x 128 in all do not divide a result of (64, 64)
%a, %b = "test.op"() : () -> (tensor<64x64xf16>, !tile.buffer<64x64xf16, shared>)
%p = tile.async_dot %a, %b layout <4x1, 128> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
%x = tile.wait 0, %p : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>
