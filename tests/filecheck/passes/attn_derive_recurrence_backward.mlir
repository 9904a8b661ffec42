// RUN: attn-opt %s -p 'attn-derive-recurrence-backward{wrt=q,k,v,decay,initial d_final=true}' | filecheck %s
// RUN: attn-opt %s -p 'attn-derive-recurrence-backward{wrt=v grouped=false}' | filecheck %s --check-prefix=V

// Each gradient is a sweep of the same kind with the operands in other places.
func.func @forward(%q: tensor<?x?x?x16xf32>, %k: tensor<?x?x?x16xf32>, %v: tensor<?x?x?x32xf32>, %scale: f32, %decay: tensor<?x?x?xf32>, %initial: tensor<?x?x16x32xf32>) -> (tensor<?x?x?x32xf32>, tensor<?x?x16x32xf32>) {
  %o, %final = attn.recurrence %q, %k, %v scale %scale decay %decay initial %initial : tensor<?x?x?x16xf32>, tensor<?x?x?x16xf32>, tensor<?x?x?x32xf32> decay tensor<?x?x?xf32> initial tensor<?x?x16x32xf32> -> tensor<?x?x?x32xf32> final tensor<?x?x16x32xf32>
  func.return %o, %final : tensor<?x?x?x32xf32>, tensor<?x?x16x32xf32>
}

// CHECK-LABEL: func.func @backward(
// CHECK-SAME: %initial_t: tensor<?x?x32x16xf32>, %d_o: tensor<?x?x?x32xf32>, %final: tensor<?x?x16x32xf32>, %d_final: tensor<?x?x16x32xf32>, %d_final_t: tensor<?x?x32x16xf32>)
// CHECK-NEXT: %[[DQ:.*]], %p, %kept = attn.sweep %d_o, %v, %k scale %scale decay %decay initial %initial_t dot %q segment 256 :
// CHECK-NEXT: %d_q = attn.sum_heads %[[DQ]] like %q
// CHECK-NEXT: %[[DK:.*]], %n, %ends = attn.sweep %v, %d_o, %q scale %scale decay %decay initial %d_final_t dot %k meets %kept segment 256 reverse whole :
// CHECK-NEXT: %d_k = attn.sum_heads %[[DK]] like %k
// CHECK-NEXT: %d_v, %d_initial = attn.sweep %k, %q, %d_o scale %scale decay %decay initial %d_final reverse :
// CHECK-NEXT: %d_decay = attn.token_gradients p %p n %n decay %decay states %final, %d_final ends %ends segment 256 :
// CHECK-NEXT: func.return %d_q, %d_k, %d_v, %d_decay, %d_initial

// V-LABEL: func.func @backward(
// V-NEXT: %d_v = attn.sweep %k, %q, %d_o scale %scale decay %decay reverse :
// V-NEXT: func.return %d_v
