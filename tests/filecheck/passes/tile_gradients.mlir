// RUN: attn-opt -f mlir %S/Inputs/backward.ir -p tile-stage-maps | filecheck %s --check-prefix STAGE
// RUN: attn-opt -f mlir %S/Inputs/backward.ir -p tile-stage-maps,tile-fold-scales | filecheck %s --check-prefix FOLD
// RUN: attn-opt -f mlir %S/Inputs/backward.ir -p tile-stage-maps,tile-pipeline-steps | filecheck %s --check-prefix RING
// RUN: attn-opt -f mlir %S/Inputs/backward.ir -p tile-stage-maps,tile-pipeline-steps,tile-split-roles,tile-overlap-products | filecheck %s --check-prefix OVERLAP
// RUN: attn-opt -f mlir %S/Inputs/backward.ir -p tile-stage-maps,tile-pipeline-steps,tile-split-roles,tile-overlap-products,tile-rotate-steps,tile-defer-product | filecheck %s

// A map for the weights, which need scores alone, and one for the gradient of the scores, which computes the mask again.

// STAGE-LABEL: tile.kernel @backward_dkdv
// STAGE: [[X:%.*]] = tile.dot
// STAGE: [[DP:%.*]] = tile.dot
// STAGE: [[P:%.*]], [[WIDE:%.*]] = tile.map ({{.*}}[[X]]{{.*}}) axes
// STAGE: math.exp2
// STAGE: tile.yield {{.*}} : f16, f32
// STAGE: [[DS:%.*]] = tile.map ({{.*}}[[DP]]{{.*}}[[WIDE]]) axes
// STAGE: arith.cmpi sge
// STAGE: tile.yield {{.*}} : f16
// STAGE: tile.dot [[DS]]
// STAGE: tile.dot [[P]]

// One product and one difference an element.

// FOLD-LABEL: tile.kernel @backward_dq
// FOLD: scf.for
// FOLD: ^bb0([[X:%.*]]: f32, [[SCALE:%.*]]: f32, [[ROW:%.*]]: f32):
// FOLD: [[C:%.*]] = arith.mulf [[SCALE]], {{.*}}
// FOLD: arith.mulf [[X]], [[C]]
// FOLD: arith.mulf [[ROW]]
// FOLD-NEXT: arith.subf
// FOLD-NEXT: math.exp2

// Numbers per query land on the barrier of the queries; results leave through the slots of keys and values.

// RING-LABEL: tile.kernel @backward_dkdv
// RING: tile.barrier_expect %q_full{{.*}}, 2560
// RING: tile.async_load %q_copies
// RING-NEXT: tile.async_load %row0_copies
// RING-NEXT: tile.async_load %row1_copies
// RING-NEXT: tile.barrier_wait %q_full
// RING-NEXT: tile.read
// RING: tile.write {{.*}}, %dk_slot
// RING: tile.async_store %dk_slot
// RING: tile.async_store_wait 0

// OVERLAP-LABEL: tile.kernel @backward_dkdv
// OVERLAP: role count 2 warps 4 registers 240
// OVERLAP: scf.for
// OVERLAP: scf.for
// OVERLAP: [[XP:%.*]] = tile.async_dot
// OVERLAP: [[DPP:%.*]] = tile.async_dot
// OVERLAP: tile.wait 1, [[XP]]
// OVERLAP: [[DVP:%.*]] = tile.async_dot
// OVERLAP: tile.wait 1, [[DPP]]
// OVERLAP: [[DKP:%.*]] = tile.async_dot
// OVERLAP: tile.wait 0, [[DVP]], [[DKP]]
// OVERLAP: tile.barrier_arrive %free
// OVERLAP: role count 1 warps 1 registers 24
// OVERLAP: tile.barrier_wait %free
// OVERLAP-NEXT: tile.barrier_expect %q_full

// dq: the product of the step before runs beside the scores of this one; its slots are free behind it.

// CHECK-LABEL: tile.kernel @backward_dq
// CHECK: [[NOTHING:%.*]] = arith.constant dense<0.000000e+00> : tensor<64x64xf32>
// CHECK: scf.for {{.*}}[[BEFORE:%.*]] = [[NOTHING]])
// CHECK: [[XP:%.*]] = tile.async_dot
// CHECK: [[DPP:%.*]] = tile.async_dot
// CHECK: [[ROUNDED:%.*]] = tile.map ([[BEFORE]])
// CHECK: [[OPERAND:%.*]] = tile.dot_operand [[ROUNDED]]
// CHECK: [[LATE:%.*]] = tile.async_dot [[OPERAND]]
// CHECK: tile.wait 2, [[XP]]
// CHECK: tile.wait 1, [[DPP]]
// CHECK: tile.pin
// CHECK: tile.wait 0, [[LATE]]
// CHECK: tile.barrier_arrive %free{{.*}} if

// dk and dv: the scores of the next step start behind the last product of this one. The producer copies one block more.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK: [[FIRST:%.*]] = tile.wait 0
// CHECK-NEXT: scf.for {{.*}} = [[FIRST]])
// CHECK: [[LAST:%.*]] = tile.async_dot
// CHECK: [[LAST:%.*]] = tile.async_dot
// CHECK: [[LAST:%.*]] = tile.async_dot
// CHECK: [[NEXT:%.*]] = tile.async_dot
// CHECK: tile.wait 1
// CHECK: tile.barrier_arrive %free
// CHECK: [[X:%.*]] = tile.wait 0, [[NEXT]]
// CHECK-NEXT: scf.yield {{.*}}, [[X]] :
// CHECK: role count 1
// CHECK: scf.yield
// CHECK: scf.yield
// CHECK: scf.yield
// CHECK: tile.barrier_wait %free
// CHECK: tile.async_load %q_copies
