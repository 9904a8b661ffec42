// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p tile-peel-block,tile-schedule-grid,tile-pipeline,tile-specialize-warps,tile-merge-loops | filecheck %s

// One loop over the positions of both: products and waits once, the arithmetic of each in a branch.

// CHECK: role count 2
// CHECK: [[END:%.*]] = arith.addi [[MASKED:%.*]], %steps{{.*}} : i32
// CHECK: scf.for [[T:%.*]] = {{.*}} to [[END]] step
// CHECK: [[PARTIAL:%.*]] = arith.cmpi slt, [[T]], [[MASKED]] : i32
// CHECK: [[BASE:%base.*]] = arith.select [[PARTIAL]]
// CHECK-NEXT: [[N:%.*]] = arith.addi [[T]], [[BASE]] : i32
// CHECK: tile.async_dot
// CHECK: tile.wait 0
// CHECK: [[P:%.*]] = scf.if
// CHECK: tile.range [[N]]
// CHECK: arith.select %inside
// CHECK: scf.yield
// CHECK: } else {
// CHECK-NOT: arith.select %inside
// CHECK: scf.yield
// CHECK: tile.map ([[P]])
// CHECK: arith.truncf
// CHECK: tile.async_dot
// CHECK-NOT: scf.for

// The producer copies from one place whatever the kind.

// CHECK: role count 1
// CHECK: scf.for
// CHECK: tile.async_load %k_copies
// CHECK: tile.async_load %v_copies
// CHECK-NOT: scf.if
// CHECK: tile.end
