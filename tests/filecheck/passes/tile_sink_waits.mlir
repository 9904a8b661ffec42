// Waits for blocks that a program owns go down to their first use: k behind the loads of ranges, v in front of the loops.
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,tile-overlap-products,tile-rotate-steps,tile-defer-sums,tile-sink-waits | filecheck %s

// CHECK: tile.roles
// CHECK: role count 2
// CHECK-NOT: tile.barrier_wait
// CHECK: tile.barrier_wait %[[KFULL:k_full[_0-9]*]][
// CHECK-NEXT: %k_tile = tile.slot
// CHECK: tile.barrier_wait %[[QFULL:q_full[_0-9]*]][
// CHECK-NEXT: %pending = tile.async_dot
// CHECK: tile.barrier_wait %[[VFULL:v_full[_0-9]*]][
// CHECK-NEXT: scf.for
// CHECK: tile.end
