// RUN: attn-opt %s | attn-opt | filecheck %s

// A user's attention: slopes per head, a causal mask, softmax written offline, and its lse.
// CHECK-LABEL: @alibi
func.func @alibi(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %slopes: tensor<?xf32>) -> (tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>) {
  // CHECK: attn.attention %q, %k, %v scale %scale captures %slopes
  %o, %lse = attn.attention %q, %k, %v scale %scale captures %slopes : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?xf32> -> tensor<?x?x?x64xbf16> outputs tensor<?x?x?xf32>
  // CHECK-SAME: score_mod {
  score_mod {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %sl: tensor<?xf32>):
    // CHECK: %{{.*}} = attn.load %{{.*}}[%{{.*}}] : tensor<?xf32> -> f32
    %w = attn.load %sl[%h] : tensor<?xf32> -> f32
    %d = arith.subi %kv, %qi : i64
    %df = arith.sitofp %d : i64 to f32
    %m = arith.mulf %w, %df : f32
    %r = arith.addf %s, %m : f32
    attn.yield %r : f32
  } mask {
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %sl: tensor<?xf32>):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %sl: tensor<?xf32>):
    // CHECK: attn.row_reduce max %{{.*}}
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    %ll = math.log %l : f32
    %lse = arith.addf %m, %ll : f32
    attn.yield %p, %lse : f32, f32
  }
  func.return %o, %lse : tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>
}

// The same attention after derive-online (mask left out here).
// CHECK-LABEL: @online
func.func @online(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32) -> (tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>) {
  // CHECK: attn.online %q, %k, %v scale %scale init {{\[\[}}0xff800000 : f32, 0.000000e+00 : f32]]
  %o, %lse = attn.online %q, %k, %v scale %scale init [[0xFF800000 : f32, 0.0 : f32]] : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16> saved tensor<?x?x?xf32>
  steps {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %m0: f32, %l0: f32):
    %bm = attn.row_reduce max %s
    %m = arith.maximumf %m0, %bm : f32
    %ninf = arith.constant 0xFF800000 : f32
    %zero = arith.constant 0.0 : f32
    %dead = arith.cmpf oeq, %m, %ninf : f32
    %ms = arith.select %dead, %zero, %m : f32
    %am = arith.subf %m0, %ms : f32
    %alpha = math.exp %am : f32
    %x = arith.subf %s, %ms : f32
    %e = math.exp %x : f32
    %bl = attn.row_reduce sum %e
    %l1 = arith.mulf %l0, %alpha : f32
    %l = arith.addf %l1, %bl : f32
    // CHECK: attn.step_yield states(%{{.*}}, %{{.*}}) rescale(%{{.*}}) weight(%{{.*}})
    attn.step_yield states(%m, %l) rescale(%alpha) weight(%e)
  } epilogue {
  ^bb0(%b: i64, %h: i64, %qi: i64, %m: f32, %l: f32):
    %ninf = arith.constant 0xFF800000 : f32
    %zero = arith.constant 0.0 : f32
    %one = arith.constant 1.0 : f32
    %dead = arith.cmpf oeq, %m, %ninf : f32
    %inv = arith.divf %one, %l : f32
    %g = arith.select %dead, %zero, %inv : f32
    %ll = math.log %l : f32
    %lse0 = arith.addf %m, %ll : f32
    %lse = arith.select %dead, %ninf, %lse0 : f32
    // CHECK: attn.epilogue_yield scale(%{{.*}}) outputs() saved(%{{.*}})
    attn.epilogue_yield scale(%g) outputs() saved(%lse)
  } combine {
  ^bb0(%b: i64, %h: i64, %qi: i64, %ma: f32, %la: f32, %mb: f32, %lb: f32):
    %m = arith.maximumf %ma, %mb : f32
    %da = arith.subf %ma, %m : f32
    %a = math.exp %da : f32
    %db = arith.subf %mb, %m : f32
    %c = math.exp %db : f32
    %pa = arith.mulf %la, %a : f32
    %pb = arith.mulf %lb, %c : f32
    %l = arith.addf %pa, %pb : f32
    // CHECK: attn.combine_yield states(%{{.*}}, %{{.*}}) rescale(%{{.*}}, %{{.*}})
    attn.combine_yield states(%m, %l) rescale(%a, %c)
  }
  func.return %o, %lse : tensor<?x?x?x64xbf16>, tensor<?x?x?xf32>
}

// Its gradients, with one saved row vector.
// CHECK-LABEL: @gradients
func.func @gradients(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %o: tensor<?x?x?x64xbf16>, %do: tensor<?x?x?x64xbf16>, %lse: tensor<?x?x?xf32>, %w: tensor<?xf32>) -> (tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?xf32>) {
  // CHECK: attn.backward %q, %k, %v scale %scale o %o, %do saved %lse captures %w init [] grad_captures [0 : i64]
  %dq, %dk, %dv, %dw = attn.backward %q, %k, %v scale %scale o %o, %do saved %lse captures %w init [] grad_captures [0] : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> saved tensor<?x?x?xf32> captures tensor<?xf32> -> dq tensor<?x?x?x64xbf16> dk tensor<?x?x?x64xbf16> dv tensor<?x?x?x64xbf16> d_captures tensor<?xf32>
  rows {
  ^bb0(%b: i64, %h: i64, %qi: i64, %delta: f32, %lse0: f32, %sl: tensor<?xf32>):
    attn.yield %lse0, %delta : f32, f32
  } element {
  ^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %lse0: f32, %delta: f32, %sl: tensor<?xf32>):
    %wh = attn.load %sl[%h] : tensor<?xf32> -> f32
    %s = arith.mulf %x, %wh : f32
    %d = arith.subf %s, %lse0 : f32
    %p = math.exp %d : f32
    %t = arith.subf %dp, %delta : f32
    %ds = arith.mulf %p, %t : f32
    %dw0 = arith.mulf %ds, %x : f32
    // CHECK: attn.accumulate_grad %{{.*}}, %{{.*}}[%{{.*}}] : tensor<?xf32>
    attn.accumulate_grad %dw0, %sl[%h] : tensor<?xf32>
    %dx = arith.mulf %ds, %wh : f32
    attn.yield %p, %dx : f32, f32
  }
  func.return %dq, %dk, %dv, %dw : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?xf32>
}
