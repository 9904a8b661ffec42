// RUN: attn-opt %s -p tile-relax-tanh | filecheck %s

// A tangent that ends in an exponent: one factor for the argument, one exponential, one quotient.
// CHECK-LABEL: tile.kernel @score
// CHECK:       ^{{.*}}(%[[X:.*]]: f32, %[[SCALE:.*]]: f32):
// CHECK:         %[[F:.*]] = arith.constant 0.144269511
// CHECK-NEXT:    %[[U:.*]] = arith.mulf %[[SCALE]], %[[F]]
// CHECK:         %[[V:.*]] = arith.mulf %[[X]], %[[U]]
// CHECK-NEXT:    %[[E:.*]] = math.exp2 %[[V]]
// CHECK:         arith.divf
// CHECK-NOT:     math.tanh
tile.kernel @score(%p: !tile.global<2 x f32>, %scale: f32, %i: i32) {
  %x = tile.load %p[%i, %i] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
  %s = tile.map (%x, %scale) axes [[0, 1], []] : (tensor<16x16xf32>, f32) -> tensor<16x16xf32> {
  ^bb0(%a: f32, %b: f32):
    %0 = arith.mulf %a, %b : f32
    %c = arith.constant 2.000000e+01 : f32
    %1 = arith.divf %0, %c : f32
    %t = math.tanh %1 : f32
    %2 = arith.mulf %t, %c : f32
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

// A sum over keys adds up errors, and a large factor makes them large: such tangents stay.
// CHECK-LABEL: tile.kernel @sum
// CHECK:         math.tanh
tile.kernel @sum(%p: !tile.global<2 x f32>, %o: !tile.global<1 x f32>, %i: i32) {
  %x = tile.load %p[%i, %i] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
  %s = tile.map (%x) axes [[0, 1]] : (tensor<16x16xf32>) -> tensor<16x16xf32> {
  ^bb0(%a: f32):
    %t = math.tanh %a : f32
    tile.yield %t : f32
  }
  %r = tile.reduce sum %s, 1 : tensor<16x16xf32> -> tensor<16xf32>
  tile.store %r, %o[%i] dims [0] : tensor<16xf32>, !tile.global<1 x f32>
  tile.end
}

// CHECK-LABEL: tile.kernel @large
// CHECK:         math.tanh
tile.kernel @large(%p: !tile.global<2 x f32>, %i: i32) {
  %x = tile.load %p[%i, %i] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
  %s = tile.map (%x) axes [[0, 1]] : (tensor<16x16xf32>) -> tensor<16x16xf32> {
  ^bb0(%a: f32):
    %t = math.tanh %a : f32
    %c = arith.constant 1.000000e+06 : f32
    %u = arith.mulf %t, %c : f32
    %e = math.exp2 %u : f32
    tile.yield %e : f32
  }
  tile.store %s, %p[%i, %i] dims [0, 1] : tensor<16x16xf32>, !tile.global<2 x f32>
  tile.end
}

// A tangent of one whose error it would enlarge, though its own result is exact enough: both stay.
// CHECK-LABEL: tile.kernel @steep
// CHECK-COUNT-2:  math.tanh
tile.kernel @steep(%p: !tile.global<2 x f32>, %i: i32) {
  %x = tile.load %p[%i, %i] dims [0, 1] : !tile.global<2 x f32> -> tensor<16x16xf32>
  %s = tile.map (%x) axes [[0, 1]] : (tensor<16x16xf32>) -> tensor<16x16xf32> {
  ^bb0(%a: f32):
    %t = math.tanh %a : f32
    %c = arith.constant 1.000000e+03 : f32
    %u = arith.mulf %t, %c : f32
    %v = math.tanh %u : f32
    %e = math.exp2 %v : f32
    tile.yield %e : f32
  }
  tile.store %s, %p[%i, %i] dims [0, 1] : tensor<16x16xf32>, !tile.global<2 x f32>
  tile.end
}
