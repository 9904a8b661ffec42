// RUN: attn-opt %s -p tilelang-share-operands | filecheck %s

// Eight warps share the columns of 64 rows: the left operand goes to shared memory. Those that share rows keep it.
// CHECK-LABEL: tile.kernel @k(
tile.kernel @k(%x: !tile.global<2 x f32>, %n: i32) attributes {threads = 256 : i64} {
  // CHECK: %[[TWIN:.*]] = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %p = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %vs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %acc = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %zero = arith.constant 0.0 : f32
  %half = arith.constant 1.0 : f16
  tile.buffer_fill %acc, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.buffer_fill %p, %half : !tile.buffer<64x64xf16, register>, f16
  tile.copy %p, %vs : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>
  // CHECK: tile.copy %p, %vs
  // CHECK-NEXT: tile.copy %p, %[[TWIN]]
  // CHECK-NEXT: tile.gemm %[[TWIN]], %vs, %acc ieee split both
  // CHECK-NEXT: tile.gemm %p, %vs, %acc ieee split rows
  tile.gemm %p, %vs, %acc ieee split both : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  tile.gemm %p, %vs, %acc ieee split rows : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  tile.copy_out %acc, %x[%n, %n] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  tile.end
}

// Of a product in tf32 threads hold other columns of the left operand than of the result.
// CHECK-LABEL: tile.kernel @wide(
tile.kernel @wide(%x: !tile.global<2 x f32>, %n: i32) attributes {threads = 128 : i64} {
  // CHECK: %[[TWIN:.*]] = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  %p = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %vs = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  %acc = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %acc, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.buffer_fill %p, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy %p, %vs : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, shared>
  // CHECK: tile.gemm %[[TWIN]], %vs, %acc tf32 split rows
  tile.gemm %p, %vs, %acc tf32 split rows : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, shared>, !tile.buffer<64x64xf32, register>
  tile.copy_out %acc, %x[%n, %n] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  tile.end
}
