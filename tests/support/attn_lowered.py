"""Attentions after the derive passes, written by hand: what `attn.online` and `attn.backward` look like."""

_T = "tensor<?x?x?x?xf32>"
_ROW = "tensor<?x?x?xf32>"

# Softmax in one pass over the keys, causal, with its lse as an output.
SOFTMAX_ONLINE = f"""
func.func @attention(%q: {_T}, %k: {_T}, %v: {_T}, %scale: f32) -> ({_T}, {_ROW}) {{
  %o, %lse = attn.online %q, %k, %v scale %scale init [[0xFF800000 : f32, 0.0 : f32]] : {_T}, {_T}, {_T} -> {_T} outputs {_ROW}
  mask {{
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  }} steps {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %m0: f32, %l0: f32):
    %ninf = arith.constant 0xFF800000 : f32
    %zero = arith.constant 0.0 : f32
    %bm = attn.row_reduce max %s
    %m = arith.maximumf %m0, %bm : f32
    %dead = arith.cmpf oeq, %m, %ninf : f32
    %ms = arith.select %dead, %zero, %m : f32
    %am = arith.subf %m0, %ms : f32
    %alpha = math.exp %am : f32
    %x = arith.subf %s, %ms : f32
    %e = math.exp %x : f32
    %bl = attn.row_reduce sum %e
    %l1 = arith.mulf %l0, %alpha : f32
    %l = arith.addf %l1, %bl : f32
    attn.step_yield states(%m, %l) rescale(%alpha) weight(%e)
  }} epilogue {{
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
    attn.epilogue_yield scale(%g) outputs(%lse) saved()
  }}
  func.return %o, %lse : {_T}, {_ROW}
}}
"""

# Softmax in three passes: the maximum, then the sum, then the weights. No rescaling at all.
SOFTMAX_THREE_STEPS = f"""
func.func @attention(%q: {_T}, %k: {_T}, %v: {_T}, %scale: f32) -> {_T} {{
  %o = attn.online %q, %k, %v scale %scale init [[0xFF800000 : f32], [0.0 : f32], []] : {_T}, {_T}, {_T} -> {_T}
  mask {{
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  }} steps {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %m0: f32):
    %bm = attn.row_reduce max %s
    %m = arith.maximumf %m0, %bm : f32
    attn.step_yield states(%m)
  }} {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %l0: f32, %m: f32):
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %bl = attn.row_reduce sum %e
    %l = arith.addf %l0, %bl : f32
    attn.step_yield states(%l)
  }} {{
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %m: f32, %l: f32):
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %p = arith.divf %e, %l : f32
    attn.step_yield states() weight(%p)
  }} epilogue {{
  ^bb0(%b: i64, %h: i64, %qi: i64, %m: f32, %l: f32):
    %one = arith.constant 1.0 : f32
    attn.epilogue_yield scale(%one) outputs() saved()
  }}
  func.return %o : {_T}
}}
"""

# Softmax with a slope per head times the score, causal: from the saved lse; the slopes get a gradient too.
SOFTMAX_BACKWARD = f"""
func.func @backward(%q: {_T}, %k: {_T}, %v: {_T}, %scale: f32, %o: {_T}, %do: {_T}, %lse: {_ROW}, %slopes: tensor<?xf32>) -> ({_T}, {_T}, {_T}, tensor<?xf32>) {{
  %dq, %dk, %dv, %dw = attn.backward %q, %k, %v scale %scale o %o, %do saved %lse captures %slopes init [] grad_captures [0] : {_T}, {_T}, {_T}, {_T}, {_T} saved {_ROW} captures tensor<?xf32> -> dq {_T} dk {_T} dv {_T} d_captures tensor<?xf32>
  mask {{
  ^bb0(%b: i64, %h: i64, %qi: i64, %kv: i64, %slopes_: tensor<?xf32>):
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1
  }} rows {{
  ^bb0(%b: i64, %h: i64, %qi: i64, %delta: f32, %lse_: f32, %slopes_: tensor<?xf32>):
    %ninf = arith.constant 0xFF800000 : f32
    %inf = arith.constant 0x7F800000 : f32
    %dead = arith.cmpf oeq, %lse_, %ninf : f32
    %safe = arith.select %dead, %inf, %lse_ : f32
    attn.yield %safe, %delta : f32, f32
  }} element {{
  ^bb0(%x: f32, %dp: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %lse_: f32, %delta: f32, %slopes_: tensor<?xf32>):
    %w = attn.load %slopes_[%h] : tensor<?xf32> -> f32
    %s = arith.mulf %x, %w : f32
    %d = arith.subf %s, %lse_ : f32
    %p = math.exp %d : f32
    %t = arith.subf %dp, %delta : f32
    %ds = arith.mulf %p, %t : f32
    %dw0 = arith.mulf %ds, %x : f32
    attn.accumulate_grad %dw0, %slopes_[%h] : tensor<?xf32>
    %dx = arith.mulf %ds, %w : f32
    attn.yield %p, %dx : f32, f32
  }}
  func.return %dq, %dk, %dv, %dw : {_T}, {_T}, {_T}, tensor<?xf32>
}}
"""
