// RUN: attn-opt %s | attn-opt | filecheck %s

// CHECK-LABEL: func.func @forward(
func.func @forward(%q: tensor<?x?x?x16xbf16>, %k: tensor<?x?x?x16xbf16>, %v: tensor<?x?x?x32xbf16>, %scale: f32, %g: tensor<?x?x?xf32>, %w: tensor<?x?x?xf32>, %s0: tensor<?x?x16x32xf32>, %bounds: tensor<?xi32>) -> (tensor<?x?x?x32xbf16>, tensor<?x?x16x32xf32>) {
  // CHECK: attn.sweep %q, %k, %v scale %scale decay %g weight %w initial %s0 bounds %bounds :
  // CHECK-SAME: -> tensor<?x?x?x32xbf16> final tensor<?x?x16x32xf32>
  %o, %final = attn.sweep %q, %k, %v scale %scale decay %g weight %w initial %s0 bounds %bounds : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xbf16>, tensor<?x?x?x32xbf16> decay tensor<?x?x?xf32> weight tensor<?x?x?xf32> initial tensor<?x?x16x32xf32> bounds tensor<?xi32> -> tensor<?x?x?x32xbf16> final tensor<?x?x16x32xf32>
  func.return %o, %final : tensor<?x?x?x32xbf16>, tensor<?x?x16x32xf32>
}

// CHECK-LABEL: func.func @gradients(
func.func @gradients(%q: tensor<?x?x?x16xbf16>, %k: tensor<?x?x?x16xbf16>, %v: tensor<?x?x?x32xbf16>, %scale: f32, %g: tensor<?x?x?xf32>, %p: tensor<?x?x?xf32>) -> (tensor<?x?x?x32xbf16>, tensor<?x?x?xf32>, tensor<?x?x?xf32>) {
  // CHECK: %o, %rows = attn.sweep %q, %k, %v scale %scale decay %g dot %v reverse whole :
  %o, %rows = attn.sweep %q, %k, %v scale %scale decay %g dot %v reverse whole : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xbf16>, tensor<?x?x?x32xbf16> decay tensor<?x?x?xf32> dot tensor<?x?x?x32xbf16> -> tensor<?x?x?x32xbf16> rows tensor<?x?x?xf32>
  // CHECK: %{{.*}}, %kept = attn.sweep %q, %k, %v scale %scale decay %g segment 64 :
  %o1, %kept = attn.sweep %q, %k, %v scale %scale decay %g segment 64 : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xbf16>, tensor<?x?x?x32xbf16> decay tensor<?x?x?xf32> -> tensor<?x?x?x32xbf16> kept tensor<?x?x?x16x32xbf16>
  // CHECK: %{{.*}}, %ends = attn.sweep %q, %k, %v scale %scale decay %g meets %kept segment 64 reverse :
  %o2, %ends = attn.sweep %q, %k, %v scale %scale decay %g meets %kept segment 64 reverse : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xbf16>, tensor<?x?x?x32xbf16> decay tensor<?x?x?xf32> meets tensor<?x?x?x16x32xbf16> -> tensor<?x?x?x32xbf16> ends tensor<?x?x?xf32>
  // CHECK: attn.token_gradients r %p p %p n %rows decay %g ends %ends segment 64 fresh : r tensor<?x?x?xf32> p tensor<?x?x?xf32> n tensor<?x?x?xf32> decay tensor<?x?x?xf32> ends tensor<?x?x?xf32> -> decay tensor<?x?x?xf32> weight tensor<?x?x?xf32>
  %dg, %dw = attn.token_gradients r %p p %p n %rows decay %g ends %ends segment 64 fresh : r tensor<?x?x?xf32> p tensor<?x?x?xf32> n tensor<?x?x?xf32> decay tensor<?x?x?xf32> ends tensor<?x?x?xf32> -> decay tensor<?x?x?xf32> weight tensor<?x?x?xf32>
  // CHECK: attn.sum_heads %o like %v : tensor<?x?x?x32xbf16>, tensor<?x?x?x32xbf16> -> tensor<?x?x?x32xbf16>
  %sum = attn.sum_heads %o like %v : tensor<?x?x?x32xbf16>, tensor<?x?x?x32xbf16> -> tensor<?x?x?x32xbf16>
  func.return %sum, %dg, %dw : tensor<?x?x?x32xbf16>, tensor<?x?x?xf32>, tensor<?x?x?xf32>
}

// CHECK-LABEL: func.func @channels(
func.func @channels(%q: tensor<?x?x?x16xbf16>, %d: tensor<?x?x?x16xf32>, %v: tensor<?x?x?x32xbf16>, %scale: f32, %g: tensor<?x?x?x16xf32>) -> (tensor<?x?x?x16xbf16>, tensor<?x?x?x16xf32>) {
  // CHECK: attn.sweep %v, %v, %q scale %scale decay %g reverse columns :
  %o = attn.sweep %v, %v, %q scale %scale decay %g reverse columns : tensor<?x?x?x32xbf16>, tensor<?x?x?x32xbf16>, tensor<?x?x?x16xbf16> decay tensor<?x?x?x16xf32> -> tensor<?x?x?x16xbf16>
  // CHECK: attn.channel_gradients %q, %d, %q, %d decay %g :
  %dg = attn.channel_gradients %q, %d, %q, %d decay %g : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xf32>, tensor<?x?x?x16xbf16>, tensor<?x?x?x16xf32> decay tensor<?x?x?x16xf32> -> tensor<?x?x?x16xf32>
  func.return %o, %dg : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xf32>
}

// CHECK-LABEL: func.func @delta(
func.func @delta(%q: tensor<?x?x?x16xbf16>, %v: tensor<?x?x?x32xbf16>, %scale: f32, %b: tensor<?x?x?xf32>, %s: tensor<?x?x16x32xf32>) -> tensor<?x?x16x32xf32> {
  // CHECK: attn.delta_backward %q, %q, %v, %v scale %scale beta %b decay %b initial %s d_final %s :
  %dq, %dk, %dv, %db, %dg, %ds = attn.delta_backward %q, %q, %v, %v scale %scale beta %b decay %b initial %s d_final %s : tensor<?x?x?x16xbf16>, tensor<?x?x?x16xbf16>, tensor<?x?x?x32xbf16>, tensor<?x?x?x32xbf16> beta tensor<?x?x?xf32> decay tensor<?x?x?xf32> initial tensor<?x?x16x32xf32> d_final tensor<?x?x16x32xf32> -> tensor<?x?x?x16xf32>, tensor<?x?x?x16xf32>, tensor<?x?x?x32xbf16>, tensor<?x?x?xf32> decay tensor<?x?x?xf32> initial tensor<?x?x16x32xf32>
  func.return %ds : tensor<?x?x16x32xf32>
}
