// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p tile-schedule-grid | filecheck %s
// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p 'tile-schedule-grid{l2_bytes=65536}' | filecheck %s --check-prefix SMALL

// Programs take tiles off a counter. 64 bytes a position: 131072 positions in 8 MiB, 1024 in 64 KiB.

// CHECK-LABEL: tile.kernel @k
// CHECK-SAME: %tiles: i32, %programs: i32, %counter: !tile.global<1 x i32>
// CHECK: [[START:%.*]] = tile.program_id 0
// CHECK-NEXT: scf.while ([[TILE:%.*]] = [[START]])
// CHECK-NEXT: [[MORE:%.*]] = arith.cmpi slt, [[TILE]], %tiles : i32
// CHECK-NEXT: scf.condition([[MORE]]) [[TILE]] : i32
// CHECK: %width = arith.minsi %heads_in_flight, %heads_left : i32
// CHECK-NEXT: %i = arith.divsi %in_group, %width : i32
// CHECK: %b = arith.divsi %head, %heads : i32
// CHECK-NEXT: %h = arith.remsi %head, %heads : i32
// CHECK-NOT: tile.program_id
// CHECK: %q0 = arith.muli %i, %c128 : i32
// CHECK: tile.store
// CHECK: %taken = tile.fetch_add %counter
// CHECK-NEXT: %next_tile = arith.addi %taken, %programs : i32
// CHECK-NEXT: scf.yield %next_tile : i32

// CHECK-LABEL: tile.plan @forward
// CHECK: %tiles = arith.muli %q_blocks, %all_heads : i32
// CHECK: arith.constant 131072 : i32
// CHECK: %programs = arith.minsi %processors, %tiles : i32
// CHECK: tile.fill %counter
// CHECK: tile.launch @k grid(%programs)

// SMALL: arith.constant 1024 : i32
