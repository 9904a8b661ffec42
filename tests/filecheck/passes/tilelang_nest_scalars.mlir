// RUN: attn-opt %s -p tilelang-nest-scalars | filecheck %s

// A pipelined loop in a loop over heads: what bounds it, and the loop before it, is computed in the loop over heads.
// CHECK-LABEL: tile.kernel @k(
tile.kernel @k(%x: !tile.global<2 x f32>, %n: i32, %group: i32) attributes {threads = 128 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c64 = arith.constant 64 : i32
  // CHECK-NOT: arith.divsi
  // CHECK: scf.for %g =
  %blocks = arith.divsi %n, %c64 : i32
  %full = arith.muli %blocks, %c64 : i32
  scf.for %g = %c0 to %group step %c1 : i32 {
    // CHECK: %[[BLOCKS:.*]] = arith.divsi %n, %c64 : i32
    // CHECK: %[[FULL:.*]] = arith.muli %[[BLOCKS]], %c64 : i32
    // CHECK: scf.for %i = %[[FULL]] to %n step %c64 : i32 {
    scf.for %i = %full to %n step %c64 : i32 {
      tile.copy_in %x[%g, %i] dims [1] bounded [0] limits(%n) into %a : !tile.global<2 x f32>, !tile.buffer<64xf32, register>
    }
    // CHECK: scf.for %j = %c0 to %[[FULL]] step %c64
    scf.for %j = %c0 to %full step %c64 : i32 {
      tile.copy_in %x[%g, %j] dims [1] into %a : !tile.global<2 x f32>, !tile.buffer<64xf32, register>
    } {stages = 3 : i64}
  }
  tile.end
}

// Without a pipelined loop nothing moves.
// CHECK-LABEL: tile.kernel @plain(
tile.kernel @plain(%x: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %a = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  // CHECK: arith.divsi
  // CHECK: scf.for
  // CHECK-NOT: arith.divsi
  %half = arith.divsi %n, %c64 : i32
  scf.for %i = %c0 to %n step %c64 : i32 {
    tile.copy_in %x[%half] dims [0] into %a : !tile.global<1 x f32>, !tile.buffer<64xf32, register>
  }
  tile.end
}
