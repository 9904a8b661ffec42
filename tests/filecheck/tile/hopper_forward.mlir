// RUN: attn-opt %s | attn-opt | filecheck %s

// A softmax forward for devices with asynchronous copies and products, at head size 128, for scale > 0: persistent
// programs of three roles. A producer warp fills rings of two blocks of K and V, from the last block to
// the first; two consumers of 64 rows each (one region) overlap the product for the next scores with the one for the output.
// The producer takes tiles off an atomic counter and tells the consumers. Blocks past the end read as zeros and are masked in the first, peeled block.

// CHECK-LABEL: tile.kernel @causal
tile.kernel @causal(%qd: !tile.descriptor<1x1x64x128xf16>, %kd: !tile.descriptor<1x1x128x128xf16>, %vd: !tile.descriptor<1x1x128x128xf16>, %od: !tile.descriptor<1x1x64x128xf16>, %lse: !tile.global<3 x f32>, %counter: !tile.global<1 x i32>, %sq: i32, %skv: i32, %kv_blocks: i32, %heads: i32, %group: i32, %row_tiles: i32, %all_heads: i32, %heads_in_flight: i32, %tiles: i32, %programs: i32, %scale: f32) attributes {num_warps = 4 : i64} {
  %qs = tile.ring : !tile.buffer<2x64x128xf16, shared>
  %os = tile.ring : !tile.buffer<2x64x128xf16, shared>
  %ks = tile.ring : !tile.buffer<2x128x128xf16, shared>
  %vs = tile.ring : !tile.buffer<2x128x128xf16, shared>
  %next_row = tile.ring : !tile.buffer<2xi32, shared>
  %next_batch = tile.ring : !tile.buffer<2xi32, shared>
  %next_head = tile.ring : !tile.buffer<2xi32, shared>
  %next_blocks = tile.ring : !tile.buffer<2xi32, shared>
  %q_full = tile.make_barriers count 1 : !tile.barriers<2>
  %q_empty = tile.make_barriers count 1 : !tile.barriers<2>
  %k_full = tile.make_barriers count 1 : !tile.barriers<2>
  %k_empty = tile.make_barriers count 2 : !tile.barriers<2>
  %v_full = tile.make_barriers count 1 : !tile.barriers<2>
  %v_empty = tile.make_barriers count 2 : !tile.barriers<2>
  %t_full = tile.make_barriers count 1 : !tile.barriers<2>
  %t_empty = tile.make_barriers count 2 : !tile.barriers<2>
  tile.roles (%qd, %kd, %vd, %od, %lse, %counter, %sq, %skv, %kv_blocks, %heads, %group, %row_tiles, %all_heads, %heads_in_flight, %tiles, %programs, %scale, %qs, %os, %ks, %vs, %next_row, %next_batch, %next_head, %next_blocks, %q_full, %q_empty, %k_full, %k_empty, %v_full, %v_empty, %t_full, %t_empty) : (!tile.descriptor<1x1x64x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x64x128xf16>, !tile.global<3 x f32>, !tile.global<1 x i32>, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, f32, !tile.buffer<2x64x128xf16, shared>, !tile.buffer<2x64x128xf16, shared>, !tile.buffer<2x128x128xf16, shared>, !tile.buffer<2x128x128xf16, shared>, !tile.buffer<2xi32, shared>, !tile.buffer<2xi32, shared>, !tile.buffer<2xi32, shared>, !tile.buffer<2xi32, shared>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>)
    // CHECK: role count 2 warps 4 registers 240
    role count 2 warps 4 registers 240 {
    ^bb0(%wg: i32, %qd_: !tile.descriptor<1x1x64x128xf16>, %kd_: !tile.descriptor<1x1x128x128xf16>, %vd_: !tile.descriptor<1x1x128x128xf16>, %od_: !tile.descriptor<1x1x64x128xf16>, %lse_: !tile.global<3 x f32>, %counter_: !tile.global<1 x i32>, %sq_: i32, %skv_: i32, %kv_blocks_: i32, %heads_: i32, %group_: i32, %row_tiles_: i32, %all_heads_: i32, %heads_in_flight_: i32, %tiles_: i32, %programs_: i32, %scale_: f32, %qs_: !tile.buffer<2x64x128xf16, shared>, %os_: !tile.buffer<2x64x128xf16, shared>, %ks_: !tile.buffer<2x128x128xf16, shared>, %vs_: !tile.buffer<2x128x128xf16, shared>, %next_row_: !tile.buffer<2xi32, shared>, %next_batch_: !tile.buffer<2xi32, shared>, %next_head_: !tile.buffer<2xi32, shared>, %next_blocks_: !tile.buffer<2xi32, shared>, %q_full_: !tile.barriers<2>, %q_empty_: !tile.barriers<2>, %k_full_: !tile.barriers<2>, %k_empty_: !tile.barriers<2>, %v_full_: !tile.barriers<2>, %v_empty_: !tile.barriers<2>, %t_full_: !tile.barriers<2>, %t_empty_: !tile.barriers<2>):
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c2 = arith.constant 2 : i32
      %c64 = arith.constant 64 : i32
      %c128 = arith.constant 128 : i32
      // The next tile, from the producer; a negative row tile is the end.
      %it_end, %t_end, %mi_end, %b_end, %h_end, %nb_end = scf.while (%it_w = %c0, %t_w = %c0) : (i32, i32) -> (i32, i32, i32, i32, i32, i32) {
        %cell = arith.andi %t_w, %c1 : i32
        %t_half = arith.divsi %t_w, %c2 : i32
        %cell_parity = arith.andi %t_half, %c1 : i32
        tile.barrier_wait %t_full_[%cell], %cell_parity : !tile.barriers<2>
        %mi_w = tile.cell_read %next_row_[%cell] : !tile.buffer<2xi32, shared> -> i32
        %b_w = tile.cell_read %next_batch_[%cell] : !tile.buffer<2xi32, shared> -> i32
        %h_w = tile.cell_read %next_head_[%cell] : !tile.buffer<2xi32, shared> -> i32
        %nb_w = tile.cell_read %next_blocks_[%cell] : !tile.buffer<2xi32, shared> -> i32
        tile.barrier_arrive %t_empty_[%cell] : !tile.barriers<2>
        %more = arith.cmpi sge, %mi_w, %c0 : i32
        scf.condition(%more) %it_w, %t_w, %mi_w, %b_w, %h_w, %nb_w : i32, i32, i32, i32, i32, i32
      } do {
      ^bb0(%it: i32, %t: i32, %mi: i32, %b: i32, %h: i32, %nb: i32):
        %m0 = arith.muli %mi, %c128 : i32
        %idx = arith.remsi %it, %c2 : i32
        %round = arith.divsi %it, %c2 : i32
        %ph = arith.andi %round, %c1 : i32
        // This role's 64 rows of Q, to registers.
        %qslot = tile.slot %qs_[%wg] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        %t_parity = arith.andi %t, %c1 : i32
        tile.barrier_wait %q_full_[%wg], %t_parity : !tile.barriers<2>
        %q = tile.read %qslot : !tile.buffer<64x128xf16, shared> -> tensor<64x128xf16>
        tile.proxy_fence
        tile.barrier_arrive %q_empty_[%wg] : !tile.barriers<2>
        // The last block of keys, the only one that needs the mask.
        %k0 = tile.slot %ks_[%idx] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        %k0t = tile.transposed_slot %k0 : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %k_full_[%idx], %ph : !tile.barriers<2>
        %x0p = tile.async_dot %q, %k0t layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared> -> !tile.pending<tensor<64x128xf32>>
        %x0 = tile.wait 0, %x0p : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
        %wrow = arith.muli %wg, %c64 : i32
        %row0 = arith.addi %m0, %wrow : i32
        %last_block = arith.subi %nb, %c1 : i32
        %n0 = arith.muli %last_block, %c128 : i32
        %rows = tile.range %row0 : tensor<64xi32>
        %cols = tile.range %n0 : tensor<128xi32>
        %s0 = tile.map (%x0, %rows, %cols, %skv_) axes [[0, 1], [0], [1], []] : (tensor<64x128xf32>, tensor<64xi32>, tensor<128xi32>, i32) -> tensor<64x128xf32> {
        ^bb1(%x: f32, %row: i32, %col: i32, %limit: i32):
          %ninf = arith.constant 0xFF800000 : f32
          %exists = arith.cmpi slt, %col, %limit : i32
          %past = arith.cmpi sge, %row, %col : i32
          %visible = arith.andi %exists, %past : i1
          %r = arith.select %visible, %x, %ninf : f32
          tile.yield %r : f32
        }
        %mx0 = tile.reduce max %s0, 1 : tensor<64x128xf32> -> tensor<64xf32>
        %ms0 = tile.map (%mx0, %scale_) axes [[0], []] : (tensor<64xf32>, f32) -> tensor<64xf32> {
        ^bb2(%x: f32, %c: f32):
          %r = arith.mulf %x, %c : f32
          tile.yield %r : f32
        }
        %p0, %ph0 = tile.map (%s0, %ms0, %scale_) axes [[0, 1], [0], []] : (tensor<64x128xf32>, tensor<64xf32>, f32) -> (tensor<64x128xf32>, tensor<64x128xf16>) {
        ^bb3(%x: f32, %y: f32, %c: f32):
          %sc = arith.mulf %x, %c : f32
          %d = arith.subf %sc, %y : f32
          %e = math.exp2 %d : f32
          %w = arith.truncf %e : f32 to f16
          tile.yield %e, %w : f32, f16
        }
        %l0 = tile.reduce_partial sum %p0 groups 4 width 2 : tensor<64x128xf32> -> tensor<64x4xf32>
        %pa0 = tile.dot_operand %ph0 layout <4x1, 128> : tensor<64x128xf16>
        %acc0 = arith.constant dense<0.0> : tensor<64x128xf32>
        // Block j of scores and block j - 1 of outputs at the same time; the exponentials of j hide under the latter.
        %it_l, %idx_l, %ph_l, %m_l, %l_l, %pa_l, %acc_l = scf.for %j = %c1 to %nb step %c1 iter_args(%itj = %it, %idxj = %idx, %phj = %ph, %m = %mx0, %l = %l0, %pa = %pa0, %acc = %acc0) -> (i32, i32, i32, tensor<64xf32>, tensor<64x4xf32>, tensor<64x128xf16>, tensor<64x128xf32>) : i32 {
          %it1 = arith.addi %itj, %c1 : i32
          %idx1 = arith.remsi %it1, %c2 : i32
          %round1 = arith.divsi %it1, %c2 : i32
          %ph1 = arith.andi %round1, %c1 : i32
          %k = tile.slot %ks_[%idx1] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          %kt = tile.transposed_slot %k : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %k_full_[%idx1], %ph1 : !tile.barriers<2>
          %sp = tile.async_dot %q, %kt layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared> -> !tile.pending<tensor<64x128xf32>>
          %v = tile.slot %vs_[%idxj] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %v_full_[%idxj], %phj : !tile.barriers<2>
          %op = tile.async_dot %pa, %v, %acc layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared>, tensor<64x128xf32> -> !tile.pending<tensor<64x128xf32>>
          tile.barrier_arrive %k_empty_[%idxj] : !tile.barriers<2>
          %later = arith.cmpi sgt, %j, %c1 : i32
          tile.barrier_arrive %v_empty_[%idx1] if %later : !tile.barriers<2>
          %s = tile.wait 1, %sp : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
          %bm = tile.reduce max %s, 1 : tensor<64x128xf32> -> tensor<64xf32>
          %mn, %ms, %alpha = tile.map (%m, %bm, %scale_) axes [[0], [0], []] : (tensor<64xf32>, tensor<64xf32>, f32) -> (tensor<64xf32>, tensor<64xf32>, tensor<64xf32>) {
          ^bb4(%x: f32, %y: f32, %c: f32):
            %mx = arith.maximumf %x, %y : f32
            %new = arith.mulf %mx, %c : f32
            %old = arith.mulf %x, %c : f32
            %d = arith.subf %old, %new : f32
            %e = math.exp2 %d : f32
            tile.yield %mx, %new, %e : f32, f32, f32
          }
          %p, %phalf = tile.map (%s, %ms, %scale_) axes [[0, 1], [0], []] : (tensor<64x128xf32>, tensor<64xf32>, f32) -> (tensor<64x128xf32>, tensor<64x128xf16>) {
          ^bb5(%x: f32, %y: f32, %c: f32):
            %sc = arith.mulf %x, %c : f32
            %d = arith.subf %sc, %y : f32
            %e = math.exp2 %d : f32
            %w = arith.truncf %e : f32 to f16
            tile.yield %e, %w : f32, f16
          }
          %lp = tile.reduce_partial sum %p groups 4 width 2 : tensor<64x128xf32> -> tensor<64x4xf32>
          %ln = tile.map (%l, %alpha, %lp) axes [[0, 1], [0], [0, 1]] : (tensor<64x4xf32>, tensor<64xf32>, tensor<64x4xf32>) -> tensor<64x4xf32> {
          ^bb6(%x: f32, %a: f32, %y: f32):
            %xa = arith.mulf %x, %a : f32
            %r = arith.addf %xa, %y : f32
            tile.yield %r : f32
          }
          %pan = tile.dot_operand %phalf layout <4x1, 128> : tensor<64x128xf16>
          %lpin = tile.pin %ln : tensor<64x4xf32>
          %o1 = tile.wait 0, %op : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
          %accn = tile.map (%o1, %alpha) axes [[0, 1], [0]] : (tensor<64x128xf32>, tensor<64xf32>) -> tensor<64x128xf32> {
          ^bb7(%x: f32, %a: f32):
            %r = arith.mulf %x, %a : f32
            tile.yield %r : f32
          }
          scf.yield %it1, %idx1, %ph1, %mn, %lpin, %pan, %accn : i32, i32, i32, tensor<64xf32>, tensor<64x4xf32>, tensor<64x128xf16>, tensor<64x128xf32>
        }
        // The last product, under which the row statistics are finished.
        %v_last = tile.slot %vs_[%idx_l] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %v_full_[%idx_l], %ph_l : !tile.barriers<2>
        %ol = tile.async_dot %pa_l, %v_last, %acc_l layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared>, tensor<64x128xf32> -> !tile.pending<tensor<64x128xf32>>
        tile.barrier_arrive %k_empty_[%idx_l] : !tile.barriers<2>
        %it_next = arith.addi %it_l, %c1 : i32
        %other = arith.remsi %it_next, %c2 : i32
        %many = arith.cmpi sgt, %nb, %c1 : i32
        tile.barrier_arrive %v_empty_[%other] if %many : !tile.barriers<2>
        %lt = tile.reduce sum %l_l, 1 : tensor<64x4xf32> -> tensor<64xf32>
        %inv, %lset = tile.map (%m_l, %lt, %scale_) axes [[0], [0], []] : (tensor<64xf32>, tensor<64xf32>, f32) -> (tensor<64xf32>, tensor<64xf32>) {
        ^bb8(%x: f32, %y: f32, %c: f32):
          %one = arith.constant 1.0 : f32
          %ln2 = arith.constant 0.693147182 : f32
          %i = arith.divf %one, %y : f32
          %xs = arith.mulf %x, %c : f32
          %lg = math.log2 %y : f32
          %sum = arith.addf %xs, %lg : f32
          %r = arith.mulf %sum, %ln2 : f32
          tile.yield %i, %r : f32, f32
        }
        tile.store %lset, %lse_[%b, %h, %row0] dims [2] bounded [0] limits(%sq_) : tensor<64xf32>, !tile.global<3 x f32>
        tile.async_store_wait 0
        %of = tile.wait 0, %ol : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
        tile.barrier_arrive %v_empty_[%idx_l] : !tile.barriers<2>
        %ot = tile.map (%of, %inv) axes [[0, 1], [0]] : (tensor<64x128xf32>, tensor<64xf32>) -> tensor<64x128xf16> {
        ^bb9(%x: f32, %i: f32):
          %xi = arith.mulf %x, %i : f32
          %r = arith.truncf %xi : f32 to f16
          tile.yield %r : f16
        }
        %oslot = tile.slot %os_[%wg] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        tile.write %ot, %oslot : tensor<64x128xf16>, !tile.buffer<64x128xf16, shared>
        tile.proxy_fence
        tile.async_store %oslot, %od_[%b, %h, %row0, %c0] : !tile.buffer<64x128xf16, shared>, !tile.descriptor<1x1x64x128xf16>
        %t_next = arith.addi %t, %c1 : i32
        scf.yield %it_next, %t_next : i32, i32
      }
      tile.async_store_wait 0
      tile.end
    }
    // CHECK: role count 1 warps 1 registers 24
    role count 1 warps 1 registers 24 {
    ^bb0(%wg: i32, %qd_: !tile.descriptor<1x1x64x128xf16>, %kd_: !tile.descriptor<1x1x128x128xf16>, %vd_: !tile.descriptor<1x1x128x128xf16>, %od_: !tile.descriptor<1x1x64x128xf16>, %lse_: !tile.global<3 x f32>, %counter_: !tile.global<1 x i32>, %sq_: i32, %skv_: i32, %kv_blocks_: i32, %heads_: i32, %group_: i32, %row_tiles_: i32, %all_heads_: i32, %heads_in_flight_: i32, %tiles_: i32, %programs_: i32, %scale_: f32, %qs_: !tile.buffer<2x64x128xf16, shared>, %os_: !tile.buffer<2x64x128xf16, shared>, %ks_: !tile.buffer<2x128x128xf16, shared>, %vs_: !tile.buffer<2x128x128xf16, shared>, %next_row_: !tile.buffer<2xi32, shared>, %next_batch_: !tile.buffer<2xi32, shared>, %next_head_: !tile.buffer<2xi32, shared>, %next_blocks_: !tile.buffer<2xi32, shared>, %q_full_: !tile.barriers<2>, %q_empty_: !tile.barriers<2>, %k_full_: !tile.barriers<2>, %k_empty_: !tile.barriers<2>, %v_full_: !tile.barriers<2>, %v_empty_: !tile.barriers<2>, %t_full_: !tile.barriers<2>, %t_empty_: !tile.barriers<2>):
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c2 = arith.constant 2 : i32
      %c64 = arith.constant 64 : i32
      %c128 = arith.constant 128 : i32
      %first_tile = tile.program_id 0
      %it_end, %t_end, %tile_end = scf.while (%it_w = %c0, %t_w = %c0, %tile_w = %first_tile) : (i32, i32, i32) -> (i32, i32, i32) {
        %more = arith.cmpi slt, %tile_w, %tiles_ : i32
        scf.condition(%more) %it_w, %t_w, %tile_w : i32, i32, i32
      } do {
      ^bb0(%it: i32, %t: i32, %tile: i32):
        // Tile number to (row tile, batch, head): heads in groups whose keys and values stay in the L2 cache.
        %per_group = arith.muli %row_tiles_, %heads_in_flight_ : i32
        %g = arith.divsi %tile, %per_group : i32
        %in_group = arith.remsi %tile, %per_group : i32
        %first_head = arith.muli %g, %heads_in_flight_ : i32
        %heads_left = arith.subi %all_heads_, %first_head : i32
        %width = arith.minsi %heads_in_flight_, %heads_left : i32
        %mi0 = arith.divsi %in_group, %width : i32
        %head_in_group = arith.remsi %in_group, %width : i32
        %head = arith.addi %first_head, %head_in_group : i32
        %b = arith.divsi %head, %heads_ : i32
        %h = arith.remsi %head, %heads_ : i32
        // Long rows first.
        %last_row = arith.subi %row_tiles_, %c1 : i32
        %mi = arith.subi %last_row, %mi0 : i32
        %diagonal = arith.addi %mi, %c1 : i32
        %nb = arith.minsi %diagonal, %kv_blocks_ : i32
        // The consumers learn of the tile.
        %cell = arith.andi %t, %c1 : i32
        %t_half = arith.divsi %t, %c2 : i32
        %cell_round = arith.andi %t_half, %c1 : i32
        %cell_free = arith.xori %cell_round, %c1 : i32
        tile.barrier_wait %t_empty_[%cell], %cell_free : !tile.barriers<2>
        tile.cell_write %mi, %next_row_[%cell] : !tile.buffer<2xi32, shared>
        tile.cell_write %b, %next_batch_[%cell] : !tile.buffer<2xi32, shared>
        tile.cell_write %h, %next_head_[%cell] : !tile.buffer<2xi32, shared>
        tile.cell_write %nb, %next_blocks_[%cell] : !tile.buffer<2xi32, shared>
        tile.barrier_arrive %t_full_[%cell] : !tile.barriers<2>
        %m0 = arith.muli %mi, %c128 : i32
        %idx = arith.remsi %it, %c2 : i32
        %round = arith.divsi %it, %c2 : i32
        %ph = arith.andi %round, %c1 : i32
        %hk = arith.divsi %h, %group_ : i32
        %t_odd = arith.andi %t, %c1 : i32
        %q_parity = arith.xori %t_odd, %c1 : i32
        %free = arith.xori %ph, %c1 : i32
        %m1 = arith.addi %m0, %c64 : i32
        %last_block = arith.subi %nb, %c1 : i32
        %n0 = arith.muli %last_block, %c128 : i32
        %q0 = tile.slot %qs_[%c0] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        tile.barrier_wait %q_empty_[%c0], %q_parity : !tile.barriers<2>
        tile.barrier_expect %q_full_[%c0], 16384 : !tile.barriers<2>
        tile.async_load %qd_[%b, %h, %m0, %c0], %q0, %q_full_[%c0] : !tile.descriptor<1x1x64x128xf16>, !tile.buffer<64x128xf16, shared>, !tile.barriers<2>
        %k0 = tile.slot %ks_[%idx] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %k_empty_[%idx], %free : !tile.barriers<2>
        tile.barrier_expect %k_full_[%idx], 32768 : !tile.barriers<2>
        tile.async_load %kd_[%b, %hk, %n0, %c0], %k0, %k_full_[%idx] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
        %q1 = tile.slot %qs_[%c1] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        tile.barrier_wait %q_empty_[%c1], %q_parity : !tile.barriers<2>
        tile.barrier_expect %q_full_[%c1], 16384 : !tile.barriers<2>
        tile.async_load %qd_[%b, %h, %m1, %c0], %q1, %q_full_[%c1] : !tile.descriptor<1x1x64x128xf16>, !tile.buffer<64x128xf16, shared>, !tile.barriers<2>
        %it_l, %idx_l, %ph_l, %n_l = scf.for %j = %c1 to %nb step %c1 iter_args(%itj = %it, %idxj = %idx, %phj = %ph, %n = %n0) -> (i32, i32, i32, i32) : i32 {
          %it1 = arith.addi %itj, %c1 : i32
          %idx1 = arith.remsi %it1, %c2 : i32
          %round1 = arith.divsi %it1, %c2 : i32
          %ph1 = arith.andi %round1, %c1 : i32
          %free1 = arith.xori %ph1, %c1 : i32
          %freej = arith.xori %phj, %c1 : i32
          %nn = arith.subi %n, %c128 : i32
          %k = tile.slot %ks_[%idx1] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %k_empty_[%idx1], %free1 : !tile.barriers<2>
          tile.barrier_expect %k_full_[%idx1], 32768 : !tile.barriers<2>
          tile.async_load %kd_[%b, %hk, %nn, %c0], %k, %k_full_[%idx1] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
          %v = tile.slot %vs_[%idxj] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %v_empty_[%idxj], %freej : !tile.barriers<2>
          tile.barrier_expect %v_full_[%idxj], 32768 : !tile.barriers<2>
          tile.async_load %vd_[%b, %hk, %n, %c0], %v, %v_full_[%idxj] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
          scf.yield %it1, %idx1, %ph1, %nn : i32, i32, i32, i32
        }
        %free_l = arith.xori %ph_l, %c1 : i32
        %v_last = tile.slot %vs_[%idx_l] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %v_empty_[%idx_l], %free_l : !tile.barriers<2>
        tile.barrier_expect %v_full_[%idx_l], 32768 : !tile.barriers<2>
        tile.async_load %vd_[%b, %hk, %n_l, %c0], %v_last, %v_full_[%idx_l] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
        %taken = tile.fetch_add %counter_[%c0], %c1 : !tile.global<1 x i32>
        %next_tile = arith.addi %taken, %programs_ : i32
        %it_next = arith.addi %it_l, %c1 : i32
        %t_next = arith.addi %t, %c1 : i32
        scf.yield %it_next, %t_next, %next_tile : i32, i32, i32
      }
      %end = arith.constant -1 : i32
      %cell = arith.andi %t_end, %c1 : i32
      %t_half = arith.divsi %t_end, %c2 : i32
      %cell_round = arith.andi %t_half, %c1 : i32
      %cell_free = arith.xori %cell_round, %c1 : i32
      tile.barrier_wait %t_empty_[%cell], %cell_free : !tile.barriers<2>
      tile.cell_write %end, %next_row_[%cell] : !tile.buffer<2xi32, shared>
      tile.barrier_arrive %t_full_[%cell] : !tile.barriers<2>
      tile.end
    }
  tile.end
}

