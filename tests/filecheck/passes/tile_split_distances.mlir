// The float of a distance is a difference of two vectors; a scalar factor goes to the vectors.
// RUN: attn-opt %s -p tile-split-distances{plan=forward} | filecheck %s

// CHECK-LABEL: tile.kernel @k
// CHECK: %cols = tile.range %n0
// CHECK: %[[RANGE:.*]] = tile.range %{{c0.*}} : tensor<16xi32>
// CHECK-NEXT: %[[PLACE:.*]] = tile.map (%[[RANGE]]) axes {{.*}} : (tensor<16xi32>) -> tensor<16xf32>
// CHECK: arith.sitofp
// CHECK: %[[OFFSET:.*]] = tile.map (%rows, %n0) axes {{.*}} : (tensor<64xi32>, i32) -> tensor<64xf32>
// CHECK: arith.subi
// CHECK-NEXT: arith.sitofp
// CHECK: tile.map (%x, %slope, %[[PLACE]], %[[OFFSET]])
// CHECK-NOT: arith.sitofp
// CHECK: %[[P:.*]] = arith.mulf %{{place.*}}, %[[S:factor]] : f32
// CHECK-NEXT: %[[O:.*]] = arith.mulf %{{offset.*}}, %[[S]] : f32
// CHECK-NEXT: %[[SUM:.*]] = arith.addf %{{.*}}, %[[P]] : f32
// CHECK-NEXT: arith.subf %[[SUM]], %[[O]] : f32
tile.kernel @k(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %o: !tile.global<4 x f32>, %n: i32, %slope: f32) {
  %c0 = arith.constant 0 : i32
  %c16 = arith.constant 16 : i32
  %b = tile.program_id 0
  %q_tile = tile.load %q[%b, %b, %c0, %c0] dims [2, 3] : !tile.global<4 x f16> -> tensor<64x16xf16>
  %rows = tile.range %c0 : tensor<64xi32>
  %zero = arith.constant dense<0.000000e+00> : tensor<64x16xf32>
  %acc = scf.for %n0 = %c0 to %n step %c16 iter_args(%old = %zero) -> (tensor<64x16xf32>) : i32 {
    %k_tile = tile.load %k[%b, %b, %n0, %c0] dims [2, 3] : !tile.global<4 x f16> -> tensor<16x16xf16>
    %t = tile.transpose %k_tile : tensor<16x16xf16> -> tensor<16x16xf16>
    %x = tile.dot %q_tile, %t, %old ieee : tensor<64x16xf16>, tensor<16x16xf16>, tensor<64x16xf32> -> tensor<64x16xf32>
    %cols = tile.range %n0 : tensor<16xi32>
    %s = tile.map (%rows, %cols, %x, %slope) axes [[0], [1], [0, 1], []] : (tensor<64xi32>, tensor<16xi32>, tensor<64x16xf32>, f32) -> tensor<64x16xf32> {
    ^bb0(%i: i32, %j: i32, %score: f32, %factor: f32):
      %d = arith.subi %j, %i : i32
      %f = arith.sitofp %d : i32 to f32
      %m = arith.mulf %factor, %f : f32
      %sum = arith.addf %score, %m : f32
      tile.yield %sum : f32
    }
    scf.yield %s : tensor<64x16xf32>
  }
  tile.store %acc, %o[%b, %b, %c0, %c0] dims [2, 3] : tensor<64x16xf32>, !tile.global<4 x f32>
  tile.end
}
tile.plan @forward(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %o: !tile.global<4 x f32>, %n: i32, %slope: f32) {
  %one = arith.constant 1 : i32
  tile.launch @k grid(%one, %one, %one) args(%q, %k, %o, %n, %slope) : !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f32>, i32, f32
  tile.end
}
