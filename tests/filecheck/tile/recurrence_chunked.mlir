// RUN: attn-opt %s | attn-opt | filecheck %s

// Linear attention with a log decay per head and token, by chunks of 64: the state that each chunk adds, the
// states passed on from chunk to chunk, then the outputs. Key channels 16, value channels 32.
//
// Tokens past the end load as g = 0, k = 0, v = 0: they neither decay nor write. Every exponent is a sum of
// log decays, at most 0, and is clamped there since the two sums of a difference round differently. A log
// decay is kept above -104, where exp is 0 in f32, so that one of -inf makes no NaN of a difference.

// What a chunk adds to the state: sum_j exp(total - gc_j) k_j v_j^T, and its total decay.
// CHECK: tile.kernel @chunk_states(%k: !tile.global<4 x f32>
tile.kernel @chunk_states(%k: !tile.global<4 x f32>, %v: !tile.global<4 x f32>, %g: !tile.global<3 x f32>, %states: !tile.global<5 x f32>, %totals: !tile.global<3 x f32>, %t: i32, %group: i32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %c = arith.constant 64 : i32
  %n = tile.program_id 0
  %h = tile.program_id 1
  %b = tile.program_id 2
  %hk = arith.divsi %h, %group : i32
  %t0 = arith.muli %n, %c : i32
  %graw = tile.load %g[%b, %h, %t0] dims [2] bounded [0] limits(%t) : !tile.global<3 x f32> -> tensor<64xf32>
  %gt = tile.map (%graw) axes [[0]] : (tensor<64xf32>) -> tensor<64xf32> {
  ^bb0(%x: f32):
    %floor = arith.constant -104.0 : f32
    %r = arith.maximumf %x, %floor : f32
    tile.yield %r : f32
  }
  // CHECK: %{{.*}} = tile.scan sum %{{.*}}, 0 : tensor<64xf32>
  %gc = tile.scan sum %gt, 0 : tensor<64xf32> -> tensor<64xf32>
  // CHECK: %{{.*}} = tile.reduce sum %{{.*}}, 0 : tensor<64xf32> -> f32
  %total = tile.reduce sum %gt, 0 : tensor<64xf32> -> f32
  %kt = tile.load %k[%b, %hk, %t0, %c0] dims [3, 2] bounded [1] limits(%t) : !tile.global<4 x f32> -> tensor<16x64xf32>
  %vt = tile.load %v[%b, %h, %t0, %c0] dims [2, 3] bounded [0] limits(%t) : !tile.global<4 x f32> -> tensor<64x32xf32>
  %kw = tile.map (%kt, %gc, %total) axes [[0, 1], [1], []] : (tensor<16x64xf32>, tensor<64xf32>, f32) -> tensor<16x64xf32> {
  ^bb0(%x: f32, %at: f32, %all: f32):
    %zero = arith.constant 0.0 : f32
    %d = arith.subf %all, %at : f32
    %m = arith.minimumf %d, %zero : f32
    %e = math.exp %m : f32
    %r = arith.mulf %x, %e : f32
    tile.yield %r : f32
  }
  %zeros = arith.constant dense<0.0> : tensor<16x32xf32>
  %s = tile.dot %kw, %vt, %zeros ieee : tensor<16x64xf32>, tensor<64x32xf32>, tensor<16x32xf32> -> tensor<16x32xf32>
  // CHECK: tile.store %{{.*}}, %states[%b, %h, %n, %c0, %c0] dims [3, 4] : tensor<16x32xf32>, !tile.global<5 x f32>
  tile.store %s, %states[%b, %h, %n, %c0, %c0] dims [3, 4] : tensor<16x32xf32>, !tile.global<5 x f32>
  // CHECK: tile.store %{{.*}}, %totals[%b, %h, %n] dims [] : f32, !tile.global<3 x f32>
  tile.store %total, %totals[%b, %h, %n] dims [] : f32, !tile.global<3 x f32>
  tile.end
}

