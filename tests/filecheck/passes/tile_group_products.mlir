// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,tile-overlap-products,tile-rotate-steps,tile-group-products | filecheck %s

// The product for dp stands in front of the exponentials: these come behind all of it. That for dv, in front of a wait, needs nothing.

// CHECK: scf.for %q0
// CHECK: %pending{{.*}} = tile.async_dot %v_tile{{.*}}, %d_o_tile_turned
// CHECK-NEXT: tile.sched_barrier
// CHECK: math.exp2
// CHECK: tile.async_dot %operand
// CHECK-NOT: tile.sched_barrier
// CHECK: tile.end
