// RUN: attn-opt %s -p tile-load-tables | filecheck %s

// A table at [head, query, key] comes in blocks; its guard is dropped, for it only says what is in range.
// CHECK-LABEL: tile.kernel @k
// CHECK:         scf.for %[[N:.*]] = %{{.*}} to
// CHECK:           %[[ROWS:.*]] = tile.dim %[[TABLE:.*]], 1
// CHECK-NEXT:      %[[COLS:.*]] = tile.dim %[[TABLE]], 2
// CHECK-NEXT:      %[[T:.*]] = tile.load %[[TABLE]][%[[H:.*]], %{{.*}}, %[[N]]] dims [1, 2] bounded [0, 1] limits(%[[ROWS]], %[[COLS]])
// CHECK-NEXT:      tile.map (%{{.*}}, %[[T]]) axes {{\[}}[0, 1], [0, 1]]
// CHECK-NEXT:      ^
// CHECK-NEXT:        arith.extf
// The same table turned is not read along its rows: it stays.
// CHECK:         tile.gather
tile.kernel @k(%table: !tile.global<3 x bf16>, %keys: i32, %out: !tile.global<2 x f32>) {
  %h = tile.program_id 0
  %c0 = arith.constant 0 : i32
  %c16 = arith.constant 16 : i32
  %zero = arith.constant dense<0.000000e+00> : tensor<16x16xf32>
  %rows = tile.range %c0 : tensor<16xi32>
  %acc = scf.for %n = %c0 to %keys step %c16 iter_args(%a = %zero) -> (tensor<16x16xf32>) : i32 {
    %cols = tile.range %n : tensor<16xi32>
    %s = tile.map (%rows, %cols, %table, %h, %keys, %a) axes [[0], [1], [], [], [], [0, 1]] : (tensor<16xi32>, tensor<16xi32>, !tile.global<3 x bf16>, i32, i32, tensor<16x16xf32>) -> tensor<16x16xf32> {
    ^bb0(%q: i32, %kv: i32, %t: !tile.global<3 x bf16>, %g: i32, %limit: i32, %x: f32):
      %q64 = arith.extsi %q : i32 to i64
      %kv64 = arith.extsi %kv : i32 to i64
      %g64 = arith.extsi %g : i32 to i64
      %inside = arith.cmpi slt, %kv, %limit : i32
      %e = tile.gather %t[%g64, %q64, %kv64 : i64, i64, i64] if %inside : !tile.global<3 x bf16> -> bf16
      %f = arith.extf %e : bf16 to f32
      %y = arith.addf %x, %f : f32
      tile.yield %y : f32
    }
    %u = tile.map (%rows, %cols, %table, %h, %s) axes [[0], [1], [], [], [0, 1]] : (tensor<16xi32>, tensor<16xi32>, !tile.global<3 x bf16>, i32, tensor<16x16xf32>) -> tensor<16x16xf32> {
    ^bb0(%q: i32, %kv: i32, %t: !tile.global<3 x bf16>, %g: i32, %x: f32):
      %e = tile.gather %t[%g, %kv, %q : i32, i32, i32] : !tile.global<3 x bf16> -> bf16
      %f = arith.extf %e : bf16 to f32
      %y = arith.addf %x, %f : f32
      tile.yield %y : f32
    }
    scf.yield %u : tensor<16x16xf32>
  }
  tile.store %acc, %out[%c0, %c0] dims [0, 1] : tensor<16x16xf32>, !tile.global<2 x f32>
  tile.end
}
tile.plan @forward(%table: !tile.global<3 x bf16>, %out: !tile.global<2 x f32>) {
  %heads = tile.dim %table, 0 : !tile.global<3 x bf16>
  %keys = tile.dim %table, 2 : !tile.global<3 x bf16>
  tile.launch @k grid(%heads) args(%table, %keys, %out) : !tile.global<3 x bf16>, i32, !tile.global<2 x f32>
  tile.end
}
