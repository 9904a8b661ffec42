// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p tile-peel-block,tile-schedule-grid,tile-pipeline,tile-specialize-warps,tile-order-async | filecheck %s
// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p 'tile-peel-block,tile-schedule-grid,tile-pipeline,tile-specialize-warps,tile-order-async{pin=false hold=false}' | filecheck %s --check-prefix LOOSE

// The last loop starts the scores of its block, then the output of the block before, and waits for both in this order.

// CHECK: role count 2
// CHECK: scf.for
// CHECK: scf.for {{.*}} -> (i32, i32, i32, tensor<64x64xf16>, tensor<64x16xf32>, i32)
// CHECK: tile.barrier_wait %k_full
// CHECK: [[SCORES:%.*]] = tile.async_dot
// CHECK: tile.barrier_wait %v_full{{.*}}[[[BEFORE:%.*]]], {{.*}}
// CHECK-NEXT: [[OUTPUT:%.*]] = tile.async_dot
// CHECK-NEXT: tile.barrier_arrive %k_empty{{.*}}[[[BEFORE]]]
// CHECK: tile.barrier_arrive %v_empty{{.*}} if {{.*}}
// CHECK-NEXT: tile.wait 1, [[SCORES]]
// CHECK: math.exp2
// CHECK: [[SUMS:%.*]] = tile.reduce_partial sum
// CHECK-NEXT: tile.pin [[SUMS]]
// CHECK: [[ACC:%.*]] = tile.wait 0, [[OUTPUT]]
// CHECK-NEXT: [[ROUNDED:%.*]] = tile.map
// CHECK: arith.truncf
// CHECK: tile.dot_operand [[ROUNDED]]
// CHECK: scf.yield
// CHECK: tile.async_dot
// CHECK: tile.async_store_wait 0
// CHECK: tile.wait 0
// CHECK-NEXT: tile.barrier_arrive %v_empty
// CHECK: tile.write

// The producer copies keys one block ahead of values.

// CHECK: role count 1
// CHECK: scf.for
// CHECK: scf.for
// CHECK: tile.async_load %k_copies
// CHECK: tile.async_load %v_copies
// CHECK: scf.yield
// CHECK-NOT: tile.async_load %k_copies
// CHECK: tile.async_load %v_copies


// Slots that are released at once are so behind the waits for the products that read them; short products hold them.

// LOOSE: role count 2
// LOOSE: scf.for {{.*}} -> (i32, i32, i32, tensor<64x64xf16>, tensor<64x16xf32>)
// LOOSE: tile.wait 1
// LOOSE-NEXT: tile.barrier_arrive %k_empty
// LOOSE-NOT: tile.pin
// LOOSE: tile.wait 0
// LOOSE-NEXT: tile.barrier_arrive %v_empty
