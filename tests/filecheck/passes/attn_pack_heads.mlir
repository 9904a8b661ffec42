// RUN: attn-opt %s -p 'attn-pack-heads{group=4}' | filecheck %s
// RUN: attn-opt %s -p 'attn-pack-heads{group=4 single=true}' | filecheck %s --check-prefix SINGLE

// Row r of a head of keys is query r // 4 of head h * 4 + r % 4; keys count as before.
// CHECK-LABEL: @slopes
// SINGLE-LABEL: @slopes
func.func @slopes(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %sl: tensor<?xf32>) -> tensor<?x?x?x64xbf16> {
  %o = attn.attention %q, %k, %v scale %scale captures %sl : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> captures tensor<?xf32> -> tensor<?x?x?x64xbf16>
  // CHECK: score_mod {
  // CHECK-NEXT: ^bb0(%s: f32, %b: i64, %[[H:[a-z0-9_]+]]: i64, %[[Q:[a-z0-9_]+]]: i64, %[[KV:[a-z0-9_]+]]: i64
  // CHECK-NEXT: %[[G:[a-z0-9_]+]] = arith.constant 4 : i64
  // CHECK-NEXT: %[[FIRST:[a-z0-9_]+]] = arith.muli %[[H]], %[[G]] : i64
  // CHECK-NEXT: %[[P:[a-z0-9_]+]] = arith.floordivsi %[[Q]], %[[G]] : i64
  // CHECK-NEXT: %[[BEFORE:[a-z0-9_]+]] = arith.muli %[[P]], %[[G]] : i64
  // CHECK-NEXT: %[[WITHIN:[a-z0-9_]+]] = arith.subi %[[Q]], %[[BEFORE]] : i64
  // CHECK-NEXT: %[[HEAD:[a-z0-9_]+]] = arith.addi %[[FIRST]], %[[WITHIN]] : i64
  // CHECK-NEXT: attn.load %{{.*}}[%[[HEAD]]]
  // CHECK-NEXT: arith.subi %[[KV]], %[[P]] : i64
  // SINGLE: ^bb0(%s: f32, %b: i64, %[[H:[a-z0-9_]+]]: i64, %[[Q:[a-z0-9_]+]]: i64, %[[KV:[a-z0-9_]+]]: i64
  // SINGLE-NEXT: %[[G:[a-z0-9_]+]] = arith.constant 4 : i64
  // SINGLE-NEXT: %[[FIRST:[a-z0-9_]+]] = arith.muli %[[H]], %[[G]] : i64
  // SINGLE-NEXT: %[[HEAD:[a-z0-9_]+]] = arith.addi %[[FIRST]], %[[Q]] : i64
  // SINGLE-NEXT: attn.load %{{.*}}[%[[HEAD]]]
  // SINGLE-NEXT: arith.sitofp %[[KV]]
  score_mod {
  ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64, %sl1: tensor<?xf32>):
    %slope = attn.load %sl1[%h] : tensor<?xf32> -> f32
    %distance = arith.subi %kv, %qi : i64
    %d = arith.sitofp %distance : i64 to f32
    %term = arith.mulf %slope, %d : f32
    %x = arith.addf %s, %term : f32
    attn.yield %x : f32
  } row {
  // What asks for neither stays as it is.
  // CHECK: row {
  // CHECK-NEXT: ^bb0
  // CHECK-NEXT: math.exp
  ^bb0(%s2: f32, %b2: i64, %h2: i64, %q2: i64, %kv2: i64, %sl2: tensor<?xf32>):
    %e = math.exp %s2 : f32
    attn.yield %e : f32
  }
  func.return %o : tensor<?x?x?x64xbf16>
}
