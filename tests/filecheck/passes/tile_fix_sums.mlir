// RUN: attn-opt %s -p tile-fix-sums | filecheck %s

// Contributions to a table come from anywhere: whole numbers of steps, which follow from the largest one.
// CHECK-LABEL: tile.kernel @k(
// CHECK:         [[PEAK:%\w+]] = tile.load %peak
// CHECK:         [[STEPS:%\w+]] = math.exp2
// CHECK:         [[WHOLE:%\w+]] = tile.map ([[D:%\w+]], [[STEPS]]) axes {{.*}} -> tensor<16xi64>
// CHECK:         tile.scatter_add [[WHOLE]], %sums[%bucket]
// One number a query, batch and head has no order: it stays a float, though programs add it.
// CHECK:         tile.scatter_add [[D]], %d_rows[%b, %h, %q]
tile.kernel @k(%d: !tile.global<1 x f32>, %buckets: !tile.global<1 x i64>, %d_table: !tile.global<1 x f32>, %d_rows: !tile.global<3 x f32>) {
  %i = tile.program_id 0
  %h0 = tile.program_id 1
  %b0 = tile.program_id 2
  %c16 = arith.constant 16 : i32
  %q0 = arith.muli %i, %c16 : i32
  %x = tile.load %d[%q0] dims [0] : !tile.global<1 x f32> -> tensor<16xf32>
  %bucket = tile.load %buckets[%q0] dims [0] : !tile.global<1 x i64> -> tensor<16xi64>
  tile.scatter_add %x, %d_table[%bucket] axes [[0]] : tensor<16xf32>, !tile.global<1 x f32>, tensor<16xi64>
  %b = arith.extsi %b0 : i32 to i64
  %h = arith.extsi %h0 : i32 to i64
  %q1 = tile.range %q0 : tensor<16xi32>
  %q = tile.map (%q1) axes [[0]] : (tensor<16xi32>) -> tensor<16xi64> {
  ^bb0(%e: i32):
    %w = arith.extsi %e : i32 to i64
    tile.yield %w : i64
  }
  tile.scatter_add %x, %d_rows[%b, %h, %q] axes [[], [], [0]] : tensor<16xf32>, !tile.global<3 x f32>, i64, i64, tensor<16xi64>
  tile.end
}

// The same kernel finds the largest contribution, and stores nothing else.
// CHECK-LABEL: tile.kernel @k_peaks(
// CHECK-NOT:     tile.scatter_add
// CHECK:         [[SIZE:%\w+]] = tile.reduce max
// CHECK:         tile.atomic_max [[SIZE]], %peak
// CHECK-NOT:     tile.scatter_add
// CHECK:         tile.end
// CHECK-LABEL: tile.kernel @k_sum0(
// CHECK:         arith.sitofp
// CHECK:         tile.store
// CHECK-LABEL: tile.plan @p
// CHECK:         %sums = tile.alloc({{.*}}) : !tile.global<1 x i64>
// CHECK:         tile.launch @k_peaks
// CHECK-NEXT:    tile.launch @k grid
// CHECK:         tile.launch @k_sum0
tile.plan @p(%q: !tile.global<4 x f32>, %k: !tile.global<4 x f32>, %d: !tile.global<1 x f32>, %buckets: !tile.global<1 x i64>, %d_table: !tile.global<1 x f32>, %d_rows: !tile.global<3 x f32>) {
  %n = tile.dim %q, 2 : !tile.global<4 x f32>
  tile.launch @k grid(%n, %n, %n) args(%d, %buckets, %d_table, %d_rows) : !tile.global<1 x f32>, !tile.global<1 x i64>, !tile.global<1 x f32>, !tile.global<3 x f32>
  tile.end
}
