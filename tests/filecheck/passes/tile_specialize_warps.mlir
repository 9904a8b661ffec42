// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p tile-peel-block,tile-schedule-grid,tile-pipeline,tile-specialize-warps | filecheck %s

// Two consumers of 64 queries, one producer; what depends on the tile is computed once and told.

// CHECK-LABEL: tile.kernel @k
// CHECK-SAME: num_warps = 4
// CHECK: %qs = tile.ring : !tile.buffer<2x64x16xf16, shared>
// CHECK: %k_empty = tile.make_barriers count 2 : !tile.barriers<2>
// CHECK: %tile_full = tile.make_barriers count 1 : !tile.barriers<2>
// CHECK: role count 2 warps 4 registers 240
// CHECK: tile.barrier_wait %tile_full
// CHECK-NEXT: %tile = tile.cell_read %next_tile
// CHECK: tile.cell_read %next_q0
// CHECK: tile.barrier_arrive %tile_empty
// CHECK-NOT: tile.cell
// CHECK: %row0 = arith.addi %q0, %part_rows : i32
// CHECK: tile.barrier_wait %q_full{{.*}}[%part]
// CHECK: tile.proxy_fence
// CHECK-NEXT: tile.barrier_arrive %q_empty{{.*}}[%part]
// CHECK: tile.async_dot {{.*}} layout <4x1, 64> : tensor<64x16xf16>
// CHECK-NEXT: tile.wait 0
// CHECK-NEXT: tile.barrier_arrive %k_empty{{.*}}[%stage{{.*}}]
// CHECK-NOT: tile.async_load
// CHECK: tile.async_store {{.*}}[%b, %h, %row0, {{.*}}]
// CHECK: role count 1 warps 1 registers 24
// CHECK: scf.while
// CHECK: tile.barrier_wait %tile_empty
// CHECK: tile.cell_write {{.*}}, %next_q0
// CHECK: tile.barrier_arrive %tile_full
// CHECK: tile.async_load %q_copies{{.*}}, %q_full{{.*}}[%c0
// CHECK: tile.async_load %q_copies{{.*}}, %q_full{{.*}}[%c1
// CHECK: scf.for
// CHECK: [[FREE:%.*]] = arith.xori [[PARITY:%.*]], {{.*}} : i32
// CHECK-NEXT: tile.barrier_wait %k_empty{{.*}}[[[STAGE:%.*]]], [[FREE]]
// CHECK-NEXT: tile.barrier_expect %k_full{{.*}}[[[STAGE]]], 2048
// CHECK-NOT: tensor<
// CHECK: tile.fetch_add
// CHECK: tile.barrier_wait %tile_empty
// CHECK-NEXT: tile.cell_write %end, %next_tile
