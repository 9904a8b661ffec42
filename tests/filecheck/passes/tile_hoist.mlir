// RUN: attn-opt %s -p tile-hoist | filecheck %s

// A slope per head is read once, its widened index included; what the kernel writes is read where it stands.
// CHECK-LABEL: tile.kernel @k
// CHECK:         arith.extsi
// CHECK-NEXT:    tile.gather %slopes
// CHECK-NEXT:    scf.for
// CHECK-NEXT:      tile.gather %sums
tile.kernel @k(%slopes: !tile.global<1 x f32>, %sums: !tile.global<1 x f32>, %n: i32) {
  %h = tile.program_id 0
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  scf.for %i = %c0 to %n step %c1 : i32 {
    %h64 = arith.extsi %h : i32 to i64
    %s = tile.gather %slopes[%h64 : i64] : !tile.global<1 x f32> -> f32
    %t = tile.gather %sums[%h64 : i64] : !tile.global<1 x f32> -> f32
    %u = arith.addf %s, %t : f32
    tile.store %u, %sums[%h] dims [] : f32, !tile.global<1 x f32>
  }
  tile.end
}
