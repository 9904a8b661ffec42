// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-order-programs,tile-pipeline-steps,tile-split-roles,tile-persist-programs | filecheck %s

// Each role goes through blocks; who copies for steps counts them on, and a role of its own brings the blocks that are owned.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK: %left = tile.make_barriers count 2
// CHECK-NEXT: tile.roles
// CHECK: [[FIRST:%.*]] = tile.program_id 0
// CHECK: scf.for [[BLOCK:%.*]] = [[FIRST]] to %blocks{{.*}} step %programs{{.*}} iter_args([[TURN:%.*]] = {{%.*}}, [[STEPS:%.*]] = {{%.*}})
// CHECK: [[PHASE:%.*]] = arith.andi [[TURN]]
// CHECK: tile.barrier_wait %k_full{{.*}}, [[PHASE]]
// CHECK: scf.for {{.*}} iter_args({{.*}}%count{{.*}} = [[STEPS]]
// CHECK: tile.async_store_wait 0
// CHECK: tile.barrier_arrive %left
// CHECK: role count 1 warps 1
// CHECK: scf.for %block{{.*}} = %first_block
// CHECK-NOT: %k_copies
// CHECK: tile.barrier_wait %free
// CHECK: } role count 1 warps 1
// CHECK: [[PHASE:%.*]] = arith.andi
// CHECK: [[FREE:%.*]] = arith.xori [[PHASE]]
// CHECK: tile.barrier_wait %left{{.*}}, [[FREE]]
// CHECK: tile.async_load %k_copies
// CHECK-NOT: tile.async_load %q_copies

// CHECK-LABEL: tile.plan @backward
// CHECK: [[PROGRAMS:%.*]] = arith.minsi %processors
// CHECK: tile.launch @backward_dkdv grid([[PROGRAMS]])
