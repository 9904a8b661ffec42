// Waits for blocks that a program owns go down to their first use: k behind the loads of ranges, v in front of the loops.
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,tile-overlap-products,tile-rotate-steps,tile-defer-sums,tile-sink-waits | filecheck %s

// CHECK: tile.roles
// CHECK: %part_rows = arith.muli
// CHECK-NEXT: %c0 = arith.constant
// CHECK-NEXT: %i = tile.program_id 0
// CHECK: %zero = tile.opaque_zero
// CHECK-NEXT: tile.barrier_wait %k_full
// CHECK-NEXT: %k_tile = tile.slot
// CHECK: tile.barrier_wait %q_full
// CHECK-NEXT: %pending = tile.async_dot
// CHECK: tile.barrier_wait %v_full
// CHECK-NEXT: scf.for
