// RUN: attn-opt %s | attn-opt | filecheck %s

// Linear attention with nothing but a state.
// CHECK-LABEL: @plain
func.func @plain(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x32xbf16>, %scale: f32) -> tensor<?x?x?x32xbf16> {
  // CHECK: %{{.*}} = attn.recurrence %q, %k, %v scale %scale : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x32xbf16> -> tensor<?x?x?x32xbf16>
  // CHECK-NOT: final
  %o = attn.recurrence %q, %k, %v scale %scale : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x32xbf16> -> tensor<?x?x?x32xbf16>
  func.return %o : tensor<?x?x?x32xbf16>
}

// The gated delta rule: a decay per token, beta, a state that comes in and goes out, and a decay made of a capture.
// CHECK-LABEL: @gated_delta
func.func @gated_delta(%q: tensor<2x4x?x64xf32>, %k: tensor<2x4x?x64xf32>, %v: tensor<2x8x?x32xf32>, %scale: f32, %g: tensor<2x8x?xf32>, %beta: tensor<2x8x?xf32>, %s0: tensor<2x8x64x32xf32>, %a: tensor<8xf32>) -> (tensor<2x8x?x32xf32>, tensor<2x8x64x32xf32>) {
  // CHECK: attn.recurrence %q, %k, %v scale %scale decay %g beta %beta initial %s0 captures %a
  // CHECK-SAME: decay tensor<2x8x?xf32> beta tensor<2x8x?xf32> initial tensor<2x8x64x32xf32> captures tensor<8xf32> -> tensor<2x8x?x32xf32> final tensor<2x8x64x32xf32> decay_mod {
  %o, %s = attn.recurrence %q, %k, %v scale %scale decay %g beta %beta initial %s0 captures %a : tensor<2x4x?x64xf32>, tensor<2x4x?x64xf32>, tensor<2x8x?x32xf32> decay tensor<2x8x?xf32> beta tensor<2x8x?xf32> initial tensor<2x8x64x32xf32> captures tensor<8xf32> -> tensor<2x8x?x32xf32> final tensor<2x8x64x32xf32>
  decay_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64, %a_: tensor<8xf32>):
    %rate = attn.load %a_[%h] : tensor<8xf32> -> f32
    %r = arith.mulf %e, %rate : f32
    attn.yield %r : f32
  }
  func.return %o, %s : tensor<2x8x?x32xf32>, tensor<2x8x64x32xf32>
}

// A decay per key channel, and a feature map on queries and keys.
// CHECK-LABEL: @per_channel
func.func @per_channel(%q: tensor<?x?x?x64xf16>, %k: tensor<?x?x?x64xf16>, %v: tensor<?x?x?x64xf16>, %scale: f32, %g: tensor<?x?x?x64xf32>) -> tensor<?x?x?x64xf16> {
  // CHECK: attn.recurrence %q, %k, %v scale %scale decay %g :
  // CHECK-SAME: decay tensor<?x?x?x64xf32> -> tensor<?x?x?x64xf16> q_mod {
  %o = attn.recurrence %q, %k, %v scale %scale decay %g : tensor<?x?x?x64xf16>, tensor<?x?x?x64xf16>, tensor<?x?x?x64xf16> decay tensor<?x?x?x64xf32> -> tensor<?x?x?x64xf16>
  q_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64):
    %r = math.exp %e : f32
    attn.yield %r : f32
  // CHECK: k_mod {
  } k_mod {
  ^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64):
    %r = math.exp %e : f32
    attn.yield %r : f32
  }
  func.return %o : tensor<?x?x?x64xf16>
}
