// RUN: attn-opt %s -p tilelang-flatten-loops | filecheck %s

// A loop over blocks in a loop over heads: one loop, before which its bounds are computed, and sums go in once.
// CHECK-LABEL: tile.kernel @k(
tile.kernel @k(%x: !tile.global<2 x f32>, %n: i32, %first: i32, %group: i32) attributes {threads = 128 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %sum = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %acc = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %sum, %zero : !tile.buffer<64xf32, register>, f32
  // CHECK: %full = arith.muli %blocks, %c64 : i32
  // CHECK: %[[COUNT:.*]] = arith.ceildivsi %full, %c64 : i32
  // CHECK: %[[TRIPS:.*]] = arith.maxsi %[[COUNT]], %{{.*}} : i32
  // CHECK: %[[ALL:.*]] = arith.muli %{{.*}}, %[[TRIPS]] : i32
  // CHECK: %[[ONE:.*]] = arith.constant 1 : i32
  // CHECK: %[[DIVISOR:.*]] = arith.maxsi %[[TRIPS]], %[[ONE]] : i32
  // CHECK: tile.copy %sum, %acc
  // CHECK-NEXT: scf.for %[[T:.*]] = %{{.*}} to %[[ALL]] step %{{.*}} : i32 {
  // CHECK-DAG: %[[G:.*]] = arith.divsi %[[T]], %[[DIVISOR]] : i32
  // CHECK-DAG: %[[B:.*]] = arith.remsi %[[T]], %[[DIVISOR]] : i32
  // CHECK: %[[J:.*]] = arith.muli %[[B]], %c64 : i32
  // CHECK: %[[H:.*]] = arith.addi %first, %[[G]] : i32
  // CHECK-NEXT: tile.copy_in %x[%[[H]], %[[J]]]
  // CHECK: } {stages = 3 : i64}
  // CHECK-NEXT: tile.copy %acc, %sum
  scf.for %g = %c0 to %group step %c1 : i32 {
    %blocks = arith.divsi %n, %c64 : i32
    %full = arith.muli %blocks, %c64 : i32
    %h = arith.addi %first, %g : i32
    tile.copy %sum, %acc : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
    scf.for %j = %c0 to %full step %c64 : i32 {
      tile.copy_in %x[%h, %j] dims [1] into %a : !tile.global<2 x f32>, !tile.buffer<64xf32, register>
      tile.buffer_map (%acc, %a) axes [[0], [0]] into (%acc) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
      ^bb0(%u: f32, %w: f32):
        %r = arith.addf %u, %w : f32
        tile.yield %r : f32
      }
    } {stages = 3 : i64}
    tile.copy %acc, %sum : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  }
  tile.copy_out %sum, %x[%c0, %c0] dims [1] : !tile.buffer<64xf32, register>, !tile.global<2 x f32>
  tile.end
}

// Where the blocks differ from head to head, nothing is copied ahead.
// CHECK-LABEL: tile.kernel @changing(
tile.kernel @changing(%x: !tile.global<2 x f32>, %group: i32) attributes {threads = 128 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // CHECK: scf.for %g
  // CHECK: scf.for %j
  // CHECK-NOT: stages
  scf.for %g = %c0 to %group step %c1 : i32 {
    scf.for %j = %c0 to %g step %c1 : i32 {
      tile.copy_in %x[%g, %j] dims [1] into %a : !tile.global<2 x f32>, !tile.buffer<64xf32, register>
    } {stages = 3 : i64}
  }
  tile.end
}

// A sum that the inner loop reads must be as the head before left it.
// CHECK-LABEL: tile.kernel @read_inside(
tile.kernel @read_inside(%x: !tile.global<2 x f32>, %group: i32) attributes {threads = 128 : i64} {
  %sum = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %acc = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %a = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %zero = arith.constant 0.0 : f32
  tile.buffer_fill %sum, %zero : !tile.buffer<64xf32, register>, f32
  // CHECK: scf.for %g
  // CHECK: scf.for %j
  // CHECK-NOT: stages
  scf.for %g = %c0 to %group step %c1 : i32 {
    tile.copy %sum, %acc : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
    scf.for %j = %c0 to %group step %c1 : i32 {
      tile.copy_in %x[%g, %j] dims [1] into %a : !tile.global<2 x f32>, !tile.buffer<64xf32, register>
      tile.buffer_map (%acc, %a, %sum) axes [[0], [0], [0]] into (%acc) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
      ^bb0(%u: f32, %w: f32, %s: f32):
        %p = arith.mulf %w, %s : f32
        %r = arith.addf %u, %p : f32
        tile.yield %r : f32
      }
    } {stages = 3 : i64}
    tile.copy %acc, %sum : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
  }
  tile.copy_out %sum, %x[%c0, %c0] dims [1] : !tile.buffer<64xf32, register>, !tile.global<2 x f32>
  tile.end
}
