// RUN: attn-opt %s | attn-opt | filecheck %s

// Softmax forward over heads of 64, 64 queries by 64 keys at a time, as TileLang takes it: fragments that the target
// lays out, a loop whose copies run one iteration ahead. A key is visible to row i up to i + offset.
// CHECK: tile.kernel @forward
tile.kernel @forward(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %sq: i32, %skv: i32, %group: i32, %offset: i32, %scale: f32) attributes {threads = 128 : i64} {
  %qs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %ks = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %vs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %p = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %acc = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %of = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %m = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %mn = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %bm = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %alpha = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %l = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %bl = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %c0 = arith.constant 0 : i32
  %block_m = arith.constant 64 : i32
  %block_n = arith.constant 64 : i32
  %nothing = arith.constant 0.0 : f32
  %lowest = arith.constant 0xFF800000 : f32
  %pid = tile.program_id 0
  %h = tile.program_id 1
  %b = tile.program_id 2
  %hk = arith.divsi %h, %group : i32
  %q0 = arith.muli %pid, %block_m : i32
  tile.copy_in %q[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq) into %qs : !tile.global<4 x f16>, !tile.buffer<64x64xf16, shared>
  tile.buffer_fill %acc, %nothing : !tile.buffer<64x64xf32, register>, f32
  tile.buffer_fill %m, %lowest : !tile.buffer<64xf32, register>, f32
  tile.buffer_fill %l, %nothing : !tile.buffer<64xf32, register>, f32
  // keys up to the last one that the last row of the block sees
  %q1 = arith.addi %q0, %block_m : i32
  %seen = arith.addi %q1, %offset : i32
  %hi = arith.minsi %seen, %skv : i32
  scf.for %n0 = %c0 to %hi step %block_n : i32 {
    // CHECK: tile.copy_in %k[%b, %hk, %n0, %c0] dims [2, 3] bounded [0] limits(%skv) into %ks
    tile.copy_in %k[%b, %hk, %n0, %c0] dims [2, 3] bounded [0] limits(%skv) into %ks : !tile.global<4 x f16>, !tile.buffer<64x64xf16, shared>
    tile.buffer_fill %s, %nothing : !tile.buffer<64x64xf32, register>, f32
    // CHECK: tile.gemm %qs, %ks, %s transpose_b ieee split rows
    tile.gemm %qs, %ks, %s transpose_b ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    // scores in base 2, -inf where a key is not visible
    tile.buffer_map (%s, %q0, %n0, %skv, %offset, %scale) axes [[0, 1], [], [], [], [], []] into (%s) : (!tile.buffer<64x64xf32, register>, i32, i32, i32, i32, f32) into (!tile.buffer<64x64xf32, register>) {
    ^bb0(%x: f32, %row0: i32, %col0: i32, %end: i32, %shift: i32, %sc: f32):
      %log2e = arith.constant 1.44269504 : f32
      %ninf = arith.constant 0xFF800000 : f32
      %i = tile.index 0
      %j = tile.index 1
      %row = arith.addi %row0, %i : i32
      %col = arith.addi %col0, %j : i32
      %last = arith.addi %row, %shift : i32
      %inside = arith.cmpi slt, %col, %end : i32
      %causal = arith.cmpi sle, %col, %last : i32
      %visible = arith.andi %inside, %causal : i1
      %c = arith.mulf %sc, %log2e : f32
      %y = arith.mulf %x, %c : f32
      %r = arith.select %visible, %y, %ninf : f32
      tile.yield %r : f32
    }
    tile.buffer_reduce max %s, 1 into %bm : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
    tile.buffer_map (%m, %bm) axes [[0], [0]] into (%mn, %alpha) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) {
    ^bb0(%old: f32, %new: f32):
      %ninf = arith.constant 0xFF800000 : f32
      %zero = arith.constant 0.0 : f32
      %top = arith.maximumf %old, %new : f32
      %dead = arith.cmpf oeq, %top, %ninf : f32
      %safe = arith.select %dead, %zero, %top : f32
      %d = arith.subf %old, %safe : f32
      %a = math.exp2 %d : f32
      tile.yield %top, %a : f32, f32
    }
    tile.buffer_map (%s, %mn) axes [[0, 1], [0]] into (%s, %p) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf16, register>) {
    ^bb0(%x: f32, %top: f32):
      %ninf = arith.constant 0xFF800000 : f32
      %zero = arith.constant 0.0 : f32
      %dead = arith.cmpf oeq, %top, %ninf : f32
      %safe = arith.select %dead, %zero, %top : f32
      %d = arith.subf %x, %safe : f32
      %e = math.exp2 %d : f32
      %half = arith.truncf %e : f32 to f16
      tile.yield %e, %half : f32, f16
    }
    tile.buffer_reduce sum %s, 1 into %bl : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
    tile.buffer_map (%l, %alpha, %bl) axes [[0], [0], [0]] into (%l) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
    ^bb0(%old: f32, %a: f32, %new: f32):
      %t = arith.mulf %old, %a : f32
      %r = arith.addf %t, %new : f32
      tile.yield %r : f32
    }
    tile.buffer_map (%acc, %alpha) axes [[0, 1], [0]] into (%acc) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf32, register>) {
    ^bb0(%x: f32, %a: f32):
      %t = arith.mulf %x, %a : f32
      tile.yield %t : f32
    }
    tile.copy_in %v[%b, %hk, %n0, %c0] dims [2, 3] bounded [0] limits(%skv) into %vs : !tile.global<4 x f16>, !tile.buffer<64x64xf16, shared>
    // CHECK: tile.gemm %p, %vs, %acc ieee split rows
    tile.gemm %p, %vs, %acc ieee split rows : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    // the carry of the maximum
    tile.copy %mn, %m : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
    // CHECK: stages = 2 : i64
  } {stages = 2 : i64}
  tile.buffer_map (%acc, %l) axes [[0, 1], [0]] into (%of) : (!tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64x64xf16, register>) {
  ^bb0(%x: f32, %sum: f32):
    %zero = arith.constant 0.0 : f32
    %dead = arith.cmpf oeq, %sum, %zero : f32
    %y = arith.divf %x, %sum : f32
    %z = arith.select %dead, %zero, %y : f32
    %half = arith.truncf %z : f32 to f16
    tile.yield %half : f16
  }
  tile.buffer_map (%m, %l) axes [[0], [0]] into (%m) : (!tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>) into (!tile.buffer<64xf32, register>) {
  ^bb0(%top: f32, %sum: f32):
    %ln2 = arith.constant 0.693147182 : f32
    %t = math.log2 %sum : f32
    %u = arith.addf %top, %t : f32
    %r = arith.mulf %u, %ln2 : f32
    tile.yield %r : f32
  }
  tile.copy_out %of, %o[%b, %h, %q0, %c0] dims [2, 3] bounded [0] limits(%sq) : !tile.buffer<64x64xf16, register>, !tile.global<4 x f16>
  tile.copy_out %m, %lse[%b, %h, %q0] dims [2] bounded [0] limits(%sq) : !tile.buffer<64xf32, register>, !tile.global<3 x f32>
  tile.end
}

