// RUN: attn-opt %s -p 'convert-recurrence-to-tile{chunk=32 value_block=16},attn-simplify' | filecheck %s
// RUN: attn-opt %s -p 'convert-recurrence-to-tile{chunk=32 pieces=4},attn-simplify' | filecheck %s --check-prefix=PIECES
// RUN: attn-opt %s -p 'convert-recurrence-to-tile{chunk=1},attn-simplify' | filecheck %s --check-prefix=STEPS

func.func @forward(%q: tensor<?x?x?x16xf32>, %k: tensor<?x?x?x16xf32>, %v: tensor<?x?x?x32xf32>, %scale: f32, %decay: tensor<?x?x?xf32>) -> tensor<?x?x?x32xf32> {
  %o = attn.recurrence %q, %k, %v scale %scale decay %decay : tensor<?x?x?x16xf32>, tensor<?x?x?x16xf32>, tensor<?x?x?x32xf32> decay tensor<?x?x?xf32> -> tensor<?x?x?x32xf32>
  func.return %o : tensor<?x?x?x32xf32>
}

// One sweep: the state is carried from chunk to chunk, and every exponent is a sum, or a difference kept at most 0.
// CHECK: tile.kernel @forward_decay(
// CHECK: tile.scan sum
// CHECK: arith.cmpf ole
// CHECK: tile.scan sum
// CHECK: tile.kernel @forward_o_sweep(
// CHECK: scf.for {{.*}} iter_args(%[[S:.*]] = %{{.*}}) -> (tensor<16x16xf32>)
// Queries and keys come before what decays and what is written, which arrive meanwhile.
// CHECK: tile.load %q[{{.*}}] dims [2, 3] bounded [0]
// CHECK: tile.dot
// Tokens that forget everything are counted, and looked at in chunks that have any.
// CHECK: %[[SOME:.*]] = arith.cmpf ogt, %count
// CHECK: scf.if %[[SOME]] -> (tensor<32xf32>, tensor<32xf32>, f32)
// CHECK: tile.load %v[{{.*}}] dims [2, 3] bounded [0]
// CHECK: arith.minimumf
// CHECK-NEXT: math.exp2
// CHECK: scf.if %[[SOME]] -> (tensor<32x32xf32>)
// CHECK: arith.cmpf oeq
// CHECK: tile.dot %{{.*}}, %[[S]], %{{.*}} ieee : tensor<32x16xf32>, tensor<16x16xf32>
// CHECK: tile.store %{{.*}}, %o[
// CHECK: scf.yield %{{.*}} : tensor<16x16xf32>
// CHECK: tile.plan @forward(%q: {{.*}}, %decay: !tile.global<3 x f32>, %o: !tile.global<4 x f32>)
// CHECK: tile.launch @forward_decay
// CHECK: tile.launch @forward_o_sweep
// CHECK-NOT: tile.launch

// Three launches with pieces: what each adds, what each starts from, the outputs.
// PIECES: tile.plan @forward(
// PIECES: tile.launch @forward_decay
// PIECES: tile.launch @forward_o_states
// PIECES: tile.launch @forward_o_pass
// PIECES: tile.launch @forward_o_sweep

// Token by token no product of matrices is left.
// STEPS: tile.kernel @forward_o_steps(
// STEPS-NOT: tile.dot
// STEPS: tile.reduce sum %{{.*}}, 0 : tensor<16x32xf32> -> tensor<32xf32>
