// RUN: attn-opt %s -p attn-exp-to-exp2 | filecheck %s

// The guarded maximum is scaled once per row; an element costs a multiply-add and exp2.
// CHECK-LABEL: @softmax
func.func @softmax(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32) -> tensor<?x?x?x64xbf16> {
  %o = attn.online %q, %k, %v scale %scale init [[0xFF800000 : f32, 0.0 : f32]] : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16>
  // CHECK: steps {
  // CHECK-NEXT: ^bb0(%[[S:[a-z0-9_]+]]: f32,
  steps {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %m0: f32, %l0: f32):
    %bm = attn.row_reduce max %s
    %m = arith.maximumf %m0, %bm : f32
    %ninf = arith.constant 0xFF800000 : f32
    %zero = arith.constant 0.0 : f32
    %dead = arith.cmpf oeq, %m, %ninf : f32
    // CHECK: %[[MS:ms]] = arith.select
    %ms = arith.select %dead, %zero, %m : f32
    // CHECK: %[[LOG2E:[a-z0-9_]+]] = arith.constant 1.44269502 : f32
    // CHECK-NEXT: %[[C:[a-z0-9_]+]] = arith.select %{{.*}}, %{{.*}}, %[[LOG2E]] : f32
    // CHECK-NEXT: arith.mulf %m0, %[[C]] : f32
    // CHECK-NEXT: %[[R:[a-z0-9_]+]] = arith.mulf %[[MS]], %[[C]] : f32
    // CHECK: %alpha = math.exp2
    %am = arith.subf %m0, %ms : f32
    %alpha = math.exp %am : f32
    // CHECK-NEXT: %[[T:[a-z0-9_]+]] = arith.mulf %[[S]], %[[C]] : f32
    // CHECK-NEXT: %[[X:[a-z0-9_]+]] = arith.subf %[[T]], %[[R]] : f32
    // CHECK-NEXT: math.exp2 %[[X]] : f32
    %x = arith.subf %s, %ms : f32
    %e = math.exp %x : f32
    %bl = attn.row_reduce sum %e
    %l1 = arith.mulf %l0, %alpha : f32
    %l = arith.addf %l1, %bl : f32
    attn.step_yield states(%m, %l) rescale(%alpha) weight(%e)
  // CHECK: epilogue {
  } epilogue {
  ^bb0(%b: i64, %h: i64, %qi: i64, %m: f32, %l: f32):
    // CHECK: %[[L:[a-z0-9_]+]] = math.log2
    // CHECK-NEXT: %[[LN2:[a-z0-9_]+]] = arith.constant 0.693147182 : f32
    // CHECK-NEXT: arith.mulf %[[L]], %[[LN2]] : f32
    // CHECK-NOT: math.log %
    %g = math.log %l : f32
    attn.epilogue_yield scale(%g) outputs() saved()
  }
  func.return %o : tensor<?x?x?x64xbf16>
}
