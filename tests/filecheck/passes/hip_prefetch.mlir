// RUN: attn-opt %s -p hip-prefetch | attn-opt | filecheck %s

// The tile and the vector of the next block are on their way while this one is computed with; the barrier for this
// block's tile comes first. The place of the vector is computed in the loop, and so anew for the next block.
// CHECK-LABEL: tile.kernel @staged
tile.kernel @staged(%x: !tile.global<2 x f16>, %l: !tile.global<1 x f32>, %y: !tile.global<2 x f32>, %n: i32, %q: i32) attributes {threads = 256 : i64, explicit_barriers} {
  // CHECK: %next_left = tile.buffer_alloc layout #tile.staged<1> : !tile.buffer<64x64xf16, register>
  // CHECK: %next_row = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x16, acc, 1x4>> : !tile.buffer<128xf32, register>
  %left = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x64xf16, shared>
  %right = tile.buffer_alloc layout #tile.mfma<32x32x16, acc, 1x4> : !tile.buffer<64x128xf16, register>
  %s = tile.buffer_alloc layout #tile.mfma<32x32x16, acc, 1x4> : !tile.buffer<64x128xf32, register>
  %row = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x16, acc, 1x4>> : !tile.buffer<128xf32, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %x[%c0, %c0] dims [1, 0] into %right : !tile.global<2 x f16>, !tile.buffer<64x128xf16, register>
  tile.buffer_fill %s, %zero : !tile.buffer<64x128xf32, register>, f32
  // CHECK: %[[RUNS:.*]] = arith.cmpi slt, %c0, %n : i32
  // CHECK-NEXT: scf.if %[[RUNS]] {
  // CHECK-NEXT: tile.copy_in %x[%c0, %c0] dims [0, 1] bounded [0] limits(%n) into %next_left
  // CHECK: %[[AT:.*]] = arith.muli %c0, %q : i32
  // CHECK-NEXT: tile.copy_in %l[%[[AT]]] dims [0] into %next_row
  // CHECK: } else {
  // CHECK: tile.buffer_fill %next_left,
  // CHECK: tile.buffer_fill %next_row,
  // CHECK: scf.for %n0 = %c0 to %n step %c64 : i32 {
  scf.for %n0 = %c0 to %n step %c64 : i32 {
    // CHECK-NEXT: tile.barrier
    // CHECK-NEXT: tile.copy %next_left, %left
    tile.barrier
    tile.copy_in %x[%n0, %c0] dims [0, 1] bounded [0] limits(%n) into %left : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    %at = arith.muli %n0, %q : i32
    // CHECK: tile.copy %next_row, %row
    tile.copy_in %l[%at] dims [0] into %row : !tile.global<1 x f32>, !tile.buffer<128xf32, register>
    // CHECK-NEXT: tile.barrier
    // CHECK-NEXT: %next_n0 = arith.addi %n0, %c64 : i32
    // CHECK-NEXT: %more = arith.cmpi slt, %next_n0, %n : i32
    // CHECK-NEXT: scf.if %more {
    // CHECK-NEXT: tile.copy_in %x[%next_n0, %c0] dims [0, 1] bounded [0] limits(%n) into %next_left
    // CHECK: %[[NEXT:.*]] = arith.muli %next_n0, %q : i32
    // CHECK-NEXT: tile.copy_in %l[%[[NEXT]]] dims [0] into %next_row
    // CHECK-NEXT: }
    // CHECK-NEXT: tile.gemm %left, %right, %s ieee
    tile.barrier
    tile.gemm %left, %right, %s ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, register>, !tile.buffer<64x128xf32, register>
    tile.buffer_map (%s, %row) axes [[0, 1], [1]] into (%s) : (!tile.buffer<64x128xf32, register>, !tile.buffer<128xf32, register>) into (!tile.buffer<64x128xf32, register>) {
    ^bb0(%a: f32, %b: f32):
      %d = arith.subf %a, %b : f32
      tile.yield %d : f32
    }
  } {stages = 2 : i64}
  tile.copy_out %s, %y[%c0, %c0] dims [0, 1] : !tile.buffer<64x128xf32, register>, !tile.global<2 x f32>
  tile.end
}

// A loop that adds to what it reads, and one of a single stage, stay as they are.
// CHECK-LABEL: tile.kernel @as_it_is
// CHECK-NOT: next_
tile.kernel @as_it_is(%x: !tile.global<2 x f32>, %n: i32) attributes {threads = 256 : i64, explicit_barriers} {
  %t = tile.buffer_alloc layout #tile.padded<4> : !tile.buffer<64x64xf32, shared>
  %u = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 2x2> : !tile.buffer<64x64xf32, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  scf.for %i = %c0 to %n step %c64 : i32 {
    tile.barrier
    tile.copy_in %x[%i, %c0] dims [0, 1] into %t : !tile.global<2 x f32>, !tile.buffer<64x64xf32, shared>
    tile.barrier
    tile.copy %t, %u : !tile.buffer<64x64xf32, shared>, !tile.buffer<64x64xf32, register>
    tile.buffer_atomic_add %u, %x[%i, %c0] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  } {stages = 2 : i64}
  scf.for %i = %c0 to %n step %c64 : i32 {
    tile.barrier
    tile.copy_in %x[%i, %c0] dims [0, 1] into %t : !tile.global<2 x f32>, !tile.buffer<64x64xf32, shared>
  }
  tile.end
}
