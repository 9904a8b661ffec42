// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p tile-peel-block,tile-schedule-grid,tile-pipeline | filecheck %s
// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p 'tile-peel-block,tile-schedule-grid,tile-pipeline{stages=3}' | filecheck %s --check-prefix DEEP

// Operands go through slots, and every copy and product is waited for where it is started.

// CHECK-LABEL: tile.kernel @k
// CHECK-SAME: %k_copies: !tile.descriptor<1x1x64x16xf16>
// CHECK: %qs = tile.ring : !tile.buffer<1x128x16xf16, shared>
// CHECK: %ks = tile.ring : !tile.buffer<2x64x16xf16, shared>
// CHECK-NEXT: %k_full = tile.make_barriers count 1 : !tile.barriers<2>
// CHECK: scf.while
// CHECK: tile.async_load %q_copies[%b, %h, %q0, %c0{{.*}}], %q, %q_full
// CHECK: tile.barrier_wait %q_full[{{.*}}], %tile_parity
// CHECK-NEXT: tile.read %q
// CHECK-NEXT: tile.proxy_fence
// CHECK: [[PART:%.*]], [[COUNT:%.*]] = scf.for
// CHECK: %stage{{.*}} = arith.remsi [[COUNT]], %c2
// CHECK: [[SLOT:%k.*]] = tile.slot %ks[[[STAGE:%.*]]]
// CHECK-NEXT: tile.barrier_expect %k_full[[[STAGE]]], 2048
// CHECK-NEXT: tile.async_load %k_copies[%b, %h, %first{{.*}}], [[SLOT]], %k_full[[[STAGE]]]
// CHECK-NEXT: tile.barrier_wait %k_full[[[STAGE]]], %parity
// CHECK-NEXT: [[TURNED:%.*]] = tile.transposed_slot [[SLOT]]
// CHECK-NEXT: [[PENDING:%.*]] = tile.async_dot {{.*}}, [[TURNED]] layout <8x1, 64>
// CHECK-NEXT: tile.wait 0, [[PENDING]]
// CHECK: tile.dot_operand
// CHECK: tile.async_store_wait 0
// CHECK: %o_slot = tile.slot %os
// CHECK-NEXT: tile.write {{.*}}, %o_slot
// CHECK-NEXT: tile.proxy_fence
// CHECK-NEXT: tile.async_store %o_slot, %o_copies[%b, %h, %q0, %c0{{.*}}]
// CHECK-NOT: tile.load
// CHECK-NOT: tile.dot {{.*}} ieee
// CHECK-LABEL: tile.plan @forward
// CHECK: tile.describe %k : !tile.global<4 x f16> -> !tile.descriptor<1x1x64x16xf16>

// DEEP: %ks = tile.ring : !tile.buffer<3x64x16xf16, shared>
