// RUN: attn-opt %s -p tile-join-loops | filecheck %s

// Two loops that load and two that load twice as much are one each; bounds come before both, and behind the end of
// the first range positions are those of the next.
// CHECK-LABEL: tile.kernel @k
// CHECK:         [[END:%.*]] = arith.addi %lo0, %{{.*}} : i32
// CHECK-NEXT:    [[SHIFT:%.*]] = arith.subi %lo2, [[END]] : i32
// CHECK:         [[ALL:%.*]] = arith.addi [[END]], %{{.*}} : i32
// CHECK:         [[BOTH:%.*]] = arith.addi %lo1, %{{.*}} : i32
// CHECK:         [[A:%.*]] = scf.for [[N:%.*]] = %lo0 to [[ALL]] step %c4 iter_args(%{{.*}} = %zero)
// CHECK-NEXT:      [[THERE:%.*]] = arith.addi [[N]], [[SHIFT]] : i32
// CHECK-NEXT:      [[BEFORE:%.*]] = arith.cmpi slt, [[N]], [[END]] : i32
// CHECK-NEXT:      [[AT:%.*]] = arith.select [[BEFORE]], [[N]], [[THERE]] : i32
// CHECK-NEXT:      tile.load %x[[[AT]]]
// CHECK:         [[B:%.*]] = scf.for {{.*}} = %lo1 to %{{.*}} step %c4 iter_args(%{{.*}} = [[A]])
// CHECK:           arith.mulf
// CHECK-NOT:     scf.for
// CHECK:         tile.store [[B]], %y
tile.kernel @k(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, %lo0: i32, %hi0: i32, %lo1: i32, %hi1: i32, %lo2: i32, %hi2: i32, %lo3: i32, %hi3: i32) {
  %c0 = arith.constant 0 : i32
  %c4 = arith.constant 4 : i32
  %zero = arith.constant dense<0.0> : tensor<4xf32>
  %s0 = scf.for %n = %lo0 to %hi0 step %c4 iter_args(%a = %zero) -> (tensor<4xf32>) : i32 {
    %b = tile.load %x[%n] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>
    %next = tile.map (%a, %b) axes [[0], [0]] : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> {
    ^bb0(%u: f32, %v: f32):
      %w = arith.addf %u, %v : f32
      tile.yield %w : f32
    }
    scf.yield %next : tensor<4xf32>
  }
  %s1 = scf.for %n = %lo1 to %hi1 step %c4 iter_args(%a = %s0) -> (tensor<4xf32>) : i32 {
    %b = tile.load %x[%n] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>
    %next = tile.map (%a, %b) axes [[0], [0]] : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> {
    ^bb0(%u: f32, %v: f32):
      %two = arith.constant 2.0 : f32
      %t = arith.mulf %v, %two : f32
      %w = arith.addf %u, %t : f32
      tile.yield %w : f32
    }
    scf.yield %next : tensor<4xf32>
  }
  %s2 = scf.for %n = %lo2 to %hi2 step %c4 iter_args(%a = %s1) -> (tensor<4xf32>) : i32 {
    %b = tile.load %x[%n] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>
    %next = tile.map (%a, %b) axes [[0], [0]] : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> {
    ^bb0(%u: f32, %v: f32):
      %w = arith.addf %u, %v : f32
      tile.yield %w : f32
    }
    scf.yield %next : tensor<4xf32>
  }
  %s3 = scf.for %n = %lo3 to %hi3 step %c4 iter_args(%a = %s2) -> (tensor<4xf32>) : i32 {
    %b = tile.load %x[%n] dims [0] : !tile.global<1 x f32> -> tensor<4xf32>
    %next = tile.map (%a, %b) axes [[0], [0]] : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32> {
    ^bb0(%u: f32, %v: f32):
      %two = arith.constant 2.0 : f32
      %t = arith.mulf %v, %two : f32
      %w = arith.addf %u, %t : f32
      tile.yield %w : f32
    }
    scf.yield %next : tensor<4xf32>
  }
  tile.store %s3, %y[%c0] dims [0] : tensor<4xf32>, !tile.global<1 x f32>
  tile.end
}
tile.plan @forward(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>, %lo0: i32, %hi0: i32, %lo1: i32, %hi1: i32, %lo2: i32, %hi2: i32, %lo3: i32, %hi3: i32) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one) args(%x, %y, %lo0, %hi0, %lo1, %hi1, %lo2, %hi2, %lo3, %hi3) : !tile.global<1 x f32>, !tile.global<1 x f32>, i32, i32, i32, i32, i32, i32, i32, i32
  tile.end
}
