// RUN: attn-opt %s -p hip-choose-layouts,hip-share-lds,hip-place-barriers | attn-opt | filecheck %s

// A left operand lies in LDS, the right ones stay in registers: one is loaded there, one is computed, and its way
// through LDS is gone. Sums over rows are held along the columns.
// CHECK-LABEL: tile.kernel @two_products
// CHECK-SAME: explicit_barriers
tile.kernel @two_products(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %n: i32) attributes {threads = 256 : i64} {
  // CHECK: %left = tile.buffer_alloc layout #tile.padded<8, 16> : !tile.buffer<64x64xf16, shared>
  %left = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  // CHECK: %right = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x4> : !tile.buffer<64x128xf16, register>
  %right = tile.buffer_alloc : !tile.buffer<64x128xf16, shared>
  // CHECK: %s = tile.buffer_alloc layout #tile.mfma<32x32x16, acc, 1x4> : !tile.buffer<64x128xf32, register>
  %s = tile.buffer_alloc : !tile.buffer<64x128xf32, register>
  %p = tile.buffer_alloc : !tile.buffer<64x128xf16, register>
  // CHECK-NOT: %p_shared
  %p_shared = tile.buffer_alloc : !tile.buffer<64x128xf16, shared>
  // CHECK: %m = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x8, acc, 1x4>> : !tile.buffer<128xf32, register>
  %m = tile.buffer_alloc : !tile.buffer<128xf32, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %x[%c0, %c0] dims [1, 0] into %right : !tile.global<2 x f16>, !tile.buffer<64x128xf16, shared>
  tile.buffer_fill %s, %zero : !tile.buffer<64x128xf32, register>, f32
  // CHECK: scf.for
  scf.for %n0 = %c0 to %n step %c64 : i32 {
    // CHECK-NEXT: tile.barrier
    // CHECK-NEXT: tile.copy_in %x[%n0, %c0] dims [0, 1] into %left
    // CHECK-NEXT: tile.barrier
    tile.copy_in %x[%n0, %c0] dims [0, 1] into %left : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    // CHECK-NEXT: tile.gemm %left, %right, %s ieee
    tile.gemm %left, %right, %s ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, shared>, !tile.buffer<64x128xf32, register>
    // CHECK-NEXT: tile.buffer_reduce max %s, 0 into %m
    tile.buffer_reduce max %s, 0 into %m : !tile.buffer<64x128xf32, register>, !tile.buffer<128xf32, register>
    tile.buffer_map (%s, %m) axes [[0, 1], [1]] into (%p) : (!tile.buffer<64x128xf32, register>, !tile.buffer<128xf32, register>) into (!tile.buffer<64x128xf16, register>) {
    ^bb0(%a: f32, %b: f32):
      %d = arith.subf %a, %b : f32
      %h = arith.truncf %d : f32 to f16
      tile.yield %h : f16
    }
    // CHECK-NOT: tile.copy %p
    tile.copy %p, %p_shared : !tile.buffer<64x128xf16, register>, !tile.buffer<64x128xf16, shared>
    // CHECK: tile.gemm %left, %p, %s ieee
    tile.gemm %left, %p_shared, %s ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, shared>, !tile.buffer<64x128xf32, register>
  }
  tile.copy_out %s, %y[%c0, %c0] dims [1, 0] : !tile.buffer<64x128xf32, register>, !tile.global<2 x f32>
  tile.end
}

// Vectors that lie along both axes of tiles meet: the one that is read goes through LDS.
// CHECK-LABEL: tile.kernel @meeting
tile.kernel @meeting(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>) attributes {threads = 64 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %rows = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %columns = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %s : !tile.global<2 x f32>, !tile.buffer<64x64xf32, register>
  tile.buffer_reduce sum %s, 1 into %rows : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.buffer_scan sum %rows, 0 into %rows : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  tile.buffer_reduce sum %s, 0 into %columns : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  // CHECK: tile.copy %rows, %rows_shared
  // CHECK: tile.copy %rows_shared, %rows_turned
  // CHECK: tile.buffer_map (%columns, %rows_turned) axes {{\[\[}}0], [0]] into (%columns)
  tile.buffer_map (%columns, %rows) axes [[0], [0]] into (%columns) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
  ^bb0(%a: f32, %b: f32):
    %c = arith.addf %a, %b : f32
    tile.yield %c : f32
  }
  tile.copy_out %columns, %y[%c0] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}

// One block of an instruction for four waves: each of them computes it.
// CHECK-LABEL: tile.kernel @small
tile.kernel @small(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>) attributes {threads = 256 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<32x32xf16, shared>
  %b = tile.buffer_alloc : !tile.buffer<32x16xf16, shared>
  // CHECK: layout #tile.mfma<16x16x32, acc, 1x1> : !tile.buffer<32x16xf32, register>
  %s = tile.buffer_alloc : !tile.buffer<32x16xf32, register>
  %c0 = arith.constant 0 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<32x32xf16, shared>
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %b : !tile.global<2 x f16>, !tile.buffer<32x16xf16, shared>
  tile.buffer_fill %s, %zero : !tile.buffer<32x16xf32, register>, f32
  tile.gemm %a, %b, %s ieee : !tile.buffer<32x32xf16, shared>, !tile.buffer<32x16xf16, shared>, !tile.buffer<32x16xf32, register>
  tile.copy_out %s, %y[%c0, %c0] dims [0, 1] : !tile.buffer<32x16xf32, register>, !tile.global<2 x f32>
  tile.end
}
