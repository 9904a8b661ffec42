// RUN: attn-opt %s | attn-opt | filecheck %s

// Every op of the buffered level, fragments laid out by the target: y += relu(x x^T) row by row, for blocks of 64 rows.
// CHECK-LABEL: tile.kernel @gram(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %m: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64}
tile.kernel @gram(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %m: !tile.global<1 x f32>, %n: i32) attributes {threads = 128 : i64} {
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  // CHECK: %xs = tile.buffer_alloc : !tile.buffer<64x32xf16, shared>
  %xs = tile.buffer_alloc : !tile.buffer<64x32xf16, shared>
  // CHECK: %ks = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x32xf16, shared>
  %ks = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x32xf16, shared>
  // CHECK: layout #tile.swizzled<8, 1, 4>
  %ts = tile.buffer_alloc layout #tile.swizzled<8, 1, 4> : !tile.buffer<64x32xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %xr = tile.buffer_alloc : !tile.buffer<64x32xf16, register>
  %top = tile.buffer_alloc : !tile.buffer<64xf32, register>
  %pid = tile.program_id 0
  %r0 = arith.muli %pid, %c64 : i32
  // CHECK: tile.copy_in %x[%r0, %c0] dims [0, 1] bounded [0] limits(%n) into %xs : !tile.global<2 x f16>, !tile.buffer<64x32xf16, shared>
  tile.copy_in %x[%r0, %c0] dims [0, 1] bounded [0] limits(%n) into %xs : !tile.global<2 x f16>, !tile.buffer<64x32xf16, shared>
  // CHECK: tile.copy %xs, %xr : !tile.buffer<64x32xf16, shared>, !tile.buffer<64x32xf16, register>
  tile.copy %xs, %xr : !tile.buffer<64x32xf16, shared>, !tile.buffer<64x32xf16, register>
  tile.copy %xr, %ts : !tile.buffer<64x32xf16, register>, !tile.buffer<64x32xf16, shared>
  scf.for %n0 = %c0 to %n step %c64 : i32 {
    tile.copy_in %x[%n0, %c0] dims [0, 1] bounded [0] limits(%n) into %ks : !tile.global<2 x f16>, !tile.buffer<64x32xf16, shared>
    // CHECK: tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
    tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
    // CHECK: tile.gemm %ts, %ks, %s transpose_b ieee split rows : !tile.buffer<64x32xf16, shared>, {{.*}}, !tile.buffer<64x64xf32, register>
    tile.gemm %ts, %ks, %s transpose_b ieee split rows : !tile.buffer<64x32xf16, shared>, !tile.buffer<64x32xf16, shared>, !tile.buffer<64x64xf32, register>
    // CHECK: tile.buffer_map (%s, %n0, %n) axes {{\[\[}}0, 1], [], []] into (%s) : (!tile.buffer<64x64xf32, register>, i32, i32) into (!tile.buffer<64x64xf32, register>) {
    tile.buffer_map (%s, %n0, %n) axes [[0, 1], [], []] into (%s) : (!tile.buffer<64x64xf32, register>, i32, i32) into (!tile.buffer<64x64xf32, register>) {
    ^bb0(%e: f32, %start: i32, %limit: i32):
      %z = arith.constant 0.0 : f32
      // CHECK: tile.index 1
      %j = tile.index 1
      %col = arith.addi %start, %j : i32
      // CHECK: tile.keep %col : i32
      %kept = tile.keep %col : i32
      %ok = arith.cmpi slt, %kept, %limit : i32
      %relu = arith.maximumf %e, %z : f32
      %r = arith.select %ok, %relu, %z : f32
      tile.yield %r : f32
    }
    // CHECK: tile.buffer_atomic_add %s, %y[%r0, %n0] dims [0, 1] bounded [0, 1] limits(%n, %n) : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
    tile.buffer_atomic_add %s, %y[%r0, %n0] dims [0, 1] bounded [0, 1] limits(%n, %n) : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
    // CHECK: tile.buffer_reduce max %s, 1 into %top : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
    tile.buffer_reduce max %s, 1 into %top : !tile.buffer<64x64xf32, register>, !tile.buffer<64xf32, register>
    // CHECK: tile.copy_out %top, %m[%r0] dims [0] bounded [0] limits(%n) : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
    tile.copy_out %top, %m[%r0] dims [0] bounded [0] limits(%n) : !tile.buffer<64xf32, register>, !tile.global<1 x f32>
    // CHECK: tile.buffer_scan sum %top, 0 reverse into %top : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
    tile.buffer_scan sum %top, 0 reverse into %top : !tile.buffer<64xf32, register>, !tile.buffer<64xf32, register>
    // CHECK: } {stages = 2 : i64}
  } {stages = 2 : i64}
  tile.end
}

// CHECK-LABEL: tile.plan @run
tile.plan @run(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %m: !tile.global<1 x f32>) {
  %n = tile.dim %x, 0 : !tile.global<2 x f16>
  %c64 = arith.constant 64 : i32
  %blocks = arith.ceildivsi %n, %c64 : i32
  tile.launch @gram grid(%blocks) args(%x, %y, %m, %n) : !tile.global<2 x f16>, !tile.global<2 x f32>, !tile.global<1 x f32>, i32
  tile.end
}

