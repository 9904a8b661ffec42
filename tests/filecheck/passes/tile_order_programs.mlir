// RUN: attn-opt -f mlir %S/Inputs/fused.ir -p tile-order-programs | filecheck %s

// As many heads go side by side as run at the same time; the kernel turns the number of a program into its place.

// CHECK-LABEL: tile.kernel @backward_dkdv
// CHECK-SAME: %row_tiles: i32, %heads: i32, %all_heads: i32, %heads_in_flight: i32
// CHECK: %program = tile.program_id 0
// CHECK-NOT: tile.program_id
// CHECK: [[GROUP:%.*]] = arith.divsi %program, %per_group
// CHECK-NEXT: [[INSIDE:%.*]] = arith.remsi %program, %per_group
// CHECK: [[WIDTH:%.*]] = arith.minsi %heads_in_flight, %heads_left
// CHECK-NEXT: %i = arith.divsi [[INSIDE]], [[WIDTH]]
// CHECK: %b = arith.divsi %head, %heads
// CHECK-NEXT: %h = arith.remsi %head, %heads

// CHECK-LABEL: tile.plan @backward
// CHECK: [[ALL:%.*]] = arith.muli %batch, %kv_heads
// CHECK: [[SMS:%.*]] = tile.processor_count
// CHECK: [[SIDE:%.*]] = arith.divsi [[SMS]], %rows
// CHECK: %programs = arith.muli {{.*}}, [[ALL]]
// CHECK: tile.launch @backward_dkdv grid(%programs)
