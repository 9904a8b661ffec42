// RUN: attn-opt -f mlir %S/Inputs/fused_wide.ir -p tile-stage-maps,tile-start-products,tile-order-programs,'tile-pipeline-steps{stages=2 spare=true}',tile-split-roles,'tile-overlap-products{late_sums=true in_flight=0}','tile-rotate-steps{last=true}',tile-defer-sums,tile-fragment-sums,tile-persist-roles | filecheck %s

// Consumers go from tile to tile as the producer says. Steps are numbered on, and what ends a phase a program ends one a tile.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK-SAME: %tiles: i32, %programs: i32, %counter: !tile.global<1 x i32>
// CHECK: tile.roles
// CHECK: scf.while (%count = [[ZERO:%.*]], %tiles_done = [[ZERO]])
// CHECK: tile.barrier_wait %tile_full
// CHECK: [[NUMBER:%.*]] = tile.cell_read %next_tile
// CHECK: [[MORE:%.*]] = arith.cmpi slt, [[NUMBER]], %tiles
// CHECK: scf.condition([[MORE]]) %count, %tiles_done
// CHECK: [[PARITY:%.*]] = arith.andi %tiles_done_1
// CHECK: [[OWN:%.*]] = tile.cell_read %next_tile
// CHECK: arith.divsi [[OWN]], %per_group
// CHECK: tile.barrier_wait %k_full{{.*}}, [[PARITY]]

// Results of the tile before have left before a step writes where they were.

// CHECK: tile.async_store_wait 0
// CHECK: tile.barrier_arrive %staged_free
// CHECK-NEXT: tile.barrier_wait %staged_free{{.*}}, [[PARITY]]
// CHECK-NEXT: scf.for {{.*}} = %count_1

// The step that there was not arrives; the blocks of keys and values are free behind the last product.

// CHECK: tile.wait 0
// CHECK: tile.barrier_arrive %written
// CHECK: tile.barrier_arrive %free
// CHECK: tile.barrier_arrive %owned_free
// CHECK: tile.async_reduce_add
// CHECK: tile.barrier_wait %done{{.*}}, [[PARITY]]
// CHECK-NEXT: [[SLOT:%.*]] = tile.slot %x_passed
// CHECK-NEXT: [[STAGED:%.*]] = tile.alias_slot [[SLOT]]
// CHECK-NEXT: tile.write {{.*}}, [[STAGED]]
// CHECK: tile.async_store [[STAGED]], %dk_copies
// CHECK: tile.async_store_wait 1
// CHECK-NEXT: [[SLOT2:%.*]] = tile.slot %dq_passed
// CHECK-NEXT: [[STAGED2:%.*]] = tile.alias_slot [[SLOT2]]
// CHECK-NEXT: tile.write {{.*}}, [[STAGED2]]
// CHECK: tile.async_store [[STAGED2]], %dv_copies
// CHECK: [[NEXT:%.*]] = arith.addi
// CHECK: scf.yield
// CHECK: tile.async_store_wait 0
// CHECK-NEXT: tile.end

// The producer takes tiles off the counter, and waits for the blocks of the one before.

// CHECK: [[BEGIN:%.*]] = tile.program_id 0
// CHECK: scf.while {{.*}} = [[BEGIN]]
// CHECK: tile.cell_write
// CHECK-NEXT: tile.barrier_arrive %tile_full
// CHECK: tile.barrier_wait %owned_free
// CHECK-NEXT: tile.barrier_expect %k_full
// CHECK: tile.barrier_expect %d_o_full
// CHECK: tile.barrier_expect %q_full
// CHECK: tile.barrier_arrive %d_o_full
// CHECK: tile.fetch_add %counter
// CHECK: tile.cell_write

// CHECK-LABEL: tile.plan @backward
// CHECK: tile.fill %counter
// CHECK: tile.launch @backward_dkdv grid(%programs_1)
