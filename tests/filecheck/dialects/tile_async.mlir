// RUN: attn-opt %s | attn-opt | filecheck %s

// Every op of the async level: one role multiplies what another one copies in, y = 6 x x^T.
// CHECK-LABEL: tile.kernel @async(%x: !tile.descriptor<1x64x64xf16>, %y: !tile.descriptor<64x64xf32>, %counter: !tile.global<1 x i32>)
tile.kernel @async(%x: !tile.descriptor<1x64x64xf16>, %y: !tile.descriptor<64x64xf32>, %counter: !tile.global<1 x i32>) attributes {num_warps = 4 : i64} {
  // CHECK: %ring = tile.ring : !tile.buffer<2x64x64xf16, shared>
  %ring = tile.ring : !tile.buffer<2x64x64xf16, shared>
  %out = tile.ring : !tile.buffer<1x64x64xf32, shared>
  %cells = tile.ring : !tile.buffer<2xi32, shared>
  // CHECK: %full = tile.make_barriers count 1 : !tile.barriers<2>
  %full = tile.make_barriers count 1 : !tile.barriers<2>
  %ready = tile.make_barriers count 1 : !tile.barriers<1>
  // CHECK: tile.roles (%x, %y, %counter, %ring, %out, %cells, %full, %ready) : (!tile.descriptor<1x64x64xf16>, {{.*}}) role count 1 warps 4 registers 240 {
  tile.roles (%x, %y, %counter, %ring, %out, %cells, %full, %ready) : (!tile.descriptor<1x64x64xf16>, !tile.descriptor<64x64xf32>, !tile.global<1 x i32>, !tile.buffer<2x64x64xf16, shared>, !tile.buffer<1x64x64xf32, shared>, !tile.buffer<2xi32, shared>, !tile.barriers<2>, !tile.barriers<1>)
  role count 1 warps 4 registers 240 {
  ^bb0(%role: i32, %xd: !tile.descriptor<1x64x64xf16>, %yd: !tile.descriptor<64x64xf32>, %c: !tile.global<1 x i32>, %xs: !tile.buffer<2x64x64xf16, shared>, %ys: !tile.buffer<1x64x64xf32, shared>, %cs: !tile.buffer<2xi32, shared>, %f: !tile.barriers<2>, %r: !tile.barriers<1>):
    %c0 = arith.constant 0 : i32
    // CHECK: tile.opaque_zero %{{.*}}
    %z = tile.opaque_zero %role
    // CHECK: %a = tile.slot %xs[%{{.*}}] : !tile.buffer<2x64x64xf16, shared> -> !tile.buffer<64x64xf16, shared>
    %a = tile.slot %xs[%z] : !tile.buffer<2x64x64xf16, shared> -> !tile.buffer<64x64xf16, shared>
    // CHECK: tile.transposed_slot %a : !tile.buffer<64x64xf16, shared> -> !tile.buffer<64x64xf16, shared>
    %at = tile.transposed_slot %a : !tile.buffer<64x64xf16, shared> -> !tile.buffer<64x64xf16, shared>
    // CHECK: tile.barrier_wait %{{.*}}[%{{.*}}], %{{.*}} : !tile.barriers<2>
    tile.barrier_wait %f[%c0], %c0 : !tile.barriers<2>
    // CHECK: tile.cell_read %cs[%{{.*}}] : !tile.buffer<2xi32, shared> -> i32
    tile.barrier_wait %r[%c0], %c0 : !tile.barriers<1>
    %n = tile.cell_read %cs[%c0] : !tile.buffer<2xi32, shared> -> i32
    // CHECK: %q = tile.read %a : !tile.buffer<64x64xf16, shared> -> tensor<64x64xf16>
    %q = tile.read %a : !tile.buffer<64x64xf16, shared> -> tensor<64x64xf16>
    // CHECK: tile.dot_operand %q layout <4x1, 64> : tensor<64x64xf16>
    %qa = tile.dot_operand %q layout <4x1, 64> : tensor<64x64xf16>
    // CHECK: tile.async_dot %{{.*}}, %{{.*}} layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
    %p0 = tile.async_dot %qa, %at layout <4x1, 64> : tensor<64x64xf16>, !tile.buffer<64x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
    %p1 = tile.async_dot %a, %at, %p0 layout <4x1, 64> : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, !tile.pending<tensor<64x64xf32>> -> !tile.pending<tensor<64x64xf32>>
    // CHECK: %s = tile.wait 0, %{{.*}} : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>
    %s = tile.wait 0, %p1 : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>
    // CHECK: tile.reduce_partial sum %s groups 4 width 2 : tensor<64x64xf32> -> tensor<64x4xf32>
    %l = tile.reduce_partial sum %s groups 4 width 2 : tensor<64x64xf32> -> tensor<64x4xf32>
    // CHECK: tile.pin %l : tensor<64x4xf32>
    %lp = tile.pin %l : tensor<64x4xf32>
    %one = arith.constant 1.000000e+00 : f32
    // CHECK: tile.hold_back %one
    %late = tile.hold_back %one
    %p2 = tile.async_dot %a, %at, %s layout <4x1, 64> : !tile.buffer<64x64xf16, shared>, !tile.buffer<64x64xf16, shared>, tensor<64x64xf32> -> !tile.pending<tensor<64x64xf32>>
    %t = tile.wait 0, %p2 : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>
    %o = tile.slot %ys[%c0] : !tile.buffer<1x64x64xf32, shared> -> !tile.buffer<64x64xf32, shared>
    // CHECK: tile.write %{{.*}}, %o : tensor<64x64xf32>, !tile.buffer<64x64xf32, shared>
    tile.write %t, %o : tensor<64x64xf32>, !tile.buffer<64x64xf32, shared>
    // CHECK: tile.proxy_fence
    tile.proxy_fence
    // CHECK: tile.async_store %o, %yd[%n, %{{.*}}] : !tile.buffer<64x64xf32, shared>, !tile.descriptor<64x64xf32>
    tile.async_store %o, %yd[%n, %c0] : !tile.buffer<64x64xf32, shared>, !tile.descriptor<64x64xf32>
    // CHECK: tile.async_reduce_add %o, %yd
    tile.async_reduce_add %o, %yd[%n, %c0] : !tile.buffer<64x64xf32, shared>, !tile.descriptor<64x64xf32>
    // CHECK: tile.async_store_wait 0
    tile.async_store_wait 0
    tile.end
  }
  // CHECK: } role count 1 warps 1 registers 24 {
  role count 1 warps 1 registers 24 {
  ^bb0(%role: i32, %xd: !tile.descriptor<1x64x64xf16>, %yd: !tile.descriptor<64x64xf32>, %c: !tile.global<1 x i32>, %xs: !tile.buffer<2x64x64xf16, shared>, %ys: !tile.buffer<1x64x64xf32, shared>, %cs: !tile.buffer<2xi32, shared>, %f: !tile.barriers<2>, %r: !tile.barriers<1>):
    %c0 = arith.constant 0 : i32
    %c1 = arith.constant 1 : i32
    %yes = arith.constant true
    %a = tile.slot %xs[%c0] : !tile.buffer<2x64x64xf16, shared> -> !tile.buffer<64x64xf16, shared>
    // CHECK: tile.barrier_expect %{{.*}}[%{{.*}}], 8192 : !tile.barriers<2>
    tile.barrier_expect %f[%c0], 8192 : !tile.barriers<2>
    // CHECK: tile.async_load %xd{{.*}}[%{{.*}}, %{{.*}}, %{{.*}}], %a{{.*}}, %{{.*}}[%{{.*}}] : !tile.descriptor<1x64x64xf16>, !tile.buffer<64x64xf16, shared>, !tile.barriers<2>
    tile.async_load %xd[%c0, %c0, %c0], %a, %f[%c0] : !tile.descriptor<1x64x64xf16>, !tile.buffer<64x64xf16, shared>, !tile.barriers<2>
    // CHECK: tile.fetch_add %{{.*}}[%{{.*}}], %{{.*}} : !tile.global<1 x i32>
    %n = tile.fetch_add %c[%c0], %c1 : !tile.global<1 x i32>
    // CHECK: tile.cell_write %{{.*}}, %cs{{.*}}[%{{.*}}] : !tile.buffer<2xi32, shared>
    tile.cell_write %n, %cs[%c0] : !tile.buffer<2xi32, shared>
    // CHECK: tile.barrier_arrive %{{.*}}[%{{.*}}] if %{{.*}} : !tile.barriers<1>
    tile.barrier_arrive %r[%c0] if %yes : !tile.barriers<1>
    tile.end
  }
  tile.end
}

