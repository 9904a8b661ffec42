// RUN: attn-opt -f mlir %S/Inputs/forward.ir -p tile-peel-block | filecheck %s

// The first block that any loop has comes before the last loop, with the body that masks; the others start one later.

// CHECK: [[SOME:%.*]] = arith.cmpi slt, [[WHOLE:%.*]], %skv : i32
// CHECK-NEXT: [[SECOND:%.*]] = arith.addi [[WHOLE]], %c64 : i32
// CHECK: [[LOW:%.*]] = arith.select [[SOME]], %c0, {{.*}} : i32
// CHECK: [[FIRST:%.*]] = arith.select [[SOME]], [[WHOLE]], {{.*}} : i32
// CHECK: [[PART:%.*]] = scf.for {{.*}} = [[SECOND]] to %skv step %c64
// CHECK: tile.load %keys[%b, %h, [[FIRST]], %c0] dims [2, 3] bounded [0] limits(%skv)
// CHECK: tile.range [[FIRST]]
// CHECK: arith.select %inside
// CHECK: tile.load %values[%b, %h, [[FIRST]], %c0]
// CHECK: [[ACC:%.*]] = tile.dot {{.*}}, {{.*}}, [[PART]] ieee
// CHECK: scf.for {{.*}} = [[LOW]] to [[WHOLE]] step %c64 iter_args({{.*}} = [[ACC]])
// CHECK-NOT: arith.select %inside
// CHECK: tile.store
