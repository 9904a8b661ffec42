// RUN: attn-opt %s | attn-opt | filecheck %s

// Each program waits for the one before it.
// CHECK-LABEL: tile.kernel @turns(%flags: !tile.global<2 x i32>)
tile.kernel @turns(%flags: !tile.global<2 x i32>) {
  %n = tile.program_id 2
  %c1 = arith.constant 1 : i32
  %before = arith.subi %n, %c1 : i32
  // CHECK: tile.await %flags[%before, %c1] : !tile.global<2 x i32>
  tile.await %flags[%before, %c1] : !tile.global<2 x i32>
  // CHECK: tile.signal %flags[%n, %c1] : !tile.global<2 x i32>
  tile.signal %flags[%n, %c1] : !tile.global<2 x i32>
  tile.end
}
