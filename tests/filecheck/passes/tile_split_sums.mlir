// RUN: attn-opt -f mlir %S/Inputs/sums.ir -p tile-peel-block,tile-split-sums | filecheck %s

// The loops and the block between them carry the sum of the weights in parts, which are added up once.

// CHECK: [[ZERO:%.*]] = arith.constant dense<0.000000e+00> : tensor<128x4xf32>
// CHECK: scf.for {{.*}} = [[ZERO]]) -> (tensor<128x16xf32>, tensor<128x4xf32>)
// CHECK: [[ROW:%.*]] = tile.reduce_partial sum {{%.*}} groups 4 width 2 : tensor<128x64xf32> -> tensor<128x4xf32>
// CHECK: tile.map ({{%.*}}, [[ROW]]) {{.*}} -> tensor<128x4xf32> {
// CHECK: arith.mulf
// CHECK: arith.addf
// CHECK: scf.yield
// CHECK: tile.reduce_partial sum
// CHECK: scf.for {{.*}} -> (tensor<128x16xf32>, tensor<128x4xf32>)
// CHECK-NOT: tile.reduce sum
// CHECK: scf.yield
// CHECK: [[SUM:%.*]] = tile.reduce sum {{%.*}}, 1 : tensor<128x4xf32> -> tensor<128xf32>
// CHECK: tile.map ({{%.*}}, [[SUM]])
