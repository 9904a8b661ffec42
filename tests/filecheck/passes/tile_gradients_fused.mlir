// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-fold-scales,tile-start-products | filecheck %s --check-prefix START
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-fold-scales,tile-start-products,tile-hoist-factors | filecheck %s --check-prefix HOIST
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-pipeline-steps | filecheck %s --check-prefix RING
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-pipeline-steps,tile-split-roles | filecheck %s --check-prefix ROLES
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,'tile-overlap-products{late_reads=false in_flight=0}',tile-rotate-steps,'tile-defer-sums{in_place=false}' | filecheck %s
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,tile-overlap-products,tile-rotate-steps | filecheck %s --check-prefix OWN

// The product of values and gradients starts from the vector that is added to it; the arithmetic does not read that.

// START-LABEL: tile.kernel @backward_dkdv
// START: [[ROW:%.*]] = tile.load %row0
// START: [[BEGIN:%.*]] = tile.map ([[ROW]]) axes
// START: [[DP:%.*]] = tile.dot %v_tile, {{.*}}, [[BEGIN]]
// START: tile.map ([[DP]], {{%[^ ,]*}}) axes

// Where rows are written they are negated, and multiplied for exponentials in base 2; no step does either.

// HOIST-LABEL: tile.kernel @backward_rows
// HOIST: arith.negf
// HOIST: tile.store {{.*}}, %row0
// HOIST: arith.mulf {{.*}}
// HOIST: tile.store {{.*}}, %row1
// HOIST-LABEL: tile.kernel @backward_dkdv
// HOIST: [[ROW:%.*]] = tile.load %row1
// HOIST: %start = tile.map
// HOIST-NEXT: ^bb0([[D:%.*]]: f32):
// HOIST-NEXT: tile.yield [[D]] : f32
// HOIST: tile.map ({{.*}}, [[ROW]])
// HOIST-NEXT: ^bb0({{.*}}, [[R:%.*]]: f32):
// HOIST: arith.subf {{.*}}, [[R]] : f32
// HOIST-NEXT: math.exp2

// dq: scores' gradients to shared memory, all rows of them times the keys, the sum to memory by way of another slot.

// RING-LABEL: tile.kernel @backward_dkdv
// RING: tile.write {{.*}}, [[SHARED:%.*]] : tensor<128x64xf16>
// RING-NEXT: tile.proxy_fence
// RING-NEXT: [[TURNED:%.*]] = tile.transposed_slot [[SHARED]]
// RING: [[DQP:%.*]] = tile.async_dot [[TURNED]], %k_tile{{.*}} layout <4x2, 8>
// RING: [[DQ:%.*]] = tile.wait 0, [[DQP]]
// RING: tile.async_store_wait 0
// RING: tile.write [[DQ]], [[SUMS:%.*]] :
// RING-NEXT: tile.proxy_fence
// RING-NEXT: tile.async_reduce_add [[SUMS]], %dq_sums_copies

// A consumer writes its rows, waits for those of the others, and adds its columns. Keys stay one block, which all must
// have read before results leave through it.

// ROLES-LABEL: tile.kernel @backward_dkdv
// ROLES: %written = tile.make_barriers count 2 : !tile.barriers<2>
// ROLES: %ks = tile.ring : !tile.buffer<1x128x16xf16, shared>
// ROLES: %vs = tile.ring : !tile.buffer<2x64x16xf16, shared>
// ROLES: tile.part {{.*}} axis 0[%part] : !tile.buffer<128x64xf16, shared>
// ROLES: tile.part {{.*}} axis 1[%part] : !tile.buffer<128x16xf16, shared> -> !tile.buffer<128x8xf16, shared>
// ROLES: tile.barrier_arrive %written
// ROLES: tile.barrier_wait %written
// ROLES: tile.async_reduce_add {{.*}} : !tile.buffer<64x8xf32, shared>, !tile.descriptor<1x1x64x8xf32>
// ROLES: tile.barrier_arrive %done
// ROLES: tile.barrier_wait %done
// ROLES-NEXT: tile.write

// The sum of a step is multiplied and added in the next one, and that of the last step behind the loops.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK: %before{{.*}} = arith.constant 134217728 : i32
// CHECK: scf.for
// CHECK: scf.for
// CHECK: tile.barrier_wait %written
// CHECK-NEXT: [[DQP:%.*]] = tile.async_dot
// CHECK: math.exp2
// CHECK: [[DQ:%.*]] = tile.wait 0, [[DQP]]
// CHECK: tile.write [[DQ]]
// CHECK: tile.async_reduce_add {{.*}}, %before
// CHECK: tile.barrier_wait %d_o_full
// CHECK: tile.async_dot
// CHECK: tile.barrier_arrive %written
// CHECK: tile.wait 1
// CHECK: scf.yield
// CHECK: scf.yield
// CHECK: tile.barrier_wait %written
// CHECK: tile.async_dot
// CHECK: tile.async_reduce_add
// CHECK: role count 1

// In its own step it starts behind dk, once dv has ended, and is added under the next step's scores.

// OWN-LABEL: tile.kernel @backward_dkdv
// OWN: scf.for
// OWN: scf.for
// OWN: tile.barrier_wait %d_o_full
// OWN: tile.async_dot %v_tile
// OWN: math.exp2
// OWN: [[DV:%.*]] = tile.async_dot {{.*}}, %d_o_tile, %dv
// OWN: tile.wait 1, %pending
// OWN: [[DK:%.*]] = tile.async_dot {{.*}}, %q_tile
// OWN: tile.barrier_arrive %written
// OWN-NEXT: tile.barrier_wait %written
// OWN: tile.wait 1, [[DV]]
// OWN: [[DQ:%.*]] = tile.async_dot %shared_turned
// OWN: tile.barrier_wait %q_full
// OWN: tile.async_dot %k_tile
// OWN: tile.wait 1, [[DK]], [[DQ]]
// OWN: tile.barrier_arrive %free
// OWN: tile.async_reduce_add
// OWN: tile.wait 0
// OWN: scf.yield
