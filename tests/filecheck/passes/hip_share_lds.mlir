// RUN: attn-opt %s -p hip-share-lds,hip-place-barriers | attn-opt | filecheck %s

// The tiles of two loops, one after the other, are one; a tile that the second loop still reads is not.
// CHECK-LABEL: tile.kernel @loops
tile.kernel @loops(%x: !tile.global<2 x f32>, %n: i32) attributes {threads = 256 : i64} {
  // CHECK-NEXT: %whole = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  %whole = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  // CHECK-NEXT: %a = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  %a = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  // CHECK-NEXT: %c0 =
  %b = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %whole : !tile.global<2 x f32>, !tile.buffer<64x64xf32, shared>
  scf.for %i = %c0 to %n step %c64 : i32 {
    // CHECK: tile.copy_in %x[%i, %c0] dims [0, 1] into %a
    tile.copy_in %x[%i, %c0] dims [0, 1] into %a : !tile.global<2 x f32>, !tile.buffer<64x64xf32, shared>
    tile.copy_out %a, %x[%i, %c0] dims [0, 1] : !tile.buffer<64x64xf32, shared>, !tile.global<2 x f32>
  }
  scf.for %j = %c0 to %n step %c64 : i32 {
    // CHECK: tile.copy_in %x[%j, %c0] dims [0, 1] into %a
    tile.copy_in %x[%j, %c0] dims [0, 1] into %b : !tile.global<2 x f32>, !tile.buffer<64x64xf32, shared>
    tile.copy_out %b, %x[%j, %c0] dims [0, 1] : !tile.buffer<64x64xf32, shared>, !tile.global<2 x f32>
    // CHECK: tile.copy_out %whole
    tile.copy_out %whole, %x[%j, %c64] dims [0, 1] : !tile.buffer<64x64xf32, shared>, !tile.global<2 x f32>
  }
  tile.end
}

// LDS would be too small: the copy goes down to what reads it, and a tile of another type takes the memory of one that
// is done with by then. Barriers are placed by memory.
// CHECK-LABEL: tile.kernel @too_large
tile.kernel @too_large(%x: !tile.global<2 x f32>, %y: !tile.global<2 x f16>, %n: i32) attributes {threads = 256 : i64} {
  // CHECK-NEXT: %a = tile.buffer_alloc : !tile.buffer<128x96xf32, shared>
  %a = tile.buffer_alloc : !tile.buffer<128x96xf32, shared>
  // CHECK-NEXT: %b = tile.buffer_alloc layout #tile.padded<8> in %a : !tile.buffer<128x96xf16, shared> in !tile.buffer<128x96xf32, shared>
  %b = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<128x96xf16, shared>
  %c0 = arith.constant 0 : i32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %a : !tile.global<2 x f32>, !tile.buffer<128x96xf32, shared>
  tile.copy_in %y[%c0, %c0] dims [0, 1] into %b : !tile.global<2 x f16>, !tile.buffer<128x96xf16, shared>
  // CHECK: tile.barrier
  // CHECK-NEXT: tile.copy_out %a
  tile.copy_out %a, %x[%n, %c0] dims [0, 1] : !tile.buffer<128x96xf32, shared>, !tile.global<2 x f32>
  // CHECK-NEXT: tile.barrier
  // CHECK-NEXT: tile.copy_in %y[%c0, %c0] dims [0, 1] into %b
  // CHECK-NEXT: tile.barrier
  // CHECK-NEXT: tile.copy_out %b
  tile.copy_out %b, %y[%n, %c0] dims [0, 1] : !tile.buffer<128x96xf16, shared>, !tile.global<2 x f16>
  tile.end
}