// CHECK-LABEL: tile.plan @run
tile.plan @run(%x: !tile.global<3 x f16>, %y: !tile.global<2 x f32>, %counter: !tile.global<1 x i32>) {
  // CHECK: tile.processor_count
  %n = tile.processor_count
  // CHECK: tile.describe %x : !tile.global<3 x f16> -> !tile.descriptor<1x64x64xf16>
  %xd = tile.describe %x : !tile.global<3 x f16> -> !tile.descriptor<1x64x64xf16>
  %yd = tile.describe %y : !tile.global<2 x f32> -> !tile.descriptor<64x64xf32>
  tile.launch @async grid(%n) args(%xd, %yd, %counter) : !tile.descriptor<1x64x64xf16>, !tile.descriptor<64x64xf32>, !tile.global<1 x i32>
  tile.end
}

// Views of slots: each of two roles multiplies with its half of w, adds its half of a row, and reuses its staging slot.
// CHECK-LABEL: tile.kernel @halves
tile.kernel @halves(%x: !tile.descriptor<64x128xf16>, %w: !tile.descriptor<128x128xf16>, %bias: !tile.descriptor<1x128xf32>, %y: !tile.descriptor<64x64xf32>, %z: !tile.descriptor<64x128xf16>) attributes {num_warps = 4 : i64} {
  %xs = tile.ring : !tile.buffer<1x64x128xf16, shared>
  %ws = tile.ring : !tile.buffer<1x128x128xf16, shared>
  %bs = tile.ring : !tile.buffer<1x128xf32, shared>
  %ys = tile.ring : !tile.buffer<2x64x64xf32, shared>
  %full = tile.make_barriers count 1 : !tile.barriers<1>
  tile.roles (%x, %w, %bias, %y, %z, %xs, %ws, %bs, %ys, %full) : (!tile.descriptor<64x128xf16>, !tile.descriptor<128x128xf16>, !tile.descriptor<1x128xf32>, !tile.descriptor<64x64xf32>, !tile.descriptor<64x128xf16>, !tile.buffer<1x64x128xf16, shared>, !tile.buffer<1x128x128xf16, shared>, !tile.buffer<1x128xf32, shared>, !tile.buffer<2x64x64xf32, shared>, !tile.barriers<1>)
  role count 2 warps 4 registers 160 {
  ^bb0(%half: i32, %x_: !tile.descriptor<64x128xf16>, %w_: !tile.descriptor<128x128xf16>, %bias_: !tile.descriptor<1x128xf32>, %y_: !tile.descriptor<64x64xf32>, %z_: !tile.descriptor<64x128xf16>, %xs_: !tile.buffer<1x64x128xf16, shared>, %ws_: !tile.buffer<1x128x128xf16, shared>, %bs_: !tile.buffer<1x128xf32, shared>, %ys_: !tile.buffer<2x64x64xf32, shared>, %full_: !tile.barriers<1>):
    %c0 = arith.constant 0 : i32
    %c64 = arith.constant 64 : i32
    %a = tile.slot %xs_[%c0] : !tile.buffer<1x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
    %wt = tile.slot %ws_[%c0] : !tile.buffer<1x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
    // CHECK: tile.part %{{.*}} axis 1[%half] : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x64xf16, shared>
    %b = tile.part %wt axis 1 [%half] : !tile.buffer<128x128xf16, shared> -> !tile.buffer<128x64xf16, shared>
    %row = tile.slot %bs_[%c0] : !tile.buffer<1x128xf32, shared> -> !tile.buffer<128xf32, shared>
    %part = tile.part %row axis 0 [%half] : !tile.buffer<128xf32, shared> -> !tile.buffer<64xf32, shared>
    tile.barrier_wait %full_[%c0], %c0 : !tile.barriers<1>
    %p = tile.async_dot %a, %b layout <4x1, 64> : !tile.buffer<64x128xf16, shared>, !tile.buffer<128x64xf16, shared> -> !tile.pending<tensor<64x64xf32>>
    %bias1 = tile.read %part : !tile.buffer<64xf32, shared> -> tensor<64xf32>
    %v = tile.wait 0, %p : !tile.pending<tensor<64x64xf32>> -> tensor<64x64xf32>
    %o = tile.map (%v, %bias1) axes [[0, 1], [1]] : (tensor<64x64xf32>, tensor<64xf32>) -> tensor<64x64xf32> {
    ^bb1(%e: f32, %d: f32):
      %r = arith.addf %e, %d : f32
      tile.yield %r : f32
    }
    %s = tile.slot %ys_[%half] : !tile.buffer<2x64x64xf32, shared> -> !tile.buffer<64x64xf32, shared>
    tile.write %o, %s : tensor<64x64xf32>, !tile.buffer<64x64xf32, shared>
    tile.proxy_fence
    %col = arith.muli %half, %c64 : i32
    tile.async_store %s, %y_[%c0, %col] : !tile.buffer<64x64xf32, shared>, !tile.descriptor<64x64xf32>
    tile.async_store_wait 0
    // CHECK: tile.alias_slot %s : !tile.buffer<64x64xf32, shared> -> !tile.buffer<64x128xf16, shared>
    %again = tile.alias_slot %s : !tile.buffer<64x64xf32, shared> -> !tile.buffer<64x128xf16, shared>
    %xr = tile.read %a : !tile.buffer<64x128xf16, shared> -> tensor<64x128xf16>
    tile.write %xr, %again : tensor<64x128xf16>, !tile.buffer<64x128xf16, shared>
    tile.proxy_fence
    tile.async_store %again, %z_[%col, %c0] : !tile.buffer<64x128xf16, shared>, !tile.descriptor<64x128xf16>
    tile.async_store_wait 0
    tile.end
  }
  role count 1 warps 1 registers 24 {
  ^bb0(%role: i32, %x_: !tile.descriptor<64x128xf16>, %w_: !tile.descriptor<128x128xf16>, %bias_: !tile.descriptor<1x128xf32>, %y_: !tile.descriptor<64x64xf32>, %z_: !tile.descriptor<64x128xf16>, %xs_: !tile.buffer<1x64x128xf16, shared>, %ws_: !tile.buffer<1x128x128xf16, shared>, %bs_: !tile.buffer<1x128xf32, shared>, %ys_: !tile.buffer<2x64x64xf32, shared>, %full_: !tile.barriers<1>):
    %c0 = arith.constant 0 : i32
    %a = tile.slot %xs_[%c0] : !tile.buffer<1x64x128xf16, shared> -> !tile.buffer<64x128xf16, shared>
    %wt = tile.slot %ws_[%c0] : !tile.buffer<1x128x128xf16, shared> -> !tile.buffer<128x128xf16, shared>
    %row = tile.slot %bs_[%c0] : !tile.buffer<1x128xf32, shared> -> !tile.buffer<128xf32, shared>
    tile.barrier_expect %full_[%c0], 49664 : !tile.barriers<1>
    tile.async_load %x_[%c0, %c0], %a, %full_[%c0] : !tile.descriptor<64x128xf16>, !tile.buffer<64x128xf16, shared>, !tile.barriers<1>
    tile.async_load %w_[%c0, %c0], %wt, %full_[%c0] : !tile.descriptor<128x128xf16>, !tile.buffer<128x128xf16, shared>, !tile.barriers<1>
    tile.async_load %bias_[%c0, %c0], %row, %full_[%c0] : !tile.descriptor<1x128xf32>, !tile.buffer<128xf32, shared>, !tile.barriers<1>
    tile.end
  }
  tile.end
}

tile.plan @run_halves(%x: !tile.global<2 x f16>, %w: !tile.global<2 x f16>, %bias: !tile.global<2 x f32>, %y: !tile.global<2 x f32>, %z: !tile.global<2 x f16>) {
  %c1 = arith.constant 1 : i32
  %xd = tile.describe %x : !tile.global<2 x f16> -> !tile.descriptor<64x128xf16>
  %wd = tile.describe %w : !tile.global<2 x f16> -> !tile.descriptor<128x128xf16>
  %biasd = tile.describe %bias : !tile.global<2 x f32> -> !tile.descriptor<1x128xf32>
  %yd = tile.describe %y : !tile.global<2 x f32> -> !tile.descriptor<64x64xf32>
  %zd = tile.describe %z : !tile.global<2 x f16> -> !tile.descriptor<64x128xf16>
  tile.launch @halves grid(%c1) args(%xd, %wd, %biasd, %yd, %zd) : !tile.descriptor<64x128xf16>, !tile.descriptor<128x128xf16>, !tile.descriptor<1x128xf32>, !tile.descriptor<64x64xf32>, !tile.descriptor<64x128xf16>
  tile.end
}
