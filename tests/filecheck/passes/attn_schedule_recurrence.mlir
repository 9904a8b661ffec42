// RUN: attn-opt %s -p 'attn-schedule-recurrence{heads=8 tokens=32768 blocks=true}' | filecheck %s
// RUN: attn-opt %s -p 'attn-schedule-recurrence{heads=640 tokens=4096 blocks=true},convert-recurrence-to-tile{descriptors=true}' | filecheck %s --check-prefix=CHAIN

func.func @forward(%q: tensor<?x?x?x128xbf16>, %k: tensor<?x?x?x128xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32, %g: tensor<?x?x?xf32>) -> tensor<?x?x?x64xbf16> {
  %o = attn.recurrence %q, %k, %v scale %scale decay %g : tensor<?x?x?x128xbf16>, tensor<?x?x?x128xbf16>, tensor<?x?x?x64xbf16> decay tensor<?x?x?xf32> -> tensor<?x?x?x64xbf16>
  func.return %o : tensor<?x?x?x64xbf16>
}

// Few heads: pieces side by side, the state turned.
// CHECK: attn.recurrence
// CHECK-SAME: form = {value_block = 64 : i64, turned = 1 : i64, pieces = 32 : i64, chained = 0 : i64, num_warps = 4 : i64, num_stages = 2 : i64}

// A little more than two rounds of programs: each piece waits for the one before, and says when it is done.
// CHAIN: tile.kernel @forward_o_sweep
// CHAIN: tile.await %flags
// CHAIN: tile.load_block %q
// CHAIN: tile.store_block %{{.*}}, %o
// CHAIN: tile.signal %flags
// CHAIN: tile.describe %q : !tile.global<4 x bf16> -> !tile.descriptor<1x1x64x128xbf16>
