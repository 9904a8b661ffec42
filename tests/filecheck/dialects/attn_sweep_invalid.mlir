// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: rows are the sums that dot asks for: give both or neither
func.func @f(%q: tensor<?x?x?x16xf32>, %scale: f32) {
  %o, %rows = attn.sweep %q, %q, %q scale %scale : tensor<?x?x?x16xf32>, tensor<?x?x?x16xf32>, tensor<?x?x?x16xf32> -> tensor<?x?x?x16xf32> rows tensor<?x?x?xf32>
  func.return
}

// -----

// CHECK: k has 8 key channels, expected 16
func.func @f(%q: tensor<?x?x?x16xf32>, %k: tensor<?x?x?x8xf32>, %scale: f32) {
  %o = attn.sweep %q, %k, %q scale %scale : tensor<?x?x?x16xf32>, tensor<?x?x?x8xf32>, tensor<?x?x?x16xf32> -> tensor<?x?x?x16xf32>
  func.return
}

// -----

// CHECK: the gradient of a decay needs the decay, p and n
func.func @f(%r: tensor<?x?x?xf32>) {
  %d = attn.token_gradients p %r decay %r : p tensor<?x?x?xf32> decay tensor<?x?x?xf32> -> decay tensor<?x?x?xf32>
  func.return
}

// -----

// CHECK: states are the final state and its gradient, got 1
func.func @f(%r: tensor<?x?x?xf32>, %s: tensor<?x?x8x8xf32>) {
  %d = attn.token_gradients r %r states %s : r tensor<?x?x?xf32> states tensor<?x?x8x8xf32> -> weight tensor<?x?x?xf32>
  func.return
}

// -----

// CHECK: ends are those of segments: give both or neither
func.func @f(%r: tensor<?x?x?xf32>) {
  %d = attn.token_gradients r %r ends %r : r tensor<?x?x?xf32> ends tensor<?x?x?xf32> -> weight tensor<?x?x?xf32>
  func.return
}

// -----

// CHECK: the sum tensor<?x?x?x8xf32> has not the type of what it is like, tensor<?x?x?x16xf32>
func.func @f(%q: tensor<?x?x?x16xf32>) {
  %d = attn.sum_heads %q like %q : tensor<?x?x?x16xf32>, tensor<?x?x?x16xf32> -> tensor<?x?x?x8xf32>
  func.return
}
