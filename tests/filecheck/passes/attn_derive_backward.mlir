// RUN: attn-opt %s -p "attn-derive-backward{wrt=q,k,v,0}" | filecheck %s

// Softmax saves one vector, the log-sum-exp that it returns anyway; no loop over the keys, one exponential.
// CHECK-LABEL: func.func @attention
// CHECK: -> tensor<?x?x?x64xbf16> outputs tensor<?x?x?xf32> saved tensor<?x?x?xf32>
func.func @attention(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %slopes: tensor<?xf32>) -> (tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>) {
  %o, %lse = attn.attention %q, %k, %v scale %scale captures %slopes : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?xf32> -> tensor<?x?x?x64xbf16> outputs tensor<?x?x?xf32>
  score_mod {
  ^bb0(%x: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %sl: tensor<?xf32>):
    %w = attn.load %sl[%h] : tensor<?xf32> -> f32
    %s = arith.mulf %x, %w : f32
    attn.yield %s : f32
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %sl: tensor<?xf32>):
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    %ll = math.log %l : f32
    // CHECK: [[LSE:%.*]] = arith.addf %m, %ll
    %lse = arith.addf %m, %ll : f32
    // CHECK-NEXT: attn.yield %p, [[LSE]], [[LSE]] : f32, f32, f32
    attn.yield %p, %lse : f32, f32
  }
  func.return %o, %lse : tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>
}

// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %q: tensor<?x?x?x64xbf16>, %k: {{.*}}, %v: {{.*}}, %scale: f32, %o: {{.*}}, %d_o: {{.*}}, %saved0: tensor<?x?x?xf32>, %d_out0: tensor<?x?x?xf32>, %slopes: tensor<?xf32>)
// CHECK: init [] grad_captures [0 : i64]
// CHECK-NOT: row_steps
// CHECK: rows {
// CHECK: [[DEAD:%.*]] = arith.cmpf oeq, [[SAVED:%.*]], %{{.*}} : f32
// CHECK: [[ROW0:%.*]] = arith.select [[DEAD]], %{{.*}}, [[SAVED]]
// CHECK: [[D:%.*]] = arith.subf %d_out0{{.*}}, %delta
// CHECK: [[ROW1:%.*]] = arith.select [[DEAD]], %{{.*}}, [[D]]
// CHECK-NEXT: attn.yield [[ROW0]], [[ROW1]] : f32, f32
// CHECK: element {
// CHECK-NEXT: ^bb0(%x: f32, %dp: f32, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %kv: i64, [[ROW0:%.*]]: f32, [[ROW1:%.*]]: f32, %{{.*}}: tensor<?xf32>):
// CHECK-NEXT: [[W:%.*]] = attn.load
// CHECK-NEXT: [[S:%.*]] = arith.mulf %x, [[W]]
// CHECK-NEXT: [[T:%.*]] = arith.subf [[S]], [[ROW0]]
// CHECK-NEXT: [[P:%.*]] = math.exp [[T]]
// CHECK-NEXT: [[G:%.*]] = arith.addf %dp, [[ROW1]]
// CHECK-NEXT: [[DS:%.*]] = arith.mulf [[G]], [[P]]
// CHECK-NEXT: [[DX:%.*]] = arith.mulf [[W]], [[DS]]
// CHECK-NEXT: [[DW:%.*]] = arith.mulf %x, [[DS]]
// CHECK-NEXT: attn.accumulate_grad [[DW]]
// CHECK-NEXT: attn.yield [[P]], [[DX]] : f32, f32
