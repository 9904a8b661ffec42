// RUN: attn-opt %s -p 'attn-schedule-recurrence{chunk=32 heads=128 tokens=4096},convert-recurrence-to-tile{chunk=32},attn-simplify' | filecheck %s
// RUN: attn-opt %s -p 'attn-derive-recurrence-backward{wrt=q,k,v,decay,beta},convert-recurrence-to-tile{chunk=32 value_block=32},attn-simplify' | filecheck %s --check-prefix=BACK

func.func @forward(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x32xbf16>, %scale: f32, %decay: tensor<?x?x?x64xf32>, %beta: tensor<?x?x?xf32>) -> tensor<?x?x?x32xbf16> {
  %o = attn.recurrence %q, %k, %v scale %scale decay %decay beta %beta : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x32xbf16> decay tensor<?x?x?x64xf32> beta tensor<?x?x?xf32> -> tensor<?x?x?x32xbf16>
  func.return %o : tensor<?x?x?x32xbf16>
}

// What tokens write is solved chunk by chunk: the weights of keys level by level, each a product of one tile with its transpose.
// CHECK: tile.kernel @forward_solve(
// CHECK: scf.for %level
// CHECK: tile.gather %gates
// CHECK: arith.minimumf
// CHECK: math.exp2
// CHECK: %[[TURNED:.*]] = tile.transpose %[[FADED:.*]] : tensor<32x64xbf16>
// CHECK: tile.dot %[[FADED]], %[[TURNED]], %{{.*}} : tensor<32x64xbf16>, tensor<64x32xbf16>
// The sweep takes off what the state gives, and decays it row by row.
// CHECK: tile.kernel @forward_o_sweep(
// CHECK: %read = tile.dot %reads{{.*}}, %{{.*}} : tensor<32x64xbf16>, tensor<64x32xbf16>
// CHECK: arith.subf
// CHECK: tile.plan @forward(
// CHECK: tile.launch @forward_gates
// CHECK: tile.launch @forward_prepare
// CHECK: tile.launch @forward_solve
// CHECK: tile.launch @forward_o_sweep

// Gradients: two sweeps, and all chunks side by side.
// BACK: tile.plan @backward(
// BACK: tile.launch @backward_solve
// BACK: tile.launch @backward_keep_sweep
// BACK: tile.launch @backward_back_sweep
// BACK: tile.launch @backward_written
// BACK: tile.launch @backward_read
// BACK: tile.launch @backward_d_q
// BACK: tile.launch @backward_d_k
// BACK-NOT: tile.launch