// Each chunk's addition becomes the state before that chunk; what remains at the end is the final state.
// CHECK: tile.kernel @pass_states(
tile.kernel @pass_states(%states: !tile.global<5 x f32>, %totals: !tile.global<3 x f32>, %final: !tile.global<4 x f32>, %chunks: i32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %h = tile.program_id 0
  %b = tile.program_id 1
  %s0 = arith.constant dense<0.0> : tensor<16x32xf32>
  %last = scf.for %n = %c0 to %chunks step %c1 iter_args(%s = %s0) -> (tensor<16x32xf32>) : i32 {
    %added = tile.load %states[%b, %h, %n, %c0, %c0] dims [3, 4] : !tile.global<5 x f32> -> tensor<16x32xf32>
    // CHECK: tile.load %totals[%b, %h, %{{.*}}] dims [] : !tile.global<3 x f32> -> f32
    %total = tile.load %totals[%b, %h, %n] dims [] : !tile.global<3 x f32> -> f32
    tile.store %s, %states[%b, %h, %n, %c0, %c0] dims [3, 4] : tensor<16x32xf32>, !tile.global<5 x f32>
    %next = tile.map (%s, %added, %total) axes [[0, 1], [0, 1], []] : (tensor<16x32xf32>, tensor<16x32xf32>, f32) -> tensor<16x32xf32> {
    ^bb0(%x: f32, %y: f32, %d: f32):
      %e = math.exp %d : f32
      %k = arith.mulf %x, %e : f32
      %r = arith.addf %k, %y : f32
      tile.yield %r : f32
    }
    scf.yield %next : tensor<16x32xf32>
  }
  tile.store %last, %final[%b, %h, %c0, %c0] dims [2, 3] : tensor<16x32xf32>, !tile.global<4 x f32>
  tile.end
}

// From the state before the chunk, exp(gc_i) q_i S, and from the chunk itself, (q k^T * exp(gc_i - gc_j), j <= i) v.
// CHECK: tile.kernel @chunk_outputs(
tile.kernel @chunk_outputs(%q: !tile.global<4 x f32>, %k: !tile.global<4 x f32>, %v: !tile.global<4 x f32>, %g: !tile.global<3 x f32>, %states: !tile.global<5 x f32>, %o: !tile.global<4 x f32>, %t: i32, %group: i32, %scale: f32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %c = arith.constant 64 : i32
  %n = tile.program_id 0
  %h = tile.program_id 1
  %b = tile.program_id 2
  %hk = arith.divsi %h, %group : i32
  %t0 = arith.muli %n, %c : i32
  %graw = tile.load %g[%b, %h, %t0] dims [2] bounded [0] limits(%t) : !tile.global<3 x f32> -> tensor<64xf32>
  %gt = tile.map (%graw) axes [[0]] : (tensor<64xf32>) -> tensor<64xf32> {
  ^bb0(%x: f32):
    %floor = arith.constant -104.0 : f32
    %r = arith.maximumf %x, %floor : f32
    tile.yield %r : f32
  }
  %gc = tile.scan sum %gt, 0 : tensor<64xf32> -> tensor<64xf32>
  %qt = tile.load %q[%b, %hk, %t0, %c0] dims [2, 3] bounded [0] limits(%t) : !tile.global<4 x f32> -> tensor<64x16xf32>
  %kt = tile.load %k[%b, %hk, %t0, %c0] dims [3, 2] bounded [1] limits(%t) : !tile.global<4 x f32> -> tensor<16x64xf32>
  %vt = tile.load %v[%b, %h, %t0, %c0] dims [2, 3] bounded [0] limits(%t) : !tile.global<4 x f32> -> tensor<64x32xf32>
  %s = tile.load %states[%b, %h, %n, %c0, %c0] dims [3, 4] : !tile.global<5 x f32> -> tensor<16x32xf32>
  %qs = tile.map (%qt, %gc, %scale) axes [[0, 1], [0], []] : (tensor<64x16xf32>, tensor<64xf32>, f32) -> tensor<64x16xf32> {
  ^bb0(%x: f32, %d: f32, %sc: f32):
    %e = math.exp %d : f32
    %w = arith.mulf %sc, %e : f32
    %r = arith.mulf %x, %w : f32
    tile.yield %r : f32
  }
  %o0 = arith.constant dense<0.0> : tensor<64x32xf32>
  %inter = tile.dot %qs, %s, %o0 ieee : tensor<64x16xf32>, tensor<16x32xf32>, tensor<64x32xf32> -> tensor<64x32xf32>
  %a0 = arith.constant dense<0.0> : tensor<64x64xf32>
  %a = tile.dot %qt, %kt, %a0 ieee : tensor<64x16xf32>, tensor<16x64xf32>, tensor<64x64xf32> -> tensor<64x64xf32>
  %i = tile.range %c0 : tensor<64xi32>
  // CHECK: axes {{\[\[}}0, 1], [0], [1], [0], [1], []]
  %p = tile.map (%a, %gc, %gc, %i, %i, %scale) axes [[0, 1], [0], [1], [0], [1], []] : (tensor<64x64xf32>, tensor<64xf32>, tensor<64xf32>, tensor<64xi32>, tensor<64xi32>, f32) -> tensor<64x64xf32> {
  ^bb0(%x: f32, %gi: f32, %gj: f32, %row: i32, %col: i32, %sc: f32):
    %zero = arith.constant 0.0 : f32
    %d = arith.subf %gi, %gj : f32
    %m = arith.minimumf %d, %zero : f32
    %e = math.exp %m : f32
    %w = arith.mulf %sc, %e : f32
    %y = arith.mulf %x, %w : f32
    %past = arith.cmpi sge, %row, %col : i32
    %r = arith.select %past, %y, %zero : f32
    tile.yield %r : f32
  }
  %ot = tile.dot %p, %vt, %inter ieee : tensor<64x64xf32>, tensor<64x32xf32>, tensor<64x32xf32> -> tensor<64x32xf32>
  tile.store %ot, %o[%b, %h, %t0, %c0] dims [2, 3] bounded [0] limits(%t) : tensor<64x32xf32>, !tile.global<4 x f32>
  tile.end
}

