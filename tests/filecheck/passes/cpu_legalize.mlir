// RUN: attn-opt %s -p cpu-legalize | filecheck %s

// CHECK-LABEL: tile.kernel @functions
tile.kernel @functions(%x: f32, %y: f32) {
  // exp2 is the faster one.
  // CHECK: %{{.*}} = arith.constant 1.44269502 : f32
  // CHECK-NEXT: [[SCALED:%.*]] = arith.mulf %x, %{{.*}} : f32
  // CHECK-NEXT: %{{.*}} = math.exp2 [[SCALED]] : f32
  %e = math.exp %x : f32
  // CHECK: [[PRODUCT:%.*]] = arith.mulf %x, %y : f32
  // CHECK-NEXT: %{{.*}} = arith.addf [[PRODUCT]], %x : f32
  %f = math.fma %x, %y, %x : f32
  // CHECK: [[POWER:%.*]] = math.powf %{{.*}}, %{{.*}} : f32
  // CHECK-NEXT: %{{.*}} = math.copysign [[POWER]], %x : f32
  %c = math.cbrt %x : f32
  // CHECK: [[FLOOR:%.*]] = math.floor %{{.*}} : f32
  // CHECK-NEXT: %{{.*}} = math.copysign [[FLOOR]], %x : f32
  %r = math.round %x : f32
  // CHECK-NEXT: %{{.*}} = math.tanh %x : f32
  %t = math.tanh %x : f32
  tile.end
}