// CHECK-LABEL: tile.plan @forward_causal
tile.plan @forward_causal(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %scale: f32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c128 = arith.constant 128 : i32
  %batch = tile.dim %q, 0 : !tile.global<4 x f16>
  %heads = tile.dim %q, 1 : !tile.global<4 x f16>
  %kv_heads = tile.dim %k, 1 : !tile.global<4 x f16>
  %sq = tile.dim %q, 2 : !tile.global<4 x f16>
  %skv = tile.dim %k, 2 : !tile.global<4 x f16>
  %group = arith.divsi %heads, %kv_heads : i32
  %kv_blocks = arith.ceildivsi %skv, %c128 : i32
  %row_tiles = arith.ceildivsi %sq, %c128 : i32
  %all_heads = arith.muli %batch, %heads : i32
  %tiles = arith.muli %row_tiles, %all_heads : i32
  // Keys and values of the heads in flight: 512 bytes a position, 8 MiB in all.
  %room = arith.constant 16384 : i32
  %fit = arith.divsi %room, %skv : i32
  %few = arith.minsi %fit, %all_heads : i32
  %heads_in_flight = arith.maxsi %few, %c1 : i32
  %processors = tile.processor_count
  %programs = arith.minsi %processors, %tiles : i32
  %log2e = arith.constant 1.44269504 : f32
  %scale2 = arith.mulf %scale, %log2e : f32
  %counter = tile.alloc(%c1) : !tile.global<1 x i32>
  tile.fill %counter, %c0 : !tile.global<1 x i32>, i32
  %qd = tile.describe %q : !tile.global<4 x f16> -> !tile.descriptor<1x1x64x128xf16>
  %kd = tile.describe %k : !tile.global<4 x f16> -> !tile.descriptor<1x1x128x128xf16>
  %vd = tile.describe %v : !tile.global<4 x f16> -> !tile.descriptor<1x1x128x128xf16>
  %od = tile.describe %o : !tile.global<4 x f16> -> !tile.descriptor<1x1x64x128xf16>
  tile.launch @causal grid(%programs) args(%qd, %kd, %vd, %od, %lse, %counter, %sq, %skv, %kv_blocks, %heads, %group, %row_tiles, %all_heads, %heads_in_flight, %tiles, %programs, %scale2) : !tile.descriptor<1x1x64x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x64x128xf16>, !tile.global<3 x f32>, !tile.global<1 x i32>, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, f32
  tile.end
}