// CHECK: tile.plan @forward_full
tile.plan @forward_full(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %scale: f32) {
  %b = tile.dim %q, 0 : !tile.global<4 x f16>
  %h = tile.dim %q, 1 : !tile.global<4 x f16>
  %hk = tile.dim %k, 1 : !tile.global<4 x f16>
  %sq = tile.dim %q, 2 : !tile.global<4 x f16>
  %skv = tile.dim %k, 2 : !tile.global<4 x f16>
  %group = arith.divsi %h, %hk : i32
  %block = arith.constant 64 : i32
  %nq = arith.ceildivsi %sq, %block : i32
  tile.launch @forward grid(%nq, %h, %b) args(%q, %k, %v, %o, %lse, %sq, %skv, %group, %skv, %scale) : !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<3 x f32>, i32, i32, i32, i32, f32
  tile.end
}

// CHECK: tile.plan @forward_causal
tile.plan @forward_causal(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %scale: f32) {
  %b = tile.dim %q, 0 : !tile.global<4 x f16>
  %h = tile.dim %q, 1 : !tile.global<4 x f16>
  %hk = tile.dim %k, 1 : !tile.global<4 x f16>
  %sq = tile.dim %q, 2 : !tile.global<4 x f16>
  %skv = tile.dim %k, 2 : !tile.global<4 x f16>
  %group = arith.divsi %h, %hk : i32
  %block = arith.constant 64 : i32
  %nq = arith.ceildivsi %sq, %block : i32
  %offset = arith.constant 0 : i32
  tile.launch @forward grid(%nq, %h, %b) args(%q, %k, %v, %o, %lse, %sq, %skv, %group, %offset, %scale) : !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<4 x f16>, !tile.global<3 x f32>, i32, i32, i32, i32, f32
  tile.end
}
