// RUN: attn-opt %s -p tilelang-share-rows | filecheck %s

// Warps share the columns of the accumulator: its sum over rows is of a tile that threads hold in another way; that over
// columns, and that over rows of a tile which no product fixes, stay.
// CHECK-LABEL: tile.kernel @shared_columns(
tile.kernel @shared_columns(%y: !tile.global<2 x f16>, %x: !tile.global<1 x f32>, %n: i32) attributes {threads = 256 : i64} {
  // CHECK: %[[TWIN:.*]] = tile.buffer_alloc : !tile.buffer<64x64xf32, shared>
  // CHECK-NEXT: %[[OWN:.*]] = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %a = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %free = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %v = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.buffer_fill %free, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy_in %y[%n, %n] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.gemm %a, %a, %s ieee split both : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  // CHECK: tile.buffer_map (%s) axes {{.*}} into (%[[TILE:.*]]) :
  tile.buffer_map (%s) axes [[0, 1]] into (%t) : (!tile.buffer<64x64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%e: f32):
    %w = math.exp2 %e : f32
    tile.yield %w : f32
  }
  // CHECK: tile.copy %[[TILE]], %[[TWIN]] :
  // CHECK-NEXT: tile.copy %[[TWIN]], %[[OWN]] :
  // CHECK-NEXT: tile.buffer_reduce sum %[[OWN]], 0 into %v
  tile.buffer_reduce sum %t, 0 into %v : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  // CHECK-NEXT: tile.copy_out
  tile.copy_out %v, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  // CHECK-NEXT: tile.buffer_reduce sum %[[TILE]], 1 into %v
  tile.buffer_reduce sum %t, 1 into %v : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %v, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  // CHECK: tile.buffer_reduce sum %free, 0 into %v
  tile.buffer_reduce sum %free, 0 into %v : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %v, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}

// Warps share the rows alone: nothing changes.
// CHECK-LABEL: tile.kernel @rows(
tile.kernel @rows(%y: !tile.global<2 x f16>, %x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  // CHECK-NOT: tile.copy %
  %a = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %v = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy_in %y[%n, %n] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.gemm %a, %a, %s ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  tile.buffer_reduce sum %s, 0 into %v : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %v, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}

// Four warps hold 64 rows at a time: sums over 128 are of a tile, and of a vector, that threads hold in another way.
// CHECK-LABEL: tile.kernel @alternating(
tile.kernel @alternating(%y: !tile.global<2 x f16>, %x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  // CHECK: %[[ROWS:.*]] = tile.buffer_alloc : !tile.buffer<128xf32, shared>
  // CHECK: %[[TWIN:.*]] = tile.buffer_alloc : !tile.buffer<128x64xf32, shared>
  %a = tile.buffer_alloc : !tile.buffer<128x64xf16, shared>
  %b = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<128x64xf32, register>
  %v = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %r = tile.buffer_alloc : !tile.buffer<128xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<128x64xf32, register>, f32
  tile.copy_in %y[%n, %n] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<128x64xf16, shared>
  tile.copy_in %y[%n, %n] dims [0, 1] into %b : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.gemm %a, %b, %s ieee split rows : !tile.buffer<128x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<128x64xf32, register>
  // CHECK: tile.copy %[[TILE:.*]], %[[TWIN]] :
  // CHECK-NEXT: tile.copy %[[TWIN]], %[[OWN:.*]] :
  // CHECK-NEXT: tile.buffer_reduce sum %[[OWN]], 0 into %v
  tile.buffer_reduce sum %s, 0 into %v : !tile.buffer<128x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %v, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  // CHECK: tile.buffer_reduce sum %[[TILE]], 1 into %[[VECTOR:.*]] :
  // CHECK-NEXT: tile.copy %[[VECTOR]], %[[ROWS]] :
  // CHECK-NEXT: tile.copy %[[ROWS]], %[[OWN_ROWS:.*]] :
  // CHECK-NEXT: tile.buffer_total sum %[[OWN_ROWS]]
  tile.buffer_reduce sum %s, 1 into %r : !tile.buffer<128x64xf32, register>, !tile.buffer<128xf32, register>
  %t = tile.buffer_total sum %r : !tile.buffer<128xf32, register> -> f32
  tile.store %t, %x[%n] dims [] : f32, !tile.global<1 x f32>
  tile.end
}

// Nor do eight warps hold all 128 rows so that a sum over them finds whole parts of a column.
// CHECK-LABEL: tile.kernel @eight_warps(
tile.kernel @eight_warps(%y: !tile.global<2 x f16>, %x: !tile.global<1 x f32>, %n: i32) attributes {threads = 256 : i64} {
  // CHECK: %[[TWIN:.*]] = tile.buffer_alloc : !tile.buffer<128x64xf32, shared>
  %a = tile.buffer_alloc : !tile.buffer<128x64xf16, shared>
  %b = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<128x64xf32, register>
  %v = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<128x64xf32, register>, f32
  tile.copy_in %y[%n, %n] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<128x64xf16, shared>
  tile.copy_in %y[%n, %n] dims [0, 1] into %b : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.gemm %a, %b, %s ieee split rows : !tile.buffer<128x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<128x64xf32, register>
  // CHECK: tile.copy %{{.*}}, %[[TWIN]] :
  // CHECK-NEXT: tile.copy %[[TWIN]], %[[OWN:.*]] :
  // CHECK-NEXT: tile.buffer_reduce sum %[[OWN]], 0 into %v
  tile.buffer_reduce sum %s, 0 into %v : !tile.buffer<128x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %v, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}
