// RUN: attn-opt %s -p tilelang-bounds,tilelang-copies,tilelang-overlap | filecheck %s

// The second product runs one iteration late; the weights are rounded behind the wait for it.
// CHECK-LABEL: tile.kernel @k(
// CHECK-SAME: registers = array<i64: 24, 240>, overlap
tile.kernel @k(%q: !tile.global<2 x f16>, %k: !tile.global<2 x f16>, %v: !tile.global<2 x f16>, %o: !tile.global<2 x f16>, %n: i32)
    attributes {threads = 128 : i64} {
  %qs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %ks = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %vs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %p = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %acc = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %out = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  // CHECK: tile.copy_in %q[%c0, %c0] dims [0, 1] into %qs {block, bulk}
  tile.copy_in %q[%c0, %c0] dims [0, 1] into %qs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.buffer_fill %acc, %zero : !tile.buffer<64x64xf32, register>, f32
  // CHECK: scf.for
  scf.for %i = %c0 to %n step %c64 : i32 {
    // CHECK-NEXT: tile.copy_in %k[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %ks {block, bulk}
    tile.copy_in %k[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %ks : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
    // CHECK-NEXT: tile.gemm %qs, %ks, %s transpose_b clear ieee split rows {pending}
    tile.gemm %qs, %ks, %s transpose_b ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    // CHECK-NEXT: tile.wait_products 1 first 0
    // CHECK-NEXT: tile.buffer_map (%s) axes {{\[\[}}0, 1]] into (%[[E:.*]]) : ({{.*}}) into (!tile.buffer<64x64xf32, register>)
    // CHECK: tile.wait_products 0
    // CHECK-NEXT: tile.buffer_map (%[[E]]) axes {{\[\[}}0, 1]] into (%p)
    // CHECK: arith.truncf
    tile.buffer_map (%s) axes [[0, 1]] into (%p) : (!tile.buffer<64x64xf32, register>) into (!tile.buffer<64x64xf16, register>) {
    ^bb0(%x: f32):
      %e = math.exp2 %x : f32
      %r = arith.truncf %e : f32 to f16
      tile.yield %r : f16
    }
    // CHECK: tile.copy_in %v
    // CHECK-NEXT: tile.gemm %p, %vs, %acc ieee split rows {pending, late}
    tile.copy_in %v[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %vs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    tile.gemm %p, %vs, %acc ieee split rows : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  // CHECK: } {stages = 2 : i64, once}
  } {stages = 2 : i64}
  // CHECK-NEXT: tile.wait_products 0
  // CHECK: tile.copy %out, %[[O:.*]] : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>
  // CHECK-NEXT: tile.copy_out %[[O]], %o[%c0, %c0] dims [0, 1] {block, bulk}
  tile.buffer_map (%acc) axes [[0, 1]] into (%out) : (!tile.buffer<64x64xf32, register>) into (!tile.buffer<64x64xf16, register>) {
  ^bb0(%x: f32):
    %r = arith.truncf %x : f32 to f16
    tile.yield %r : f16
  }
  tile.copy_out %out, %o[%c0, %c0] dims [0, 1] : !tile.buffer<64x64xf16, register>, !tile.global<2 x f16>
  tile.end
}

// A product whose left operand the next scores need stays where it is.
// CHECK-LABEL: tile.kernel @needed(
// CHECK-NOT: pending
// CHECK-NOT: overlap
tile.kernel @needed(%q: !tile.global<2 x f16>, %k: !tile.global<2 x f16>, %v: !tile.global<2 x f16>, %o: !tile.global<2 x f32>, %n: i32)
    attributes {threads = 128 : i64} {
  %qs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %ks = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %vs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %p = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %acc = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %q[%c0, %c0] dims [0, 1] into %qs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.buffer_fill %acc, %zero : !tile.buffer<64x64xf32, register>, f32
  scf.for %i = %c0 to %n step %c64 : i32 {
    tile.copy_in %k[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %ks : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    tile.copy %acc, %s : !tile.buffer<64x64xf32, register>, !tile.buffer<64x64xf32, register>
    tile.gemm %qs, %ks, %s transpose_b ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    tile.buffer_map (%s) axes [[0, 1]] into (%p) : (!tile.buffer<64x64xf32, register>) into (!tile.buffer<64x64xf16, register>) {
    ^bb0(%x: f32):
      %r = arith.truncf %x : f32 to f16
      tile.yield %r : f16
    }
    tile.copy_in %v[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %vs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    tile.gemm %p, %vs, %acc ieee split rows : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  } {stages = 2 : i64}
  tile.copy_out %acc, %o[%c0, %c0] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  tile.end
}

// A mask is evaluated in blocks that may have hidden elements only: where the last key is behind the first query.
// CHECK-LABEL: tile.kernel @masked(
tile.kernel @masked(%q: !tile.global<2 x f16>, %k: !tile.global<2 x f16>, %v: !tile.global<2 x f16>, %o: !tile.global<2 x f32>, %n: i32, %q0: i32)
    attributes {threads = 128 : i64} {
  %qs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %ks = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %vs = tile.buffer_alloc : !tile.buffer<64x64xf16, shared>
  %s = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %p = tile.buffer_alloc : !tile.buffer<64x64xf16, register>
  %acc = tile.buffer_alloc : !tile.buffer<64x64xf32, register>
  %c0 = arith.constant 0 : i32
  %c64 = arith.constant 64 : i32
  %zero = arith.constant 0.0 : f32
  tile.copy_in %q[%c0, %c0] dims [0, 1] into %qs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
  tile.buffer_fill %acc, %zero : !tile.buffer<64x64xf32, register>, f32
  scf.for %i = %c0 to %n step %c64 : i32 {
    tile.copy_in %k[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %ks : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    tile.buffer_fill %s, %zero : !tile.buffer<64x64xf32, register>, f32
    tile.gemm %qs, %ks, %s transpose_b ieee split rows : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
    // CHECK: %[[KEY:.*]] = arith.addi %i, %{{.*}} : i32
    // CHECK: %[[QUERY:.*]] = arith.addi %q0, %{{.*}} : i32
    // CHECK: %[[WHOLE:.*]] = arith.cmpi sle, %[[KEY]], %[[QUERY]] : i32
    // CHECK: tile.buffer_map (%s, %i, %q0) {{.*}} into (%w) :
    // CHECK: math.exp2
    // CHECK-NEXT: tile.yield
    // CHECK: arith.xori %[[WHOLE]]
    // CHECK: scf.if
    // CHECK-NEXT: tile.buffer_map (%w, {{.*}} into (%w)
    // CHECK: arith.select
    tile.buffer_map (%s, %i, %q0) axes [[0, 1], [], []] into (%p) : (!tile.buffer<64x64xf32, register>, i32, i32) into (!tile.buffer<64x64xf16, register>) {
    ^bb0(%x: f32, %start: i32, %first: i32):
      %e = math.exp2 %x : f32
      %j = tile.index 1
      %kv = arith.addi %start, %j : i32
      %r = tile.index 0
      %qi = arith.addi %first, %r : i32
      %visible = arith.cmpi sle, %kv, %qi : i32
      %none = arith.constant 0.0 : f32
      %w = arith.select %visible, %e, %none : f32
      %h = arith.truncf %w : f32 to f16
      tile.yield %h : f16
    }
    tile.copy_in %v[%i, %c0] dims [0, 1] bounded [0] limits(%n) into %vs : !tile.global<2 x f16>, !tile.buffer<64x64xf16, shared>
    tile.gemm %p, %vs, %acc ieee split rows : !tile.buffer<64x64xf16, register>, !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf32, register>
  } {stages = 2 : i64}
  tile.copy_out %acc, %o[%c0, %c0] dims [0, 1] : !tile.buffer<64x64xf32, register>, !tile.global<2 x f32>
  tile.end
}