// CHECK-LABEL: tile.kernel @full
tile.kernel @full(%qd: !tile.descriptor<1x1x64x128xf16>, %kd: !tile.descriptor<1x1x128x128xf16>, %vd: !tile.descriptor<1x1x128x128xf16>, %od: !tile.descriptor<1x1x64x128xf16>, %lse: !tile.global<3 x f32>, %counter: !tile.global<1 x i32>, %sq: i32, %skv: i32, %kv_blocks: i32, %heads: i32, %group: i32, %row_tiles: i32, %all_heads: i32, %heads_in_flight: i32, %tiles: i32, %programs: i32, %scale: f32) attributes {num_warps = 4 : i64} {
  %qs = tile.ring : !tile.buffer<2x64x128xf16, shared>
  %os = tile.ring : !tile.buffer<2x64x128xf16, shared>
  %ks = tile.ring : !tile.buffer<2x128x128xf16, shared>
  %vs = tile.ring : !tile.buffer<2x128x128xf16, shared>
  %next_row = tile.ring : !tile.buffer<2xi32, shared>
  %next_batch = tile.ring : !tile.buffer<2xi32, shared>
  %next_head = tile.ring : !tile.buffer<2xi32, shared>
  %next_blocks = tile.ring : !tile.buffer<2xi32, shared>
  %q_full = tile.make_barriers count 1 : !tile.barriers<2>
  %q_empty = tile.make_barriers count 1 : !tile.barriers<2>
  %k_full = tile.make_barriers count 1 : !tile.barriers<2>
  %k_empty = tile.make_barriers count 2 : !tile.barriers<2>
  %v_full = tile.make_barriers count 1 : !tile.barriers<2>
  %v_empty = tile.make_barriers count 2 : !tile.barriers<2>
  %t_full = tile.make_barriers count 1 : !tile.barriers<2>
  %t_empty = tile.make_barriers count 2 : !tile.barriers<2>
  tile.roles (%qd, %kd, %vd, %od, %lse, %counter, %sq, %skv, %kv_blocks, %heads, %group, %row_tiles, %all_heads, %heads_in_flight, %tiles, %programs, %scale, %qs, %os, %ks, %vs, %next_row, %next_batch, %next_head, %next_blocks, %q_full, %q_empty, %k_full, %k_empty, %v_full, %v_empty, %t_full, %t_empty) : (!tile.descriptor<1x1x64x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x64x128xf16>, !tile.global<3 x f32>, !tile.global<1 x i32>, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, f32, !tile.buffer<2x64x128xf16, shared>, !tile.buffer<2x64x128xf16, shared>, !tile.buffer<2x128x128xf16, shared>, !tile.buffer<2x128x128xf16, shared>, !tile.buffer<2xi32, shared>, !tile.buffer<2xi32, shared>, !tile.buffer<2xi32, shared>, !tile.buffer<2xi32, shared>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>, !tile.barriers<2>)
    // CHECK: role count 2 warps 4 registers 240
    role count 2 warps 4 registers 240 {
    ^bb0(%wg: i32, %qd_: !tile.descriptor<1x1x64x128xf16>, %kd_: !tile.descriptor<1x1x128x128xf16>, %vd_: !tile.descriptor<1x1x128x128xf16>, %od_: !tile.descriptor<1x1x64x128xf16>, %lse_: !tile.global<3 x f32>, %counter_: !tile.global<1 x i32>, %sq_: i32, %skv_: i32, %kv_blocks_: i32, %heads_: i32, %group_: i32, %row_tiles_: i32, %all_heads_: i32, %heads_in_flight_: i32, %tiles_: i32, %programs_: i32, %scale_: f32, %qs_: !tile.buffer<2x64x128xf16, shared>, %os_: !tile.buffer<2x64x128xf16, shared>, %ks_: !tile.buffer<2x128x128xf16, shared>, %vs_: !tile.buffer<2x128x128xf16, shared>, %next_row_: !tile.buffer<2xi32, shared>, %next_batch_: !tile.buffer<2xi32, shared>, %next_head_: !tile.buffer<2xi32, shared>, %next_blocks_: !tile.buffer<2xi32, shared>, %q_full_: !tile.barriers<2>, %q_empty_: !tile.barriers<2>, %k_full_: !tile.barriers<2>, %k_empty_: !tile.barriers<2>, %v_full_: !tile.barriers<2>, %v_empty_: !tile.barriers<2>, %t_full_: !tile.barriers<2>, %t_empty_: !tile.barriers<2>):
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c2 = arith.constant 2 : i32
      %c64 = arith.constant 64 : i32
      %c128 = arith.constant 128 : i32
      // The next tile, from the producer; a negative row tile is the end.
      %it_end, %t_end, %mi_end, %b_end, %h_end, %nb_end = scf.while (%it_w = %c0, %t_w = %c0) : (i32, i32) -> (i32, i32, i32, i32, i32, i32) {
        %cell = arith.andi %t_w, %c1 : i32
        %t_half = arith.divsi %t_w, %c2 : i32
        %cell_parity = arith.andi %t_half, %c1 : i32
        tile.barrier_wait %t_full_[%cell], %cell_parity : !tile.barriers<2>
        %mi_w = tile.cell_read %next_row_[%cell] : !tile.buffer<2xi32, shared> -> i32
        %b_w = tile.cell_read %next_batch_[%cell] : !tile.buffer<2xi32, shared> -> i32
        %h_w = tile.cell_read %next_head_[%cell] : !tile.buffer<2xi32, shared> -> i32
        %nb_w = tile.cell_read %next_blocks_[%cell] : !tile.buffer<2xi32, shared> -> i32
        tile.barrier_arrive %t_empty_[%cell] : !tile.barriers<2>
        %more = arith.cmpi sge, %mi_w, %c0 : i32
        scf.condition(%more) %it_w, %t_w, %mi_w, %b_w, %h_w, %nb_w : i32, i32, i32, i32, i32, i32
      } do {
      ^bb0(%it: i32, %t: i32, %mi: i32, %b: i32, %h: i32, %nb: i32):
        %m0 = arith.muli %mi, %c128 : i32
        %idx = arith.remsi %it, %c2 : i32
        %round = arith.divsi %it, %c2 : i32
        %ph = arith.andi %round, %c1 : i32
        // This role's 64 rows of Q, to registers.
        %qslot = tile.slot %qs_[%wg] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        %t_parity = arith.andi %t, %c1 : i32
        tile.barrier_wait %q_full_[%wg], %t_parity : !tile.barriers<2>
        %q = tile.read %qslot : !tile.buffer<64x128xf16, shared> -> tensor<64x128xf16>
        tile.proxy_fence
        tile.barrier_arrive %q_empty_[%wg] : !tile.barriers<2>
        // The last block of keys, the only one that needs the mask.
        %k0 = tile.slot %ks_[%idx] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        %k0t = tile.transposed_slot %k0 : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %k_full_[%idx], %ph : !tile.barriers<2>
        %x0p = tile.async_dot %q, %k0t layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared> -> !tile.pending<tensor<64x128xf32>>
        %x0 = tile.wait 0, %x0p : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
        %wrow = arith.muli %wg, %c64 : i32
        %row0 = arith.addi %m0, %wrow : i32
        %last_block = arith.subi %nb, %c1 : i32
        %n0 = arith.muli %last_block, %c128 : i32
        %cols = tile.range %n0 : tensor<128xi32>
        %s0 = tile.map (%x0, %cols, %skv_) axes [[0, 1], [1], []] : (tensor<64x128xf32>, tensor<128xi32>, i32) -> tensor<64x128xf32> {
        ^bb1(%x: f32, %col: i32, %limit: i32):
          %ninf = arith.constant 0xFF800000 : f32
          %exists = arith.cmpi slt, %col, %limit : i32
          %r = arith.select %exists, %x, %ninf : f32
          tile.yield %r : f32
        }
        %mx0 = tile.reduce max %s0, 1 : tensor<64x128xf32> -> tensor<64xf32>
        %ms0 = tile.map (%mx0, %scale_) axes [[0], []] : (tensor<64xf32>, f32) -> tensor<64xf32> {
        ^bb2(%x: f32, %c: f32):
          %r = arith.mulf %x, %c : f32
          tile.yield %r : f32
        }
        %p0, %ph0 = tile.map (%s0, %ms0, %scale_) axes [[0, 1], [0], []] : (tensor<64x128xf32>, tensor<64xf32>, f32) -> (tensor<64x128xf32>, tensor<64x128xf16>) {
        ^bb3(%x: f32, %y: f32, %c: f32):
          %sc = arith.mulf %x, %c : f32
          %d = arith.subf %sc, %y : f32
          %e = math.exp2 %d : f32
          %w = arith.truncf %e : f32 to f16
          tile.yield %e, %w : f32, f16
        }
        %l0 = tile.reduce_partial sum %p0 groups 4 width 2 : tensor<64x128xf32> -> tensor<64x4xf32>
        %pa0 = tile.dot_operand %ph0 layout <4x1, 128> : tensor<64x128xf16>
        %acc0 = arith.constant dense<0.0> : tensor<64x128xf32>
        // Block j of scores and block j - 1 of outputs at the same time; the exponentials of j hide under the latter.
        %it_l, %idx_l, %ph_l, %m_l, %l_l, %pa_l, %acc_l = scf.for %j = %c1 to %nb step %c1 iter_args(%itj = %it, %idxj = %idx, %phj = %ph, %m = %mx0, %l = %l0, %pa = %pa0, %acc = %acc0) -> (i32, i32, i32, tensor<64xf32>, tensor<64x4xf32>, tensor<64x128xf16>, tensor<64x128xf32>) : i32 {
          %it1 = arith.addi %itj, %c1 : i32
          %idx1 = arith.remsi %it1, %c2 : i32
          %round1 = arith.divsi %it1, %c2 : i32
          %ph1 = arith.andi %round1, %c1 : i32
          %k = tile.slot %ks_[%idx1] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          %kt = tile.transposed_slot %k : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %k_full_[%idx1], %ph1 : !tile.barriers<2>
          %sp = tile.async_dot %q, %kt layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared> -> !tile.pending<tensor<64x128xf32>>
          %v = tile.slot %vs_[%idxj] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %v_full_[%idxj], %phj : !tile.barriers<2>
          %op = tile.async_dot %pa, %v, %acc layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared>, tensor<64x128xf32> -> !tile.pending<tensor<64x128xf32>>
          tile.barrier_arrive %k_empty_[%idxj] : !tile.barriers<2>
          %later = arith.cmpi sgt, %j, %c1 : i32
          tile.barrier_arrive %v_empty_[%idx1] if %later : !tile.barriers<2>
          %s = tile.wait 1, %sp : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
          %bm = tile.reduce max %s, 1 : tensor<64x128xf32> -> tensor<64xf32>
          %mn, %ms, %alpha = tile.map (%m, %bm, %scale_) axes [[0], [0], []] : (tensor<64xf32>, tensor<64xf32>, f32) -> (tensor<64xf32>, tensor<64xf32>, tensor<64xf32>) {
          ^bb4(%x: f32, %y: f32, %c: f32):
            %mx = arith.maximumf %x, %y : f32
            %new = arith.mulf %mx, %c : f32
            %old = arith.mulf %x, %c : f32
            %d = arith.subf %old, %new : f32
            %e = math.exp2 %d : f32
            tile.yield %mx, %new, %e : f32, f32, f32
          }
          %p, %phalf = tile.map (%s, %ms, %scale_) axes [[0, 1], [0], []] : (tensor<64x128xf32>, tensor<64xf32>, f32) -> (tensor<64x128xf32>, tensor<64x128xf16>) {
          ^bb5(%x: f32, %y: f32, %c: f32):
            %sc = arith.mulf %x, %c : f32
            %d = arith.subf %sc, %y : f32
            %e = math.exp2 %d : f32
            %w = arith.truncf %e : f32 to f16
            tile.yield %e, %w : f32, f16
          }
          %lp = tile.reduce_partial sum %p groups 4 width 2 : tensor<64x128xf32> -> tensor<64x4xf32>
          %ln = tile.map (%l, %alpha, %lp) axes [[0, 1], [0], [0, 1]] : (tensor<64x4xf32>, tensor<64xf32>, tensor<64x4xf32>) -> tensor<64x4xf32> {
          ^bb6(%x: f32, %a: f32, %y: f32):
            %xa = arith.mulf %x, %a : f32
            %r = arith.addf %xa, %y : f32
            tile.yield %r : f32
          }
          %pan = tile.dot_operand %phalf layout <4x1, 128> : tensor<64x128xf16>
          %lpin = tile.pin %ln : tensor<64x4xf32>
          %o1 = tile.wait 0, %op : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
          %accn = tile.map (%o1, %alpha) axes [[0, 1], [0]] : (tensor<64x128xf32>, tensor<64xf32>) -> tensor<64x128xf32> {
          ^bb7(%x: f32, %a: f32):
            %r = arith.mulf %x, %a : f32
            tile.yield %r : f32
          }
          scf.yield %it1, %idx1, %ph1, %mn, %lpin, %pan, %accn : i32, i32, i32, tensor<64xf32>, tensor<64x4xf32>, tensor<64x128xf16>, tensor<64x128xf32>
        }
        // The last product, under which the row statistics are finished.
        %v_last = tile.slot %vs_[%idx_l] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %v_full_[%idx_l], %ph_l : !tile.barriers<2>
        %ol = tile.async_dot %pa_l, %v_last, %acc_l layout <4x1, 128> : tensor<64x128xf16>, !tile.buffer<128x128xf16, shared>, tensor<64x128xf32> -> !tile.pending<tensor<64x128xf32>>
        tile.barrier_arrive %k_empty_[%idx_l] : !tile.barriers<2>
        %it_next = arith.addi %it_l, %c1 : i32
        %other = arith.remsi %it_next, %c2 : i32
        %many = arith.cmpi sgt, %nb, %c1 : i32
        tile.barrier_arrive %v_empty_[%other] if %many : !tile.barriers<2>
        %lt = tile.reduce sum %l_l, 1 : tensor<64x4xf32> -> tensor<64xf32>
        %inv, %lset = tile.map (%m_l, %lt, %scale_) axes [[0], [0], []] : (tensor<64xf32>, tensor<64xf32>, f32) -> (tensor<64xf32>, tensor<64xf32>) {
        ^bb8(%x: f32, %y: f32, %c: f32):
          %one = arith.constant 1.0 : f32
          %ln2 = arith.constant 0.693147182 : f32
          %i = arith.divf %one, %y : f32
          %xs = arith.mulf %x, %c : f32
          %lg = math.log2 %y : f32
          %sum = arith.addf %xs, %lg : f32
          %r = arith.mulf %sum, %ln2 : f32
          tile.yield %i, %r : f32, f32
        }
        tile.store %lset, %lse_[%b, %h, %row0] dims [2] bounded [0] limits(%sq_) : tensor<64xf32>, !tile.global<3 x f32>
        tile.async_store_wait 0
        %of = tile.wait 0, %ol : !tile.pending<tensor<64x128xf32>> -> tensor<64x128xf32>
        tile.barrier_arrive %v_empty_[%idx_l] : !tile.barriers<2>
        %ot = tile.map (%of, %inv) axes [[0, 1], [0]] : (tensor<64x128xf32>, tensor<64xf32>) -> tensor<64x128xf16> {
        ^bb9(%x: f32, %i: f32):
          %xi = arith.mulf %x, %i : f32
          %r = arith.truncf %xi : f32 to f16
          tile.yield %r : f16
        }
        %oslot = tile.slot %os_[%wg] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        tile.write %ot, %oslot : tensor<64x128xf16>, !tile.buffer<64x128xf16, shared>
        tile.proxy_fence
        tile.async_store %oslot, %od_[%b, %h, %row0, %c0] : !tile.buffer<64x128xf16, shared>, !tile.descriptor<1x1x64x128xf16>
        %t_next = arith.addi %t, %c1 : i32
        scf.yield %it_next, %t_next : i32, i32
      }
      tile.async_store_wait 0
      tile.end
    }
    // CHECK: role count 1 warps 1 registers 24
    role count 1 warps 1 registers 24 {
    ^bb0(%wg: i32, %qd_: !tile.descriptor<1x1x64x128xf16>, %kd_: !tile.descriptor<1x1x128x128xf16>, %vd_: !tile.descriptor<1x1x128x128xf16>, %od_: !tile.descriptor<1x1x64x128xf16>, %lse_: !tile.global<3 x f32>, %counter_: !tile.global<1 x i32>, %sq_: i32, %skv_: i32, %kv_blocks_: i32, %heads_: i32, %group_: i32, %row_tiles_: i32, %all_heads_: i32, %heads_in_flight_: i32, %tiles_: i32, %programs_: i32, %scale_: f32, %qs_: !tile.buffer<2x64x128xf16, shared>, %os_: !tile.buffer<2x64x128xf16, shared>, %ks_: !tile.buffer<2x128x128xf16, shared>, %vs_: !tile.buffer<2x128x128xf16, shared>, %next_row_: !tile.buffer<2xi32, shared>, %next_batch_: !tile.buffer<2xi32, shared>, %next_head_: !tile.buffer<2xi32, shared>, %next_blocks_: !tile.buffer<2xi32, shared>, %q_full_: !tile.barriers<2>, %q_empty_: !tile.barriers<2>, %k_full_: !tile.barriers<2>, %k_empty_: !tile.barriers<2>, %v_full_: !tile.barriers<2>, %v_empty_: !tile.barriers<2>, %t_full_: !tile.barriers<2>, %t_empty_: !tile.barriers<2>):
      %c0 = arith.constant 0 : i32
      %c1 = arith.constant 1 : i32
      %c2 = arith.constant 2 : i32
      %c64 = arith.constant 64 : i32
      %c128 = arith.constant 128 : i32
      %first_tile = tile.program_id 0
      %it_end, %t_end, %tile_end = scf.while (%it_w = %c0, %t_w = %c0, %tile_w = %first_tile) : (i32, i32, i32) -> (i32, i32, i32) {
        %more = arith.cmpi slt, %tile_w, %tiles_ : i32
        scf.condition(%more) %it_w, %t_w, %tile_w : i32, i32, i32
      } do {
      ^bb0(%it: i32, %t: i32, %tile: i32):
        // Tile number to (row tile, batch, head): heads in groups whose keys and values stay in the L2 cache.
        %per_group = arith.muli %row_tiles_, %heads_in_flight_ : i32
        %g = arith.divsi %tile, %per_group : i32
        %in_group = arith.remsi %tile, %per_group : i32
        %first_head = arith.muli %g, %heads_in_flight_ : i32
        %heads_left = arith.subi %all_heads_, %first_head : i32
        %width = arith.minsi %heads_in_flight_, %heads_left : i32
        %mi = arith.divsi %in_group, %width : i32
        %head_in_group = arith.remsi %in_group, %width : i32
        %head = arith.addi %first_head, %head_in_group : i32
        %b = arith.divsi %head, %heads_ : i32
        %h = arith.remsi %head, %heads_ : i32
        // The consumers learn of the tile.
        %cell = arith.andi %t, %c1 : i32
        %t_half = arith.divsi %t, %c2 : i32
        %cell_round = arith.andi %t_half, %c1 : i32
        %cell_free = arith.xori %cell_round, %c1 : i32
        tile.barrier_wait %t_empty_[%cell], %cell_free : !tile.barriers<2>
        tile.cell_write %mi, %next_row_[%cell] : !tile.buffer<2xi32, shared>
        tile.cell_write %b, %next_batch_[%cell] : !tile.buffer<2xi32, shared>
        tile.cell_write %h, %next_head_[%cell] : !tile.buffer<2xi32, shared>
        tile.cell_write %kv_blocks_, %next_blocks_[%cell] : !tile.buffer<2xi32, shared>
        tile.barrier_arrive %t_full_[%cell] : !tile.barriers<2>
        %m0 = arith.muli %mi, %c128 : i32
        %idx = arith.remsi %it, %c2 : i32
        %round = arith.divsi %it, %c2 : i32
        %ph = arith.andi %round, %c1 : i32
        %hk = arith.divsi %h, %group_ : i32
        %t_odd = arith.andi %t, %c1 : i32
        %q_parity = arith.xori %t_odd, %c1 : i32
        %free = arith.xori %ph, %c1 : i32
        %m1 = arith.addi %m0, %c64 : i32
        %last_block = arith.subi %kv_blocks_, %c1 : i32
        %n0 = arith.muli %last_block, %c128 : i32
        %q0 = tile.slot %qs_[%c0] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        tile.barrier_wait %q_empty_[%c0], %q_parity : !tile.barriers<2>
        tile.barrier_expect %q_full_[%c0], 16384 : !tile.barriers<2>
        tile.async_load %qd_[%b, %h, %m0, %c0], %q0, %q_full_[%c0] : !tile.descriptor<1x1x64x128xf16>, !tile.buffer<64x128xf16, shared>, !tile.barriers<2>
        %k0 = tile.slot %ks_[%idx] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %k_empty_[%idx], %free : !tile.barriers<2>
        tile.barrier_expect %k_full_[%idx], 32768 : !tile.barriers<2>
        tile.async_load %kd_[%b, %hk, %n0, %c0], %k0, %k_full_[%idx] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
        %q1 = tile.slot %qs_[%c1] : !tile.buffer<2x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
        tile.barrier_wait %q_empty_[%c1], %q_parity : !tile.barriers<2>
        tile.barrier_expect %q_full_[%c1], 16384 : !tile.barriers<2>
        tile.async_load %qd_[%b, %h, %m1, %c0], %q1, %q_full_[%c1] : !tile.descriptor<1x1x64x128xf16>, !tile.buffer<64x128xf16, shared>, !tile.barriers<2>
        %it_l, %idx_l, %ph_l, %n_l = scf.for %j = %c1 to %kv_blocks_ step %c1 iter_args(%itj = %it, %idxj = %idx, %phj = %ph, %n = %n0) -> (i32, i32, i32, i32) : i32 {
          %it1 = arith.addi %itj, %c1 : i32
          %idx1 = arith.remsi %it1, %c2 : i32
          %round1 = arith.divsi %it1, %c2 : i32
          %ph1 = arith.andi %round1, %c1 : i32
          %free1 = arith.xori %ph1, %c1 : i32
          %freej = arith.xori %phj, %c1 : i32
          %nn = arith.subi %n, %c128 : i32
          %k = tile.slot %ks_[%idx1] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %k_empty_[%idx1], %free1 : !tile.barriers<2>
          tile.barrier_expect %k_full_[%idx1], 32768 : !tile.barriers<2>
          tile.async_load %kd_[%b, %hk, %nn, %c0], %k, %k_full_[%idx1] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
          %v = tile.slot %vs_[%idxj] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
          tile.barrier_wait %v_empty_[%idxj], %freej : !tile.barriers<2>
          tile.barrier_expect %v_full_[%idxj], 32768 : !tile.barriers<2>
          tile.async_load %vd_[%b, %hk, %n, %c0], %v, %v_full_[%idxj] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
          scf.yield %it1, %idx1, %ph1, %nn : i32, i32, i32, i32
        }
        %free_l = arith.xori %ph_l, %c1 : i32
        %v_last = tile.slot %vs_[%idx_l] : !tile.buffer<2x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
        tile.barrier_wait %v_empty_[%idx_l], %free_l : !tile.barriers<2>
        tile.barrier_expect %v_full_[%idx_l], 32768 : !tile.barriers<2>
        tile.async_load %vd_[%b, %hk, %n_l, %c0], %v_last, %v_full_[%idx_l] : !tile.descriptor<1x1x128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<2>
        %taken = tile.fetch_add %counter_[%c0], %c1 : !tile.global<1 x i32>
        %next_tile = arith.addi %taken, %programs_ : i32
        %it_next = arith.addi %it_l, %c1 : i32
        %t_next = arith.addi %t, %c1 : i32
        scf.yield %it_next, %t_next, %next_tile : i32, i32, i32
      }
      %end = arith.constant -1 : i32
      %cell = arith.andi %t_end, %c1 : i32
      %t_half = arith.divsi %t_end, %c2 : i32
      %cell_round = arith.andi %t_half, %c1 : i32
      %cell_free = arith.xori %cell_round, %c1 : i32
      tile.barrier_wait %t_empty_[%cell], %cell_free : !tile.barriers<2>
      tile.cell_write %end, %next_row_[%cell] : !tile.buffer<2xi32, shared>
      tile.barrier_arrive %t_full_[%cell] : !tile.barriers<2>
      tile.end
    }
  tile.end
}

