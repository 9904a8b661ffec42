// RUN: attn-opt %s -p attn-derive-online | filecheck %s

// Softmax with its lse: one loop, rescaled by the running maximum, divided at the end.
// CHECK-LABEL: @softmax
func.func @softmax(%q: tensor<?x?x?x64xf16>, %k: tensor<?x?x?x64xf16>, %v: tensor<?x?x?x64xf16>, %scale: f32) -> (tensor<?x?x?x64xf16>, tensor<?x?x?xf32>) {
  // CHECK-NOT: attn.attention
  // CHECK: attn.online %q, %k, %v scale %scale init {{\[\[}}0xff800000 : f32, 0.000000e+00 : f32]]
  // CHECK-SAME: outputs tensor<?x?x?xf32> steps {
  // CHECK-NEXT: ^{{.*}}(%[[S:.*]]: f32, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %[[M0:.*]]: f32, %[[L0:.*]]: f32):
  // CHECK: %[[BM:.*]] = attn.row_reduce max %[[S]]
  // CHECK: %[[M:.*]] = arith.maximumf %[[M0]], %[[BM]] : f32
  // CHECK: %[[SAFE:.*]] = arith.select %{{.*}}, %{{.*}}, %[[M]] : f32
  // CHECK: %[[X:.*]] = arith.subf %[[S]], %[[SAFE]] : f32
  // CHECK: %[[E:.*]] = math.exp %[[X]] : f32
  // CHECK: %[[BL:.*]] = attn.row_reduce sum %[[E]]
  // CHECK: %[[D:.*]] = arith.subf %[[M0]], %[[SAFE]] : f32
  // CHECK: %[[ALPHA:.*]] = math.exp %[[D]] : f32
  // CHECK: %[[OLD:.*]] = arith.mulf %[[L0]], %[[ALPHA]] : f32
  // CHECK: %[[L:.*]] = arith.addf %[[OLD]], %[[BL]] : f32
  // CHECK: attn.step_yield states(%[[M]], %[[L]]) rescale(%[[ALPHA]]) weight(%[[E]])
  // CHECK: epilogue {
  // CHECK: arith.divf %{{.*}}, %{{.*}} : f32
  // CHECK: attn.epilogue_yield scale(%{{.*}}) outputs(%{{.*}}) saved()
  // CHECK: combine {
  // CHECK-NEXT: ^{{.*}}(%{{.*}}: i64, %{{.*}}: i64, %{{.*}}: i64, %[[MA:.*]]: f32, %[[LA:.*]]: f32, %[[MB:.*]]: f32, %[[LB:.*]]: f32):
  // CHECK: %[[MAB:.*]] = arith.maximumf %[[MA]], %[[MB]] : f32
  // CHECK: %[[SAFEAB:.*]] = arith.select %{{.*}}, %{{.*}}, %[[MAB]] : f32
  // CHECK: %[[DA:.*]] = arith.subf %[[MA]], %[[SAFEAB]] : f32
  // CHECK: %[[ALPHAA:.*]] = math.exp %[[DA]] : f32
  // CHECK: %[[PA:.*]] = arith.mulf %[[LA]], %[[ALPHAA]] : f32
  // CHECK: %[[DB:.*]] = arith.subf %[[MB]], %[[SAFEAB]] : f32
  // CHECK: %[[ALPHAB:.*]] = math.exp %[[DB]] : f32
  // CHECK: %[[PB:.*]] = arith.mulf %[[LB]], %[[ALPHAB]] : f32
  // CHECK: %[[LAB:.*]] = arith.addf %[[PA]], %[[PB]] : f32
  // CHECK: attn.combine_yield states(%[[MAB]], %[[LAB]]) rescale(%[[ALPHAA]], %[[ALPHAB]])
  %o, %lse = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xf16>, tensor<?x?x?x64xf16>, tensor<?x?x?x64xf16> -> tensor<?x?x?x64xf16> outputs tensor<?x?x?xf32> row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    %ll = math.log %l : f32
    %lse = arith.addf %m, %ll : f32
    attn.yield %p, %lse : f32, f32
  }
  func.return %o, %lse : tensor<?x?x?x64xf16>, tensor<?x?x?xf32>
}

// The clamp of a difference to the maximum needs the final maximum: a second loop.
// CHECK-LABEL: @relu_of_difference
func.func @relu_of_difference(%q: tensor<?x?x?x64xf16>, %k: tensor<?x?x?x64xf16>, %v: tensor<?x?x?x64xf16>, %scale: f32) -> tensor<?x?x?x64xf16> {
  // CHECK: attn.online %q, %k, %v scale %scale init {{\[\[}}0xff800000 : f32], [0.000000e+00 : f32]]
  // CHECK: attn.step_yield states(%{{.*}})
  // CHECK-NOT: rescale
  // CHECK: attn.step_yield states(%{{.*}}) weight(%{{.*}})
  %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xf16>, tensor<?x?x?x64xf16>, tensor<?x?x?x64xf16> -> tensor<?x?x?x64xf16> row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
    %one = arith.constant 1.0 : f32
    %zero = arith.constant 0.0 : f32
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %y = arith.addf %x, %one : f32
    %e = arith.maximumf %y, %zero : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    attn.yield %p : f32
  }
  func.return %o : tensor<?x?x?x64xf16>
}
