// RUN: attn-opt %s | attn-opt | filecheck %s

// A mask of documents with its kinds of blocks, and queries that read the other half of their row.
// CHECK-LABEL: @documents
func.func @documents(%q: tensor<?x?x?x8xf32>, %k: tensor<?x?x?x8xf32>, %v: tensor<?x?x?x8xf32>, %scale: f32, %doc: tensor<?xi64>) -> tensor<?x?x?x8xf32> {
  %o = attn.attention %q, %k, %v scale %scale captures %doc : tensor<?x?x?x8xf32>, tensor<?x?x?x8xf32>, tensor<?x?x?x8xf32> captures tensor<?xi64> -> tensor<?x?x?x8xf32>
  // CHECK: query_mod {
  query_mod {
  ^bb0(%x: f32, %b: i64, %h: i64, %position: i64, %channel: i64, %d: tensor<?xi64>):
    %four = arith.constant 4 : i64
    %other = arith.xori %channel, %four : i64
    // CHECK: %[[Y:[a-z0-9_]+]] = attn.channel_at %x[%other]
    %y = attn.channel_at %x[%other]
    // CHECK-NEXT: attn.row_reduce sum %[[Y]]
    %n = attn.row_reduce sum %y
    %z = arith.mulf %x, %n : f32
    attn.yield %z : f32
  } mask {
  ^bb0(%b: i64, %h: i64, %i: i64, %j: i64, %d: tensor<?xi64>):
    %s = attn.load %d[%i] : tensor<?xi64> -> i64
    %t = attn.load %d[%j] : tensor<?xi64> -> i64
    %m = arith.cmpi eq, %s, %t : i64
    attn.yield %m : i1
  } row {
  ^bb0(%s: f32, %b: i64, %h: i64, %i: i64, %j: i64, %d: tensor<?xi64>):
    attn.yield %s : f32
  // CHECK: query_terms {
  } query_terms {
  ^bb0(%b: i64, %h: i64, %i: i64, %d: tensor<?xi64>):
    %s = attn.load %d[%i] : tensor<?xi64> -> i64
    attn.yield %s : i64
  // CHECK: key_terms {
  } key_terms {
  ^bb0(%b: i64, %h: i64, %j: i64, %d: tensor<?xi64>):
    %t = attn.load %d[%j] : tensor<?xi64> -> i64
    attn.yield %t : i64
  // CHECK: kinds {
  } kinds {
  ^bb0(%ql: i64, %qh: i64, %kl: i64, %kh: i64, %b: i64, %h: i64, %qmin: i64, %qmax: i64, %kmin: i64, %kmax: i64, %d: tensor<?xi64>):
    %some = arith.cmpi sle, %qmin, %kmax : i64
    %every = arith.cmpi eq, %qmin, %kmax : i64
    // CHECK: attn.yield %some, %every : i1, i1
    attn.yield %some, %every : i1, i1
  }
  func.return %o : tensor<?x?x?x8xf32>
}
