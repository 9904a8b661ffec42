// RUN: attn-opt %s | attn-opt | filecheck %s

// A plain softmax forward at the value level: q blocks on grid axis 0, heads on 1, batch on 2.
// CHECK: tile.kernel @forward(%q: !tile.global<4 x f16>
tile.kernel @forward(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %sq: i32, %skv: i32, %group: i32, %scale: f32) attributes {num_warps = 4 : i64, num_stages = 2 : i64} {
  %c0 = arith.constant 0 : i32
  %m = arith.constant 64 : i32
  %n = arith.constant 32 : i32
  // CHECK: %{{.*}} = tile.program_id 0
  %i = tile.program_id 0
  %h = tile.program_id 1
  %b = tile.program_id 2
  %hk = arith.divsi %h, %group : i32
  %q0 = arith.muli %i, %m : i32
  // CHECK: tile.load %q[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq) : !tile.global<4 x f16> -> tensor<64x16xf16>
  %qt = tile.load %q[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq) : !tile.global<4 x f16> -> tensor<64x16xf16>
  %m0 = arith.constant dense<0xFF800000> : tensor<64xf32>
  %l0 = arith.constant dense<0.0> : tensor<64xf32>
  %acc0 = arith.constant dense<0.0> : tensor<64x16xf32>
  %s0 = arith.constant dense<0.0> : tensor<64x32xf32>
  %mr, %lr, %accr = scf.for %n0 = %c0 to %skv step %n iter_args(%mi = %m0, %li = %l0, %acc = %acc0) -> (tensor<64xf32>, tensor<64xf32>, tensor<64x16xf32>) : i32 {
    // CHECK: tile.load %k[%b, %hk, %n0, %c0] dims [3, 2] bounded [1] limits(%skv)
    %kt = tile.load %k[%b, %hk, %n0, %c0] dims [3, 2] bounded [1] limits(%skv) : !tile.global<4 x f16> -> tensor<16x32xf16>
    %vt = tile.load %v[%b, %hk, %n0, %c0] dims [2, 3] bounded [0] limits(%skv) : !tile.global<4 x f16> -> tensor<32x16xf16>
    // CHECK: tile.dot %{{.*}}, %{{.*}}, %{{.*}} ieee
    %x = tile.dot %qt, %kt, %s0 ieee : tensor<64x16xf16>, tensor<16x32xf16>, tensor<64x32xf32> -> tensor<64x32xf32>
    %cols = tile.range %n0 : tensor<32xi32>
    // CHECK: tile.map (%{{.*}}, %{{.*}}, %scale, %skv) axes {{\[\[}}0, 1], [1], [], []] : (tensor<64x32xf32>, tensor<32xi32>, f32, i32) -> tensor<64x32xf32> {
    %s = tile.map (%x, %cols, %scale, %skv) axes [[0, 1], [1], [], []] : (tensor<64x32xf32>, tensor<32xi32>, f32, i32) -> tensor<64x32xf32> {
    ^bb0(%xe: f32, %col: i32, %sc: f32, %lim: i32):
      %log2e = arith.constant 1.44269504 : f32
      %ninf = arith.constant 0xFF800000 : f32
      %c = arith.mulf %sc, %log2e : f32
      %t = arith.mulf %xe, %c : f32
      %ok = arith.cmpi slt, %col, %lim : i32
      %r = arith.select %ok, %t, %ninf : f32
      tile.yield %r : f32
    }
    // CHECK: tile.reduce max %{{.*}}, 1 : tensor<64x32xf32> -> tensor<64xf32>
    %bm = tile.reduce max %s, 1 : tensor<64x32xf32> -> tensor<64xf32>
    %mn, %alpha = tile.map (%mi, %bm) axes [[0], [0]] : (tensor<64xf32>, tensor<64xf32>) -> (tensor<64xf32>, tensor<64xf32>) {
    ^bb0(%a: f32, %c: f32):
      %mx = arith.maximumf %a, %c : f32
      %d = arith.subf %a, %mx : f32
      %e = math.exp2 %d : f32
      tile.yield %mx, %e : f32, f32
    }
    %p, %ph = tile.map (%s, %mn) axes [[0, 1], [0]] : (tensor<64x32xf32>, tensor<64xf32>) -> (tensor<64x32xf32>, tensor<64x32xf16>) {
    ^bb0(%a: f32, %c: f32):
      %d = arith.subf %a, %c : f32
      %e = math.exp2 %d : f32
      %t = arith.truncf %e : f32 to f16
      tile.yield %e, %t : f32, f16
    }
    %bl = tile.reduce sum %p, 1 : tensor<64x32xf32> -> tensor<64xf32>
    %ln = tile.map (%li, %alpha, %bl) axes [[0], [0], [0]] : (tensor<64xf32>, tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32> {
    ^bb0(%a: f32, %c: f32, %d: f32):
      %t = arith.mulf %a, %c : f32
      %r = arith.addf %t, %d : f32
      tile.yield %r : f32
    }
    %accs = tile.map (%acc, %alpha) axes [[0, 1], [0]] : (tensor<64x16xf32>, tensor<64xf32>) -> tensor<64x16xf32> {
    ^bb0(%a: f32, %c: f32):
      %t = arith.mulf %a, %c : f32
      tile.yield %t : f32
    }
    %accn = tile.dot %ph, %vt, %accs ieee : tensor<64x32xf16>, tensor<32x16xf16>, tensor<64x16xf32> -> tensor<64x16xf32>
    scf.yield %mn, %ln, %accn : tensor<64xf32>, tensor<64xf32>, tensor<64x16xf32>
  }
  %ot = tile.map (%accr, %lr) axes [[0, 1], [0]] : (tensor<64x16xf32>, tensor<64xf32>) -> tensor<64x16xf16> {
  ^bb0(%a: f32, %l: f32):
    %t = arith.divf %a, %l : f32
    %r = arith.truncf %t : f32 to f16
    tile.yield %r : f16
  }
  %lt = tile.map (%mr, %lr) axes [[0], [0]] : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32> {
  ^bb0(%a: f32, %l: f32):
    %ln2 = arith.constant 0.693147182 : f32
    %t = math.log2 %l : f32
    %u = arith.addf %a, %t : f32
    %r = arith.mulf %u, %ln2 : f32
    tile.yield %r : f32
  }
  // CHECK: tile.store %{{.*}}, %o[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq) : tensor<64x16xf16>, !tile.global<4 x f16>
  tile.store %ot, %o[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq) : tensor<64x16xf16>, !tile.global<4 x f16>
  tile.store %lt, %lse[%b, %h, %q0] dims [2] bounded [0] limits(%sq) : tensor<64xf32>, !tile.global<3 x f32>
  tile.end
}

// CHECK: tile.plan @plan(%q: !tile.global<4 x f16>
tile.plan @plan(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %scale: f32) {
  // CHECK: tile.dim %q, 0 : !tile.global<4 x f16>
  %b = tile.dim %q, 0 : !tile.global<4 x f16>
  %h = tile.dim %q, 1 : !tile.global<4 x f16>
  %hk = tile.dim %k, 1 : !tile.global<4 x f16>
  %sq = tile.dim %q, 2 : !tile.global<4 x f16>
  %skv = tile.dim %k, 2 : !tile.global<4 x f16>
  %group = arith.divsi %h, %hk : i32
  %m = arith.constant 64 : i32
  %nq = arith.ceildivsi %sq, %m : i32
  // CHECK: tile.launch @forward grid(%{{.*}}, %{{.*}}, %{{.*}}) args(%q, %k, %v, %o, %lse, %sq, %skv, %group, %scale)
  tile.launch @forward grid(%nq, %h, %b) args(%q, %k, %v, %o, %lse, %sq, %skv, %group, %scale) : !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<3 x f32>, i32, i32, i32, f32
  tile.end
}