// CHECK-LABEL: tile.plan @forward_full
tile.plan @forward_full(%q: !tile.global<4 x f16>, %k: !tile.global<4 x f16>, %v: !tile.global<4 x f16>, %o: !tile.global<4 x f16>, %lse: !tile.global<3 x f32>, %scale: f32) {
  %c0 = arith.constant 0 : i32
  %c1 = arith.constant 1 : i32
  %c128 = arith.constant 128 : i32
  %batch = tile.dim %q, 0 : !tile.global<4 x f16>
  %heads = tile.dim %q, 1 : !tile.global<4 x f16>
  %kv_heads = tile.dim %k, 1 : !tile.global<4 x f16>
  %sq = tile.dim %q, 2 : !tile.global<4 x f16>
  %skv = tile.dim %k, 2 : !tile.global<4 x f16>
  %group = arith.divsi %heads, %kv_heads : i32
  %kv_blocks = arith.ceildivsi %skv, %c128 : i32
  %row_tiles = arith.ceildivsi %sq, %c128 : i32
  %all_heads = arith.muli %batch, %heads : i32
  %tiles = arith.muli %row_tiles, %all_heads : i32
  // Keys and values of the heads in flight: 512 bytes a position, 8 MiB in all.
  %room = arith.constant 16384 : i32
  %fit = arith.divsi %room, %skv : i32
  %few = arith.minsi %fit, %all_heads : i32
  %heads_in_flight = arith.maxsi %few, %c1 : i32
  %processors = tile.processor_count
  %programs = arith.minsi %processors, %tiles : i32
  %log2e = arith.constant 1.44269504 : f32
  %scale2 = arith.mulf %scale, %log2e : f32
  %counter = tile.alloc(%c1) : !tile.global<1 x i32>
  tile.fill %counter, %c0 : !tile.global<1 x i32>, i32
  %qd = tile.describe %q : !tile.global<4 x f16> -> !tile.descriptor<1x1x64x128xf16>
  %kd = tile.describe %k : !tile.global<4 x f16> -> !tile.descriptor<1x1x128x128xf16>
  %vd = tile.describe %v : !tile.global<4 x f16> -> !tile.descriptor<1x1x128x128xf16>
  %od = tile.describe %o : !tile.global<4 x f16> -> !tile.descriptor<1x1x64x128xf16>
  tile.launch @full grid(%programs) args(%qd, %kd, %vd, %od, %lse, %counter, %sq, %skv, %kv_blocks, %heads, %group, %row_tiles, %all_heads, %heads_in_flight, %tiles, %programs, %scale2) : !tile.descriptor<1x1x64x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x128x128xf16>, !tile.descriptor<1x1x64x128xf16>, !tile.global<3 x f32>, !tile.global<1 x i32>, i32, i32, i32, i32, i32, i32, i32, i32, i32, i32, f32
  tile.end
}
