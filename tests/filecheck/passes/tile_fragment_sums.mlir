// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-stage-maps,tile-start-products,tile-pipeline-steps,tile-split-roles,tile-fragment-sums | filecheck %s
// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p 'tile-stage-maps,tile-start-products,tile-pipeline-steps{spare=true},tile-split-roles,tile-overlap-products,tile-rotate-steps,tile-defer-sums,tile-fragment-sums' | filecheck %s --check-prefix DEFER

// Two consumers add 64 x 8 each: fragments of 128 threads with 4 numbers each, two blocks beside each other.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK: %dq_passed = tile.ring : !tile.buffer<2x128x4xf32, shared>
// CHECK: [[DQ:%.*]] = tile.wait 0, %pending_4
// CHECK: [[SLOT:%.*]] = tile.slot %dq_passed
// CHECK-NEXT: [[F:%.*]] = tile.to_fragments [[DQ]] : tensor<64x8xf32> -> tensor<128x4xf32>
// CHECK-NEXT: tile.write [[F]], [[SLOT]]
// CHECK: [[BLOCK:%.*]] = arith.divsi %q0
// CHECK: [[NUMBER:%.*]] = arith.muli [[BLOCK]], %c2
// CHECK: [[BESIDE:%.*]] = arith.divsi %column
// CHECK-NEXT: [[PLACE:%.*]] = arith.addi [[NUMBER]], [[BESIDE]]
// CHECK: [[ROW:%.*]] = arith.muli [[PLACE]], %c128
// CHECK: tile.async_reduce_add [[SLOT]], %dq_sums_copies_1[%b, %h_1, [[ROW]], %c0{{.*}}]

// The kernel that makes the result of them reads them in order.

// CHECK-LABEL: tile.kernel @backward_dq_result
// CHECK: [[READ:%.*]] = tile.load %dq_sums[%b, %h, %fragment, %c0] dims [2, 3] : !tile.global<4 x f32> -> tensor<256x4xf32>
// CHECK-NEXT: tile.from_fragments [[READ]] parts 2 : tensor<256x4xf32> -> tensor<64x16xf32>

// CHECK-LABEL: tile.plan @backward
// CHECK: [[ROWS:%.*]] = arith.muli %blocks, %c256
// CHECK: [[SUMS:%.*]] = tile.alloc(%batch, %heads, [[ROWS]], %c4{{.*}})
// CHECK: tile.fill [[SUMS]]
// CHECK: tile.describe [[SUMS]] : !tile.global<4 x f32> -> !tile.descriptor<1x1x128x4xf32>

// Behind `tile-defer-sums` every addition changes, that behind the loops too.

// DEFER-LABEL: tile.kernel @backward_dkdv
// DEFER: tile.to_fragments
// DEFER: tile.async_reduce_add {{.*}}, %dq_sums_copies_1[%b, {{.*}}, %fragment, %c0{{.*}}]
// DEFER: tile.to_fragments
// DEFER: tile.async_reduce_add {{.*}}, %dq_sums_copies_1[%b, {{.*}}, %fragment{{.*}}, %c0{{.*}}]
// DEFER-NOT: tile.async_reduce_add
