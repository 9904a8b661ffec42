// RUN: attn-opt %s -p tile-assign-memory | filecheck %s

// Scores of one block, their row sums carried: K goes to shared memory and is read as its transpose, the sum stays in place.
// CHECK: tile.kernel @sums({{.*}}) attributes {threads = 128 : i64}
tile.kernel @sums(%x: !tile.global<2 x f16>, %y: !tile.global<1 x f32>, %n: i32) attributes {num_warps = 4 : i64, num_stages = 2 : i64} {
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  // CHECK: %q = tile.buffer_alloc : !tile.buffer<64x32xf16, shared>
  // CHECK: %[[SUM:.*]] = tile.buffer_alloc : !tile.buffer<64xf32, register>
  // CHECK: %k = tile.buffer_alloc : !tile.buffer<64x32xf16, shared>
  %q = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f16> -> tensor<64x32xf16>
  %none = arith.constant dense<0.0> : tensor<64xf32>
  %zero = arith.constant dense<0.0> : tensor<64x64xf32>
  // CHECK: tile.copy_in %x[%c0, %c0] dims [0, 1] into %q
  // CHECK: tile.buffer_fill %[[SUM]],
  // CHECK: scf.for %i = %c0 to %n step %c64 : i32 {
  %sum = scf.for %i = %c0 to %n step %c64 iter_args(%old = %none) -> (tensor<64xf32>) : i32 {
    // CHECK: tile.copy_in %x[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %k
    %k = tile.load %x[%i, %c0] dims [0, 1] bounded [0] limits(%n) : !tile.global<2 x f16> -> tensor<64x32xf16>
    %t = tile.transpose %k : tensor<64x32xf16> -> tensor<32x64xf16>
    // CHECK: tile.buffer_fill %[[S:.*]], %{{.*}} : !tile.buffer<64x64xf32, register>, f32
    // CHECK: tile.gemm %q, %k, %[[S]] transpose_b ieee split rows
    %s = tile.dot %q, %t, %zero ieee : tensor<64x32xf16>, tensor<32x64xf16>, tensor<64x64xf32> -> tensor<64x64xf32>
    // CHECK: tile.buffer_reduce sum %[[S]], 1 into %[[R:.*]] :
    %r = tile.reduce sum %s, 1 : tensor<64x64xf32> -> tensor<64xf32>
    // CHECK: tile.buffer_map (%[[SUM]], %[[R]]) axes {{\[\[}}0], [0]] into (%[[SUM]])
    %new = tile.map (%old, %r) axes [[0], [0]] : (tensor<64xf32>, tensor<64xf32>) -> tensor<64xf32> {
    ^bb0(%a: f32, %b: f32):
      %c = arith.addf %a, %b : f32
      tile.yield %c : f32
    }
    // CHECK-NOT: tile.copy %
    scf.yield %new : tensor<64xf32>
    // CHECK: } {stages = 2 : i64}
  }
  // CHECK: tile.copy_out %[[SUM]], %y[%c0] dims [0]
  tile.store %sum, %y[%c0] dims [0] : tensor<64xf32>, !tile.global<1 x f32>
  tile.end
}

// What no product reads as a transpose is turned by way of shared memory; places of adds are computed where they are used.
// CHECK-LABEL: tile.kernel @adds
tile.kernel @adds(%x: !tile.global<2 x f16>, %w: !tile.global<2 x f32>, %all: !tile.global<1 x f32>, %h: i64, %n0: i32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %zero = arith.constant dense<0.0> : tensor<64x32xf32>
  %a = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f16> -> tensor<64x16xf16>
  %b = tile.load %x[%c0, %c0] dims [1, 0] : !tile.global<2 x f16> -> tensor<16x32xf16>
  // CHECK: tile.gemm %a, %b, %s ieee split rows
  %s = tile.dot %a, %b, %zero ieee : tensor<64x16xf16>, tensor<16x32xf16>, tensor<64x32xf32> -> tensor<64x32xf32>
  // CHECK: tile.copy %s, %s_shared : !tile.buffer<64x32xf32, register>, !tile.buffer<64x32xf32, shared>
  %t = tile.transpose %s : tensor<64x32xf32> -> tensor<32x64xf32>
  // CHECK: tile.buffer_map (%s_shared) axes {{\[\[}}1, 0]] into (%d)
  %d = tile.map (%t) axes [[0, 1]] : (tensor<32x64xf32>) -> tensor<32x64xf32> {
  ^bb0(%e: f32):
    %f = arith.negf %e : f32
    tile.yield %f : f32
  }
  %cols = tile.range %n0 : tensor<64xi32>
  %inside = tile.map (%cols) axes [[0]] : (tensor<64xi32>) -> tensor<64xi1> {
  ^bb0(%j: i32):
    %limit = arith.constant 60 : i32
    %i = arith.cmpi slt, %j, %limit : i32
    tile.yield %i : i1
  }
  // CHECK: tile.buffer_scatter_add (%d, %h, %n0, %n0) axes {{\[\[}}0, 1], [], [], []] into %w
  // CHECK: %[[COL:.*]] = arith.addi
  // CHECK: %[[IN:.*]] = arith.cmpi slt,
  // CHECK: tile.yield %{{.*}}, %{{.*}}, %[[COL]], %[[IN]] : f32, i64, i32, i1
  tile.scatter_add %d, %w[%h, %cols] where %inside axes [[], [1], [1]] : tensor<32x64xf32>, !tile.global<2 x f32>, i64, tensor<64xi32> where tensor<64xi1>
  %r = tile.reduce sum %d, 0 : tensor<32x64xf32> -> tensor<64xf32>
  // CHECK: %[[TOTAL:.*]] = tile.buffer_total sum %r : !tile.buffer<64xf32, register> -> f32
  %total = tile.reduce sum %r, 0 : tensor<64xf32> -> f32
  // CHECK: tile.atomic_add %[[TOTAL]], %all[%h : i64] dims [] : f32, !tile.global<1 x f32>
  tile.atomic_add %total, %all[%h : i64] dims [] : f32, !tile.global<1 x f32>
  tile.end
}

