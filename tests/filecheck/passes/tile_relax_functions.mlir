// RUN: attn-opt %s -p tile-relax-functions | filecheck %s
// RUN: attn-opt %s -p 'tile-relax-functions,tile-expand-math{approximate=true}' | filecheck %s
// RUN: attn-opt %s -p 'tile-relax-functions,tile-expand-math' | filecheck %s --check-prefix EXPANDED

// Scores that end in an exponent: an angle less its whole turns, a logarithm by the hardware's own.
// CHECK-LABEL: tile.kernel @score
// CHECK:       ^{{.*}}(%[[X:.*]]: f32, %[[SCALE:.*]]: f32):
// CHECK:         %[[T:.*]] = arith.mulf %[[X]], %{{.*}}
// CHECK-NEXT:    %[[N:.*]] = math.roundeven %[[T]] fastmath<afn>
// CHECK:         %[[R:.*]] = math.fma %[[N]], %{{.*}}, %[[X]]
// CHECK:         %[[Y:.*]] = math.fma %[[N]], %{{.*}}, %[[R]]
// CHECK-NEXT:    %{{.*}} = math.sin %[[Y]] fastmath<afn>
// CHECK:         %[[P:.*]] = arith.addf %[[SCALE]], %{{.*}}
// CHECK-NEXT:    %[[L:.*]] = math.log2 %[[P]] fastmath<afn>
// CHECK-NOT:     math.log1p
// EXPANDED-LABEL: tile.kernel @score
// EXPANDED-NOT:  math.roundeven
tile.kernel @score(%p: !tile.global<2 x f32>, %scale: f32, %i: i32) {
  %x = tile.load %p[%i, %i] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
  %s = tile.map (%x, %scale) axes [[0, 1], []] : (tensor<16x16xf32>, f32) -> tensor<16x16xf32> {
  ^bb0(%a: f32, %b: f32):
    %0 = math.sin %a : f32
    %1 = math.log1p %b : f32
    %2 = arith.addf %0, %1 : f32
    tile.yield %2 : f32
  }
  %r = tile.reduce max %s, 1 : tensor<16x16xf32> -> tensor<16xf32>
  %w = tile.map (%s, %r) axes [[0, 1], [0]] : (tensor<16x16xf32>, tensor<16xf32>) -> tensor<16x16xf32> {
  ^bb0(%a: f32, %m: f32):
    %d = arith.subf %a, %m : f32
    %e = math.exp2 %d : f32
    tile.yield %e : f32
  }
  tile.store %w, %p[%i, %i] dims [0, 1] : tensor<16x16xf32>, !tile.global<2 x f32>
  tile.end
}

// A quotient makes errors of any size: such a sine stays.
// CHECK-LABEL: tile.kernel @quotient
// CHECK:         math.sin %{{.*}} : f32
// CHECK-NOT:     fastmath<afn>
tile.kernel @quotient(%p: !tile.global<2 x f32>, %i: i32) {
  %x = tile.load %p[%i, %i] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
  %s = tile.map (%x) axes [[0, 1]] : (tensor<16x16xf32>) -> tensor<16x16xf32> {
  ^bb0(%a: f32):
    %t = math.sin %a : f32
    %u = arith.divf %a, %t : f32
    tile.yield %u : f32
  }
  tile.store %s, %p[%i, %i] dims [0, 1] : tensor<16x16xf32>, !tile.global<2 x f32>
  tile.end
}
