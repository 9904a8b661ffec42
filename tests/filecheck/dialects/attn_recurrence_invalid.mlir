// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: k has 3 key channels, expected 4
%q, %k, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x3xf32>, f32)
%o = attn.recurrence %q, %k, %q scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x3xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>

// -----

// CHECK: v has 3 heads, which is no multiple of the 2 heads of q and k
%q, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x3x8x4xf32>, f32)
%o = attn.recurrence %q, %q, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x3x8x4xf32> -> tensor<1x3x8x4xf32>

// -----

// CHECK: decay must be a tensor of rank 3 or 4, got tensor<8xf32>
%q, %g, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<8xf32>, f32)
%o = attn.recurrence %q, %q, %q scale %scale decay %g : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> decay tensor<8xf32> -> tensor<1x2x8x4xf32>

// -----

// CHECK: decay has 7 tokens, expected 8
%q, %g, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x7xf32>, f32)
%o = attn.recurrence %q, %q, %q scale %scale decay %g : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> decay tensor<1x2x7xf32> -> tensor<1x2x8x4xf32>

// -----

// CHECK: initial has 5 key channels, expected 4
%q, %s, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x5x4xf32>, f32)
%o = attn.recurrence %q, %q, %q scale %scale initial %s : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> initial tensor<1x2x5x4xf32> -> tensor<1x2x8x4xf32>

// -----

// CHECK: decay_mod has no decay to change
%q, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, f32)
%o = attn.recurrence %q, %q, %q scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
decay_mod {
^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64):
  attn.yield %e : f32
}

// -----

// CHECK: k_mod: block arguments are (f32, i64, i64, i64), expected (f32, i64, i64, i64, i64)
%q, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, f32)
%o = attn.recurrence %q, %q, %q scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
k_mod {
^bb0(%e: f32, %b: i64, %h: i64, %t: i64):
  attn.yield %e : f32
}

// -----

// CHECK: v_mod: yields (i64), expected (f32)
%q, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, f32)
%o = attn.recurrence %q, %q, %q scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
v_mod {
^bb0(%e: f32, %b: i64, %h: i64, %t: i64, %c: i64):
  attn.yield %t : i64
}
