// RUN: attn-opt %s -p 'attn-derive-online,attn-simplify,convert-attn-to-tile{forward=16,32,4,1 distances="loaded"}' | filecheck %s
// RUN: attn-opt %s -p 'attn-derive-online,attn-simplify,convert-attn-to-tile{forward=16,32,4,1 distances="gathered"}' | filecheck %s --check-prefix GATHERED
// RUN: attn-opt %s -p 'attn-derive-online,attn-simplify,convert-attn-to-tile{forward=16,32,4,1}' | filecheck %s --check-prefix NONE

// What the scores read by q - kv is read once for each distance, as if these were queries and the key the first one.
// CHECK-LABEL: tile.kernel @forward_by_distance0(
// CHECK: arith.subi %origin
// CHECK: tile.gather %table
// CHECK: tile.store {{.*}}, %by_distance[%h, %first] dims [1]
// CHECK: tile.end

// Blocks of scores load a number for each of their diagonals, in front of the product; the slope is cheap enough as it is.
// CHECK-LABEL: tile.kernel @forward_kernel(
// CHECK: scf.for %n0
// CHECK: [[D:%.*]] = tile.load_diagonals %by_distance[%h, %origin] from %q0, %n0 : !tile.global<2 x f32> -> tensor<16x32xf32>
// CHECK: tile.dot
// CHECK: tile.map ({{.*}}[[D]]{{.*}})
// CHECK: arith.sitofp
// CHECK-NOT: tile.gather %table
// CHECK-LABEL: tile.plan @forward(
// CHECK: %by_distance = tile.alloc(%heads, %distances) : !tile.global<2 x f32>
// CHECK: tile.launch @forward_by_distance0
// CHECK: tile.launch @forward_kernel

// GATHERED-LABEL: tile.kernel @forward_kernel(
// GATHERED-NOT: tile.load_diagonals
// GATHERED: tile.gather %by_distance{{.*}} : !tile.global<2 x f32> -> f32

// NONE-NOT: by_distance
builtin.module {
  func.func @attention(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %table: tensor<?x?xf16>) -> tensor<?x?x?x64xbf16> {
    %o = attn.attention %q, %k, %v scale %scale captures %table : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?x?xf16> -> tensor<?x?x?x64xbf16> score_mod {
    ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %t: tensor<?x?xf16>):
      %n = arith.subi %qi, %kv : i64
      %x = attn.load %t[%h, %n] : tensor<?x?xf16> -> f32
      %f = arith.sitofp %n : i64 to f32
      %a = arith.addf %s, %x : f32
      %c = arith.addf %a, %f : f32
      attn.yield %c : f32
    } row {
    ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %t: tensor<?x?xf16>):
      %m = attn.row_reduce max %s
      %d = arith.subf %s, %m : f32
      %e = math.exp %d : f32
      %l = attn.row_reduce sum %e
      %p = arith.divf %e, %l : f32
      attn.yield %p : f32
    }
    func.return %o : tensor<?x?x?x64xbf16>
  }
}
