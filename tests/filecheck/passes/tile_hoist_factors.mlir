// RUN: attn-opt -f mlir %s -p 'tile-hoist-factors{plan=p}' | filecheck %s

// The first temporary is negated by all that read it, by way of a difference too; the second is not.

// CHECK-LABEL: tile.kernel @write
// CHECK: [[X:%.*]] = tile.load %x
// CHECK: [[NEGATED:%.*]] = tile.map ([[X]])
// CHECK: arith.negf
// CHECK: tile.store [[NEGATED]], %a
// CHECK: tile.store [[X]], %b
tile.kernel @write(%x: !tile.global<1 x f32>, %a: !tile.global<1 x f32>, %b: !tile.global<1 x f32>) {
  %c0 = arith.constant 0 : i32
  %v = tile.load %x[%c0] dims [0] : !tile.global<1 x f32> -> tensor<64xf32>
  tile.store %v, %a[%c0] dims [0] : tensor<64xf32>, !tile.global<1 x f32>
  tile.store %v, %b[%c0] dims [0] : tensor<64xf32>, !tile.global<1 x f32>
  tile.end
}

// CHECK-LABEL: tile.kernel @read
// CHECK: ^bb0([[R:%.*]]: f32, [[S:%.*]]: f32):
// CHECK-NEXT: [[D:%.*]] = arith.addf [[S]], [[R]]
// CHECK-NEXT: [[SUM:%.*]] = arith.addf [[R]], [[D]]
// CHECK-NEXT: [[T:%.*]] = arith.negf [[S]]
tile.kernel @read(%a: !tile.global<1 x f32>, %b: !tile.global<1 x f32>, %y: !tile.global<1 x f32>) {
  %c0 = arith.constant 0 : i32
  %u = tile.load %a[%c0] dims [0] : !tile.global<1 x f32> -> tensor<64xf32>
  %w = tile.load %b[%c0] dims [0] : !tile.global<1 x f32> -> tensor<64xf32>
  %z = tile.map (%u, %w) axes [[0], [0]] : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32> {
  ^bb0(%r: f32, %s: f32):
    %n = arith.negf %r : f32
    %d = arith.subf %s, %r : f32
    %e = arith.addf %n, %d : f32
    %t = arith.negf %s : f32
    %f = arith.addf %e, %t : f32
    tile.yield %f : f32
  }
  tile.store %z, %y[%c0] dims [0] : tensor<64xf32>, !tile.global<1 x f32>
  tile.end
}

tile.plan @p(%x: !tile.global<1 x f32>, %y: !tile.global<1 x f32>) {
  %c64 = arith.constant 64 : i32
  %c1 = arith.constant 1 : i32
  %a = tile.alloc(%c64) : !tile.global<1 x f32>
  %b = tile.alloc(%c64) : !tile.global<1 x f32>
  tile.launch @write grid(%c1) args(%x, %a, %b) : !tile.global<1 x f32>, !tile.global<1 x f32>, !tile.global<1 x f32>
  tile.launch @read grid(%c1) args(%a, %b, %y) : !tile.global<1 x f32>, !tile.global<1 x f32>, !tile.global<1 x f32>
  tile.end
}
