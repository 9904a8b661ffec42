// RUN: attn-opt %s -p tile-relax-divide | filecheck %s

// CHECK-LABEL: tile.kernel @quotients
tile.kernel @quotients(%p: !tile.global<1 x f32>, %i: i32) {
  %x = tile.load %p[%i] dims [0] : !tile.global<1 x f32> -> tensor<16xf32>
  %y:4 = tile.map (%x) axes [[0]] : (tensor<16xf32>) -> (tensor<16xf32>, tensor<16xf32>, tensor<16xf32>, tensor<16xf32>) {
  ^bb0(%a: f32):
    %one = arith.constant 1.000000e+00 : f32
    %zero = arith.constant 0.000000e+00 : f32
    %e = math.exp2 %a : f32
    %d = arith.addf %e, %one : f32
    // A constant over 1 + 2^x.
    // CHECK: %[[D:.*]] = arith.addf
    // CHECK-NEXT: arith.divf %{{.*}}, %[[D]] fastmath<arcp> : f32
    %0 = arith.divf %one, %d : f32
    // The quotient may be 1 where the reciprocal is 0; the divisor may be anything.
    // CHECK-NEXT: arith.divf %{{.*}}, %{{.*}} : f32
    // CHECK-NEXT: arith.divf %{{.*}}, %{{.*}} : f32
    %1 = arith.divf %e, %d : f32
    %2 = arith.divf %one, %a : f32
    // A logistic function without its case for negative arguments.
    // CHECK:      %[[F:.*]] = arith.constant -1.44269502 : f32
    // CHECK-NEXT: %[[U:.*]] = arith.mulf %[[A:.*]], %[[F]] : f32
    // CHECK-NEXT: %[[E:.*]] = math.exp2 %[[U]] : f32
    // CHECK:      arith.divf %{{.*}}, %{{.*}} fastmath<arcp> : f32
    %log2e = arith.constant 1.44269502 : f32
    %below = arith.cmpf olt, %a, %zero : f32
    %minus = arith.negf %a : f32
    %size = arith.select %below, %a, %minus : f32
    %t = arith.mulf %size, %log2e : f32
    %g = math.exp2 %t : f32
    %n = arith.select %below, %g, %one : f32
    %s = arith.addf %g, %one : f32
    %3 = arith.divf %n, %s : f32
    tile.yield %0, %1, %2, %3 : f32, f32, f32, f32
  }
  tile.store %y#3, %p[%i] dims [0] : tensor<16xf32>, !tile.global<1 x f32>
  tile.end
}
