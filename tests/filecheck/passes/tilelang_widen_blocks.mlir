// RUN: attn-opt %s -p 'tilelang-widen-blocks{registers=40 threads=256}' | filecheck %s

// Two tiles of 32 registers are held at a time in the loop, of which one is read in the next iteration alone.
// CHECK-LABEL: tile.kernel @two(
// CHECK-SAME: threads = 256
tile.kernel @two(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.buffer_fill %t, %zero : !tile.buffer<64x64xf32, register>, f32
  scf.for %i = %c0 to %n step %c1 : i32 {
    tile.copy_out %t, %y[%i, %c0] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
    tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
    // CHECK: tile.gemm
    // CHECK-SAME: split both
    tile.gemm %a, %a, %s ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    tile.buffer_map (%s, %t) axes [[0, 1], [0, 1]] into (%t) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
    ^bb0(%u: f32, %v: f32):
      %w = arith.addf %u, %v : f32
      tile.yield %w : f32
    }
  }
  tile.end
}

// One after the other: 32 registers at a time.
// CHECK-LABEL: tile.kernel @one(
// CHECK-SAME: threads = 128
tile.kernel @one(%y: !tile.global<2 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy_out %s, %y[%n, %n] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  tile.buffer_fill %t, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy_out %t, %y[%n, %n] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  tile.end
}

// A tile of 16 bits takes half, one in shared memory nothing; a block is never wider than the widest.
// CHECK-LABEL: tile.kernel @halves(
// CHECK-SAME: threads = 128
tile.kernel @halves(%y: !tile.global<2 x f16>, %n: i32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<128x64xf16, register>
  %t = tile.buffer_alloc : !tile.buffer<128x64xf16, shared>
  %zero = arith.constant 0.0 : f16
  tile.buffer_fill %s, %zero : !tile.buffer<128x64xf16, register>, f16
  tile.copy %s, %t : !tile.buffer<128x64xf16, register>, !tile.buffer<128x64xf16, shared>
  tile.copy_out %t, %y[%n, %n] dims [0, 1] : !tile.buffer<128x64xf16, shared>, !tile.global<2 x f16>
  tile.end
}

// CHECK-LABEL: tile.kernel @large(
// CHECK-SAME: threads = 256
tile.kernel @large(%y: !tile.global<2 x f32>, %n: i32) attributes {threads = 256 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<256x128xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<256x128xf32, register>, f32
  tile.copy_out %s, %y[%n, %n] dims [0, 1] : !tile.buffer<256x128xf32, register>, !tile.global<2 x f32>
  tile.end
}
