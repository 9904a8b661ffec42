// RUN: attn-opt %s -p tilelang-share-vectors | filecheck %s

// A loaded vector along rows and columns of one tile, and what is computed from it: it is loaded to shared memory.
// CHECK-LABEL: tile.kernel @loaded(
tile.kernel @loaded(%x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  // CHECK: %g = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  %g = tile.buffer_alloc : !tile.buffer<64xf32, register>
  // CHECK: %e = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %e = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  // CHECK: tile.copy_in %x[%n] dims [0] into %g : {{.*}}, !tile.buffer<64xf32, shared>
  tile.copy_in %x[%n] dims [0] into %g : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
  tile.buffer_map (%g) axes [[0]] into (%e) : (!tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
  ^bb0(%u: f32):
    %w = math.exp2 %u : f32
    tile.yield %w : f32
  }
  // CHECK-NOT: tile.copy %
  // CHECK: tile.buffer_map (%s, %g, %g, %e) axes {{\[\[}}0, 1], [0], [1], [0]] into (%s)
  tile.buffer_map (%s, %g, %g, %e) axes [[0, 1], [0], [1], [0]] into (%s) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%u: f32, %row: f32, %column: f32, %factor: f32):
    %d = arith.subf %row, %column : f32
    %m = arith.mulf %d, %factor : f32
    %w = arith.addf %u, %m : f32
    tile.yield %w : f32
  }
  tile.copy_out %e, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}

// Sums along both axes that meet: those outside of the loop are turned, and one copy serves two reads.
// CHECK-LABEL: tile.kernel @computed(
tile.kernel @computed(%x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  // CHECK-DAG: %[[TWIN:.*]] = tile.buffer_alloc : !tile.buffer<64xf32, shared>
  %after = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %rows = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %sum = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  // CHECK: tile.buffer_reduce sum %s, 1 into %[[OWN:.*]] :
  // CHECK-NEXT: tile.copy %[[OWN]], %[[SHARED:.*]] :
  // CHECK-NEXT: tile.copy %[[SHARED]], %rows{{.*}} :
  tile.buffer_reduce sum %s, 1 into %rows : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy %rows, %after : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  // CHECK: scf.for
  // CHECK-NEXT: tile.buffer_reduce sum %s, 0 into %sum :
  scf.for %i = %c0 to %n step %c1 : i32 {
    tile.buffer_reduce sum %s, 0 into %sum : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
    tile.buffer_map (%after, %sum) axes [[0], [0]] into (%after) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
    ^bb0(%u: f32, %w: f32):
      %r = arith.addf %u, %w : f32
      tile.yield %r : f32
    }
  }
  // CHECK: tile.copy %after, %after_shared
  // CHECK-NEXT: tile.buffer_map (%s, %after_shared)
  // CHECK-NOT: tile.copy %
  // CHECK: tile.buffer_map (%s, %after_shared)
  tile.buffer_map (%s, %after) axes [[0, 1], [0]] into (%s) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%u: f32, %w: f32):
    %r = arith.addf %u, %w : f32
    tile.yield %r : f32
  }
  tile.buffer_map (%s, %after) axes [[0, 1], [0]] into (%s) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%u: f32, %w: f32):
    %r = arith.mulf %u, %w : f32
    tile.yield %r : f32
  }
  tile.copy_out %after, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}

// Along one axis only: nothing changes.
// CHECK-LABEL: tile.kernel @rows(
// CHECK-NOT: shared
tile.kernel @rows(%x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %g = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy_in %x[%n] dims [0] into %g : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
  tile.buffer_map (%s, %g) axes [[0, 1], [0]] into (%s) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%u: f32, %w: f32):
    %r = arith.addf %u, %w : f32
    tile.yield %r : f32
  }
  tile.buffer_reduce sum %s, 1 into %g : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.copy_out %g, %x[%n] dims [0] : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
  tile.end
}

// Without products, tiles of other sizes lie otherwise: a sum of one goes to another through shared memory.
// CHECK-LABEL: tile.kernel @sizes(
tile.kernel @sizes(%x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %rows = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x16xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  // CHECK: tile.buffer_reduce sum %s, 1 into %[[OWN:.*]] :
  // CHECK-NEXT: tile.copy %[[OWN]], %[[SHARED:.*]] : {{.*}}, !tile.buffer<64xf32, shared>
  // CHECK-NEXT: tile.copy %[[SHARED]], %rows{{.*}} :
  tile.buffer_reduce sum %s, 1 into %rows : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  tile.buffer_map (%rows) axes [[0]] into (%t) : (!tile.buffer<64xf32, register>) into (!tile.buffer<64x16xf32, register>) {
  ^bb0(%u: f32):
    tile.yield %u : f32
  }
  tile.end
}

// A tile that no product fixes lies otherwise, too: its sum goes to the accumulator through shared memory.
// CHECK-LABEL: tile.kernel @free(
tile.kernel @free(%y: !tile.global<2 x f16>, %n: i32) attributes {threads = 256 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %t = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %sums = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.buffer_fill %t, %zero : !tile.buffer<64x64xf32, register>, f32
  tile.copy_in %y[%n, %n] dims [0, 1] into %a : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.gemm %a, %a, %s ieee split both : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  // CHECK: tile.buffer_reduce sum %t, 1 into %[[OWN:.*]] :
  // CHECK-NEXT: tile.copy %[[OWN]], %[[SHARED:.*]] : {{.*}}, !tile.buffer<64xf32, shared>
  // CHECK-NEXT: tile.copy %[[SHARED]], %[[SUMS:.*]] :
  tile.buffer_reduce sum %t, 1 into %sums : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
  // CHECK-NEXT: tile.buffer_map (%s, %[[SUMS]])
  tile.buffer_map (%s, %sums) axes [[0, 1], [0]] into (%s) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
  ^bb0(%e: f32, %row: f32):
    %w = arith.addf %e, %row : f32
    tile.yield %w : f32
  }
  tile.end
}
