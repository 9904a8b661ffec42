// RUN: attn-opt %s -p tilelang-keep-numbers | filecheck %s

// What is over the limit is kept, and what is computed from it counts anew; not in a loop that copies ahead.
// CHECK-LABEL: tile.kernel @limits(
tile.kernel @limits(%x: i32, %y: i32) attributes {threads = 128 : i64} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  // CHECK: %a = arith.addi %x, %c1 : i32
  // CHECK-NEXT: %[[B:.*]] = arith.addi %a, %c1 : i32
  // CHECK-NEXT: %[[KEPT:.*]] = tile.keep %[[B]] : i32
  // CHECK-NEXT: %d = arith.addi %[[KEPT]], %c1 : i32
  %a = arith.addi %x, %c1 : i32
  %b = arith.addi %a, %c1 : i32
  %d = arith.addi %b, %c1 : i32
  // CHECK-NEXT: scf.for
  scf.for %i = %c0 to %d step %c1 : i32 {
    // CHECK-NEXT: arith.muli %{{.*}}, %i : i32
    // CHECK-NOT: tile.keep
    %e = arith.muli %d, %i : i32
    scf.yield
  } {stages = 2 : i64}
  tile.end
}

// Comparisons of integers that are read are kept in a map that makes integers; those of places are not, nor those of floats.
// CHECK-LABEL: tile.kernel @comparisons(
tile.kernel @comparisons(%x: f32) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64x32xf32, register>
  %v = tile.buffer_alloc : !tile.buffer<64xi32, register>
  %c0 = arith.constant 0 : i32
  tile.buffer_fill %s, %x : !tile.buffer<64x32xf32, register>, f32
  tile.buffer_fill %v, %c0 : !tile.buffer<64xi32, register>, i32
  tile.buffer_map (%s) axes [[0, 1]] into (%s) : (!tile.buffer<64x32xf32, register>) into (!tile.buffer<64x32xf32, register>) {
  ^bb0(%u: f32):
    %zero = arith.constant 0.0 : f32
    // CHECK: arith.cmpf ogt
    // CHECK-NEXT: arith.select
    %f = arith.cmpf ogt, %u, %zero : f32
    %w = arith.select %f, %u, %zero : f32
    tile.yield %w : f32
  }
  tile.buffer_map (%v) axes [[0]] into (%v) : (!tile.buffer<64xi32, register>) into (!tile.buffer<64xi32, register>) {
  ^bb0(%n: i32):
    %place = tile.index 0
    %four = arith.constant 4 : i32
    // CHECK: %[[G:.*]] = arith.cmpi slt, %n, %place : i32
    // CHECK-NEXT: %[[KEPT:.*]] = tile.keep %[[G]] : i1
    // CHECK-NEXT: %[[H:.*]] = arith.cmpi slt, %place, %four : i32
    // CHECK-NEXT: arith.andi %[[KEPT]], %[[H]] : i1
    %g = arith.cmpi slt, %n, %place : i32
    %h = arith.cmpi slt, %place, %four : i32
    %i = arith.andi %g, %h : i1
    %w = arith.select %i, %n, %place : i32
    tile.yield %w : i32
  }
  tile.end
}

// In a kernel with a schedule, all numbers outside of maps lie in places of their own anyway.
// CHECK-LABEL: tile.kernel @scheduled(
tile.kernel @scheduled(%x: i32, %y: i32) attributes {threads = 128 : i64, overlap} {
  // CHECK-NOT: tile.keep
  %a = arith.muli %x, %y : i32
  %b = arith.addi %a, %x : i32
  %c = arith.subi %b, %y : i32
  tile.end
}