// Fragments laid out by the schedule: the accumulator of one product is the right operand of the next.
// CHECK-LABEL: tile.kernel @chain
tile.kernel @chain(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %l: !tile.global<1 x f32>) attributes {threads = 256 : i64, explicit_barriers} {
  %c0 = arith.constant 0 : i32
  %zero = arith.constant 0.0 : f32
  %xs = tile.buffer_alloc layout #tile.padded<8> : !tile.buffer<64x64xf16, shared>
  // CHECK: tile.buffer_alloc layout #tile.mfma<32x32x8, b, 1x4> : !tile.buffer<64x128xf16, register>
  %q = tile.buffer_alloc layout #tile.mfma<32x32x8, b, 1x4> : !tile.buffer<64x128xf16, register>
  %s = tile.buffer_alloc layout #tile.mfma<32x32x8, acc, 1x4> : !tile.buffer<64x128xf32, register>
  %p = tile.buffer_alloc layout #tile.mfma<32x32x8, b, 1x4> : !tile.buffer<64x128xf16, register>
  // CHECK: layout #tile.sliced<0, #tile.mfma<32x32x8, acc, 1x4>> : !tile.buffer<128xf32, register>
  %sum = tile.buffer_alloc layout #tile.sliced<0, #tile.mfma<32x32x8, acc, 1x4>> : !tile.buffer<128xf32, register>
  tile.copy_in %x[%c0, %c0] dims [0, 1] into %xs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.copy_in %x[%c0, %c0] dims [1, 0] into %q : !tile.global<2 x f16>, !tile.buffer<64x128xf16, register>
  tile.buffer_fill %s, %zero : !tile.buffer<64x128xf32, register>, f32
  // CHECK: tile.barrier
  tile.barrier
  // CHECK: tile.gemm %xs, %q, %s ieee : !tile.buffer<64x64xf16, shared>
  tile.gemm %xs, %q, %s ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, register>, !tile.buffer<64x128xf32, register>
  // CHECK: tile.gemm %xs, %q, %s clear ieee {pending}
  // CHECK-NEXT: tile.wait_products 1 first 0
  // CHECK-NEXT: tile.wait_products 0
  tile.gemm %xs, %q, %s clear ieee {pending} : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, register>, !tile.buffer<64x128xf32, register>
  tile.wait_products 1 first 0
  tile.wait_products 0
  tile.buffer_reduce sum %s, 0 into %sum : !tile.buffer<64x128xf32, register>, !tile.buffer<128xf32, register>
  tile.buffer_map (%s, %sum) axes [[0, 1], [1]] into (%p) : (!tile.buffer<64x128xf32, register>, !tile.buffer<128xf32, register>) into (!tile.buffer<64x128xf16, register>) {
  ^bb0(%e: f32, %t: f32):
    %d = arith.subf %e, %t : f32
    %h = arith.truncf %d : f32 to f16
    tile.yield %h : f16
  }
  tile.gemm %xs, %p, %s transpose_a ieee : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x128xf16, register>, !tile.buffer<64x128xf32, register>
  tile.copy_out %s, %y[%c0, %c0] dims [1, 0] : !tile.buffer<64x128xf32, register>, !tile.global<2 x f32>
  tile.copy_out %sum, %l[%c0] dims [0] : !tile.buffer<128xf32, register>, !tile.global<1 x f32>
  tile.end
}

// CHECK-LABEL: tile.plan @run_chain
tile.plan @run_chain(%x: !tile.global<2 x f16>, %y: !tile.global<2 x f32>, %l: !tile.global<1 x f32>) {
  %c1 = arith.constant 1 : i32
  tile.launch @chain grid(%c1) args(%x, %y, %l) : !tile.global<2 x f16>, !tile.global<2 x f32>, !tile.global<1 x f32>
  tile.end
}

// A total for every thread; adds at computed places; a tile in shared memory read as its transpose.
// CHECK-LABEL: tile.kernel @scattered
tile.kernel @scattered(%d: f32, %h: i64, %w: !tile.global<2 x f32>, %all: !tile.global<1 x f32>) attributes {threads = 128 : i64} {
  %s = tile.buffer_alloc : !tile.buffer<64x32xf32, register>
  %v = tile.buffer_alloc : !tile.buffer<32xf32, register>
  %shared = tile.buffer_alloc : !tile.buffer<32x64xf32, shared>
  tile.buffer_fill %shared, %d : !tile.buffer<32x64xf32, shared>, f32
  // CHECK: tile.buffer_map (%shared) axes {{\[\[}}1, 0]] into (%s)
  tile.buffer_map (%shared) axes [[1, 0]] into (%s) : (!tile.buffer<32x64xf32, shared>) into (!tile.buffer<64x32xf32, register>) {
  ^bb0(%x: f32):
    tile.yield %x : f32
  }
  // CHECK: tile.buffer_scatter_add (%s, %h) axes {{\[\[}}0, 1], []] into %w : (!tile.buffer<64x32xf32, register>, i64) into !tile.global<2 x f32> {
  tile.buffer_scatter_add (%s, %h) axes [[0, 1], []] into %w : (!tile.buffer<64x32xf32, register>, i64) into !tile.global<2 x f32> {
  ^bb0(%x: f32, %head: i64):
    %j = tile.index 1
    %yes = arith.constant true
    tile.yield %x, %head, %j, %yes : f32, i64, i32, i1
  }
  tile.buffer_reduce sum %s, 0 into %v : !tile.buffer<64x32xf32, register>, !tile.buffer<32xf32, register>
  // CHECK: %t = tile.buffer_total sum %v : !tile.buffer<32xf32, register> -> f32
  %t = tile.buffer_total sum %v : !tile.buffer<32xf32, register> -> f32
  tile.atomic_add %t, %all[%h : i64] dims [] : f32, !tile.global<1 x f32>
  tile.end
}