// A tile that a branch turns is turned anew where the branch may not have run, and once more only there.
// CHECK-LABEL: tile.kernel @branches
tile.kernel @branches(%x: !tile.global<2 x f32>, %y: !tile.global<2 x f32>, %n: i32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %zero = arith.constant dense<0.0> : tensor<32xf32>
  %v = tile.load %x[%c0, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<32x32xf32>
  %t = tile.transpose %v : tensor<32x32xf32> -> tensor<32x32xf32>
  %some = arith.cmpi sgt, %n, %c0 : i32
  // CHECK: scf.if
  %w = scf.if %some -> (tensor<32xf32>) {
    // CHECK: tile.buffer_map (%v_shared) axes {{\[\[}}1, 0]] into (%[[T:.*]]) :
    // CHECK: tile.buffer_reduce sum %[[T]], 1 into
    %r = tile.reduce sum %t, 1 : tensor<32x32xf32> -> tensor<32xf32>
    scf.yield %r : tensor<32xf32>
  } else {
    scf.yield %zero : tensor<32xf32>
  }
  // CHECK: tile.buffer_map (%v_shared) axes {{\[\[}}1, 0]] into (%[[U:.*]]) :
  // CHECK: tile.copy_out %[[U]], %y
  tile.store %t, %y[%c0, %c0] dims [0, 1] : tensor<32x32xf32>, !tile.global<2 x f32>
  // CHECK-NOT: tile.buffer_map
  // CHECK: tile.buffer_reduce max %[[U]], 0 into
  %m = tile.reduce max %t, 0 : tensor<32x32xf32> -> tensor<32xf32>
  tile.store %m, %y[%c0, %c0] dims [0] : tensor<32xf32>, !tile.global<2 x f32>
  tile.store %w, %y[%n, %c0] dims [0] : tensor<32xf32>, !tile.global<2 x f32>
  tile.end
}

// Running sums; a number that a loop carries beside a tensor stays a result of the loop.
// CHECK-LABEL: tile.kernel @scans
tile.kernel @scans(%x: !tile.global<2 x f32>, %y: !tile.global<1 x f32>, %n: i32) attributes {num_warps = 4 : i64} {
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %none = arith.constant 0.0 : f32
  %zero = arith.constant dense<0.0> : tensor<64x16xf32>
  // CHECK: %[[LAST:.*]] = scf.for %i = %c0 to %n step %c64 iter_args(%before = %none) -> (f32) : i32 {
  %sum, %last = scf.for %i = %c0 to %n step %c64 iter_args(%old = %zero, %before = %none) -> (tensor<64x16xf32>, f32) : i32 {
    %g = tile.load %x[%i, %c0] dims [0, 1] : !tile.global<2 x f32> -> tensor<64x16xf32>
    // CHECK: tile.buffer_scan sum %g, 0 reverse into %[[S:.*]] : !tile.buffer<64x16xf32, register>, !tile.buffer<64x16xf32, register>
    %s = tile.scan sum %g, 0 reverse 1 : tensor<64x16xf32> -> tensor<64x16xf32>
    // CHECK: tile.buffer_map (%{{.*}}, %[[S]])
    %new = tile.map (%old, %s) axes [[0, 1], [0, 1]] : (tensor<64x16xf32>, tensor<64x16xf32>) -> tensor<64x16xf32> {
    ^bb0(%a: f32, %b: f32):
      %c = arith.addf %a, %b : f32
      tile.yield %c : f32
    }
    %one = tile.load %x[%i, %c0] dims [] : !tile.global<2 x f32> -> f32
    // CHECK: %[[NEXT:.*]] = arith.addf %before,
    %next = arith.addf %before, %one : f32
    // CHECK: scf.yield %[[NEXT]] : f32
    scf.yield %new, %next : tensor<64x16xf32>, f32
  }
  // CHECK: tile.store %[[LAST]], %y[%c0]
  tile.store %last, %y[%c0] dims [] : f32, !tile.global<1 x f32>
  %top = tile.reduce max %sum, 0 : tensor<64x16xf32> -> tensor<16xf32>
  tile.store %top, %y[%c0] dims [0] : tensor<16xf32>, !tile.global<1 x f32>
  tile.end
}
