// RUN: attn-opt %s -p "attn-derive-online,attn-simplify,convert-attn-to-tile{forward=16,32,4,1 parts=3}" | filecheck %s

// One kernel folds a part of the keys: its number is the remainder of the program's.
// CHECK-LABEL: tile.kernel @forward_part0(
// CHECK: %program = tile.program_id 0
// CHECK: %part = arith.remsi %program
// CHECK: [[FIRST:%.*]] = arith.muli %part, %part_keys : i32
// CHECK: [[AFTER:%.*]] = arith.addi [[FIRST]], %part_keys : i32
// CHECK: [[HI:%.*]] = arith.minsi {{.*}}, [[AFTER]] : i32
// CHECK: scf.for {{.*}} to [[HI]]
// CHECK-NOT: tile.store {{.*}} bf16
// CHECK: tile.store {{.*}} %part0[
// CHECK: tile.store {{.*}} %part_acc[
// CHECK: tile.end

// The other combines the parts of its queries, and alone writes results.
// CHECK-LABEL: tile.kernel @forward_combine(
// CHECK: scf.for %part = {{.*}} iter_args({{.*}}) -> (tensor<16xf32>, tensor<16xf32>, tensor<16x64xf32>)
// CHECK-NOT: tile.dot
// CHECK: tile.load %part_acc[
// CHECK: num_stages = 4 : i64
// CHECK: tile.store %o{{.*}}, %o[

// CHECK-LABEL: tile.plan @forward(
// CHECK: %part_rows = arith.muli %c3, %sq : i32
// CHECK: %part_acc = tile.alloc(%batch, %heads, %part_rows, {{.*}}) : !tile.global<4 x f32>
// CHECK: tile.launch @forward_part0 grid(%programs, %heads, %batch)
// CHECK: tile.launch @forward_combine grid(%q_blocks, %heads, %batch)
builtin.module {
  func.func @attention(%q: tensor<?x?x?x64xbf16>, %k: tensor<?x?x?x64xbf16>, %v: tensor<?x?x?x64xbf16>, %scale: f32) -> tensor<?x?x?x64xbf16> {
    %o = attn.attention %q, %k, %v scale %scale : tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16>, tensor<?x?x?x64xbf16> -> tensor<?x?x?x64xbf16> row {
    ^bb0(%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64):
      %m = attn.row_reduce max %s
      %d = arith.subf %s, %m : f32
      %e = math.exp %d : f32
      %l = attn.row_reduce sum %e
      %p = arith.divf %e, %l : f32
      attn.yield %p : f32
    }
    func.return %o : tensor<?x?x?x64xbf16>
  }
}
