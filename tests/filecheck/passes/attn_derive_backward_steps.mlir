// RUN: attn-opt %s -p "attn-derive-backward{wrt=q,k,v}" | filecheck %s

// A sigmoid needs nothing from the forward pass, and no delta.
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %d_o: tensor<?x?x?x64xf32>) ->
// CHECK: rows {
// CHECK-NEXT: ^bb0
// CHECK-NEXT: attn.yield
// CHECK-NEXT: } element {
// CHECK: [[E:%.*]] = math.exp
// CHECK-NEXT: [[D:%.*]] = arith.addf [[E]], %one
// CHECK-NEXT: [[P:%.*]] = arith.divf %one, [[D]]
// CHECK-NEXT: [[A:%.*]] = arith.mulf %dp, [[P]]
// CHECK-NEXT: [[B:%.*]] = arith.subf %one, [[P]]
// CHECK-NEXT: [[DX:%.*]] = arith.mulf [[A]], [[B]]
// CHECK-NEXT: attn.yield [[P]], [[DX]]
builtin.module {
  func.func @sigmoid(%q: tensor<?x?x?x64xf32>, %k: tensor<?x?x?x64xf32>, %v: tensor<?x?x?x64xf32>, %scale: f32) -> tensor<?x?x?x64xf32> {
    %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32> -> tensor<?x?x?x64xf32> row {
    ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
      %one = arith.constant 1.0 : f32
      %n = arith.negf %s : f32
      %e = math.exp %n : f32
      %d = arith.addf %one, %e : f32
      %p = arith.divf %one, %d : f32
      attn.yield %p : f32
    }
    func.return %o : tensor<?x?x?x64xf32>
  }
}

// p = s * sum(s): delta says nothing of sum_j dp_j * s_j where the sum is 0, so a loop over the keys finds it.
// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %saved0: tensor<?x?x?xf32>
// CHECK: init {{\[\[}}0.000000e+00 : f32]]
// CHECK: row_steps {
// CHECK-NEXT: ^bb0(%x: f32, %dp: f32, {{.*}}: i64, %delta: f32, %r: f32, [[RUNNING:%.*]]: f32):
// CHECK-NEXT: [[T:%.*]] = arith.mulf %x, %dp
// CHECK-NEXT: [[BLOCK:%.*]] = attn.row_reduce sum [[T]]
// CHECK-NEXT: [[NEXT:%.*]] = arith.addf [[RUNNING]], [[BLOCK]]
// CHECK-NEXT: attn.step_yield states([[NEXT]])
// CHECK: element {
// CHECK-NOT: math
builtin.module {
  func.func @times_sum(%q: tensor<?x?x?x64xf32>, %k: tensor<?x?x?x64xf32>, %v: tensor<?x?x?x64xf32>, %scale: f32) -> tensor<?x?x?x64xf32> {
    %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32>, tensor<?x?x?x64xf32> -> tensor<?x?x?x64xf32> row {
    ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
      %r = attn.row_reduce sum %s
      %p = arith.mulf %s, %r : f32
      attn.yield %p : f32
    }
    func.return %o : tensor<?x?x?x64xf32>
  }
}