// CHECK: tile.plan @recurrence(
tile.plan @recurrence(%q: !tile.global<4 x f32>, %k: !tile.global<4 x f32>, %v: !tile.global<4 x f32>, %g: !tile.global<3 x f32>, %o: !tile.global<4 x f32>, %final: !tile.global<4 x f32>, %scale: f32) {
  %b = tile.dim %v, 0 : !tile.global<4 x f32>
  %h = tile.dim %v, 1 : !tile.global<4 x f32>
  %t = tile.dim %v, 2 : !tile.global<4 x f32>
  %hk = tile.dim %k, 1 : !tile.global<4 x f32>
  %group = arith.divsi %h, %hk : i32
  %c = arith.constant 64 : i32
  %dk = arith.constant 16 : i32
  %dv = arith.constant 32 : i32
  %chunks = arith.ceildivsi %t, %c : i32
  // CHECK: %{{.*}} = tile.alloc(%b, %h, %chunks, %dk, %dv) : !tile.global<5 x f32>
  %states = tile.alloc(%b, %h, %chunks, %dk, %dv) : !tile.global<5 x f32>
  // CHECK: %{{.*}} = tile.alloc(%b, %h, %chunks) : !tile.global<3 x f32>
  %totals = tile.alloc(%b, %h, %chunks) : !tile.global<3 x f32>
  // CHECK: tile.launch @chunk_states grid(%chunks, %h, %b)
  tile.launch @chunk_states grid(%chunks, %h, %b) args(%k, %v, %g, %states, %totals, %t, %group) : !tile.global<4 x f32>, !tile.global<4 x f32>, !tile.global<3 x f32>, !tile.global<5 x f32>, !tile.global<3 x f32>, i32, i32
  // CHECK: tile.launch @pass_states grid(%h, %b)
  tile.launch @pass_states grid(%h, %b) args(%states, %totals, %final, %chunks) : !tile.global<5 x f32>, !tile.global<3 x f32>, !tile.global<4 x f32>, i32
  // CHECK: tile.launch @chunk_outputs grid(%chunks, %h, %b)
  tile.launch @chunk_outputs grid(%chunks, %h, %b) args(%q, %k, %v, %g, %states, %o, %t, %group, %scale) : !tile.global<4 x f32>, !tile.global<4 x f32>, !tile.global<4 x f32>, !tile.global<3 x f32>, !tile.global<5 x f32>, !tile.global<4 x f32>, i32, i32, f32
  tile.end
}
