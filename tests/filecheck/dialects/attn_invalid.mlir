// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// One mistake per part; operands that no part needs are left undefined by "test.op".

// CHECK: source has rank 1 but 2 indices are given
%t, %i = "test.op"() : () -> (tensor<4xf32>, i64)
%x = attn.load %t[%i, %i] : tensor<4xf32> -> f32

// -----

// CHECK: result must be f32, i64 or i1, got f16
%t, %i = "test.op"() : () -> (tensor<4xf16>, i64)
%x = attn.load %t[%i] : tensor<4xf16> -> f16

// -----

// CHECK: k must be a tensor of rank 4 (batch, head, position, channel), got tensor<8x4xf32>
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
}

// -----

// CHECK: head dim of q is 4 but that of k is 3
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x3xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x3xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
}

// -----

// CHECK: row: block arguments are (f32, i64, i64, i64), expected (f32, i64, i64, i64, i64)
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64):
  attn.yield %s : f32
} 

// -----

// CHECK: row: yields (f32, f32), expected (f32)
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s, %s : f32, f32
} 

// -----

// CHECK: score_mod: yields (i64), expected (f32)
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
score_mod {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %i : i64
} row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
}

// -----

// CHECK: mask: region must end in attn.yield
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
mask {
^bb0(%b: i64, %h: i64, %i: i64, %j: i64):
  attn.step_yield states()
} row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
}

// -----

// CHECK: key_mod: block arguments are (i64, i64, i64, i64), expected (f32, i64, i64, i64, i64)
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
key_mod {
^bb0(%b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %i : i64
} row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
}

// -----

// CHECK: blocks: must yield four i64 per range: visible lo, full lo, full hi, visible hi
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
} blocks {
^bb0(%lo: i64, %hi: i64, %b: i64, %h: i64, %sq: i64, %skv: i64):
  attn.yield %lo, %hi : i64, i64
} 

// -----

// CHECK: init has 2 lists for 1 steps
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32], []] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
}

// -----

// CHECK: step 0: must end in attn.step_yield of 1 states
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states() weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
}

// -----

// CHECK: step 0: the last step, and no other, yields a weight
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
}

// -----

// CHECK: combine 0: must end in attn.combine_yield of 1 states
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
} combine {
^bb0(%b: i64, %h: i64, %i: i64, %a: f32, %c: f32):
  attn.combine_yield states() rescale(%a, %c)
}

// -----

// CHECK: combine 0: the last step, and no other, yields two factors
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
} combine {
^bb0(%b: i64, %h: i64, %i: i64, %a: f32, %c: f32):
  attn.combine_yield states(%a)
}

// -----

// CHECK: combine 0: block arguments are
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
} combine {
^bb0(%b: i64, %h: i64, %i: i64, %a: f32):
  attn.combine_yield states(%a) rescale(%a, %a)
}

// -----

// CHECK: combine has 2 regions for 1 steps
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs() saved()
} combine {
^bb0(%b: i64, %h: i64, %i: i64, %a: f32, %c: f32):
  attn.combine_yield states(%a) rescale(%a, %c)
} {
^bb0(%b: i64, %h: i64, %i: i64, %a: f32, %c: f32):
  attn.combine_yield states(%a) rescale(%a, %c)
}

// -----

// CHECK: epilogue: region must end in attn.epilogue_yield
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.yield %m : f32
}

// -----

// CHECK: epilogue: outputs and saved must match the results of the op
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.online %q, %k, %v scale %scale init [[0.0 : f32]] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
steps {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %m: f32):
  attn.step_yield states(%m) weight(%s)
} epilogue {
^bb0(%b: i64, %h: i64, %i: i64, %m: f32):
  attn.epilogue_yield scale(%m) outputs(%m) saved()
}

// -----

// CHECK: init has 1 lists for 0 row steps
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [[]] grad_captures [] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
rows {
^bb0(%b: i64, %h: i64, %i: i64, %delta: f32):
  attn.yield %delta : f32
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.yield %dp, %x : f32, f32
}

// -----

// CHECK: grad_captures must have one entry per result of d_captures
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [] grad_captures [0] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
rows {
^bb0(%b: i64, %h: i64, %i: i64, %delta: f32):
  attn.yield %delta : f32
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.yield %dp, %x : f32, f32
}

// -----

// CHECK: row step 0: must end in attn.step_yield of 0 states and nothing else
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [[]] grad_captures [] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
row_steps {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.step_yield states() weight(%x)
} rows {
^bb0(%b: i64, %h: i64, %i: i64, %delta: f32):
  attn.yield %delta : f32
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.yield %dp, %x : f32, f32
}

// -----

// CHECK: rows: region must end in attn.yield
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [] grad_captures [] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
rows {
^bb0(%b: i64, %h: i64, %i: i64, %delta: f32):
  attn.step_yield states(%delta)
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.yield %dp, %x : f32, f32
}

// -----

// CHECK: rows: block arguments are (i64, i64, i64), expected (i64, i64, i64, f32)
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [] grad_captures [] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
rows {
^bb0(%b: i64, %h: i64, %i: i64):
  attn.yield
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %dp, %x : f32, f32
}

// -----

// CHECK: element: block arguments are (f32, f32, i64, i64, i64, i64, f32), expected (f32, f32, i64, i64, i64, i64)
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [] grad_captures [] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
rows {
^bb0(%b: i64, %h: i64, %i: i64, %delta: f32):
  attn.yield
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.yield %dp, %x : f32, f32
}

// -----

// CHECK: element: yields (f32), expected (f32, f32)
%q, %k, %v, %do, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%dq = attn.backward %q, %k, %v scale %scale o %v, %do init [] grad_captures [] : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> dq tensor<1x2x8x4xf32>
rows {
^bb0(%b: i64, %h: i64, %i: i64, %delta: f32):
  attn.yield %delta : f32
} element {
^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %i: i64, %j: i64, %delta: f32):
  attn.yield %x : f32
}

// -----

// CHECK: kinds: block arguments are (i64, i64, i64, i64, i64, i64), expected (i64, i64, i64, i64, i64, i64, i64, i64)
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
} query_terms {
^bb0(%b: i64, %h: i64, %i: i64):
  attn.yield %i : i64
} key_terms {
^bb0(%b: i64, %h: i64, %j: i64):
  attn.yield
} kinds {
^bb0(%ql: i64, %qh: i64, %kl: i64, %kh: i64, %b: i64, %h: i64):
  %c = arith.cmpi eq, %ql, %kl : i64
  attn.yield %c, %c : i1, i1
}

// -----

// CHECK: query_terms, key_terms, kinds come together or not at all
%q, %k, %v, %scale = "test.op"() : () -> (tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, f32)
%o = attn.attention %q, %k, %v scale %scale : tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32>, tensor<1x2x8x4xf32> -> tensor<1x2x8x4xf32>
row {
^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64):
  attn.yield %s : f32
} query_terms {
^bb0(%b: i64, %h: i64, %i: i64):
  attn.yield %i : i64
}
