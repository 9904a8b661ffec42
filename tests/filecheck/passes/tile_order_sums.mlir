// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,tile-overlap-products,tile-rotate-steps,tile-fragment-sums,tile-order-sums | filecheck %s

// Consumers write their sums to a slot when it is free; two roles of one warp add them, each when its turn has come.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK: role count 2 warps 4
// CHECK: tile.barrier_wait %sums_free{{.*}}[%part
// CHECK: tile.write %fragments
// CHECK: tile.proxy_fence
// CHECK: tile.barrier_arrive %sums_full{{.*}}[%part
// CHECK: role count 2 warps 1
// CHECK: scf.for
// CHECK: [[PLACE:%.*]] = arith.divsi %fragment{{.*}}
// CHECK-NEXT: tile.await_turn %turns{{.*}}[%b{{.*}}, %h{{.*}}, [[PLACE]]], %i
// CHECK: tile.barrier_wait %sums_full
// CHECK-NEXT: tile.async_reduce_add
// CHECK-NEXT: tile.async_store_wait 0
// CHECK-NEXT: tile.barrier_arrive %sums_free
// CHECK-NEXT: tile.pass_turn %turns{{.*}}[%b{{.*}}, %h{{.*}}, [[PLACE]]]
// CHECK: role count 1 warps 1

// CHECK-LABEL: tile.plan @backward
// CHECK: %turns = tile.alloc(%batch, %heads, %places{{.*}})
// CHECK-NEXT: %c0{{.*}} = arith.constant 0
// CHECK-NEXT: tile.fill %turns
