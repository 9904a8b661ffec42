// RUN: attn-opt %s --verify-diagnostics --split-input-file | filecheck %s

// CHECK: tile.kernel @open must end in tile.end
tile.kernel @open() {
  "tile.yield"() : () -> ()
}

// -----

// CHECK: 1 sizes for a temporary of rank 2
%n = "test.op"() : () -> i32
%t = tile.alloc(%n) : !tile.global<2 x f32>

// -----

// CHECK: value f16 does not match target !tile.global<1 x f32>
%x, %v = "test.op"() : () -> (!tile.global<1 x f32>, f16)
tile.fill %x, %v : !tile.global<1 x f32>, f16

// -----

// CHECK: a grid has one to three axes, got 4
%n = "test.op"() : () -> i32
tile.launch @kernel grid(%n, %n, %n, %n) args() :

// -----

// CHECK: kernel @one takes
tile.kernel @one(%n: i32) {
  tile.end
}
tile.plan @plan(%n: i32, %s: f32) {
  tile.launch @one grid(%n) args(%s) : f32
  tile.end
}

// -----

// CHECK: !tile.global<2 x f32> needs 2 indices, got 1
%x, %i = "test.op"() : () -> (!tile.global<2 x f32>, i32)
%t = tile.load %x[%i] dims [0] : !tile.global<2 x f32> -> tensor<4xf32>

// -----

// CHECK: dims [0] do not match the rank of tensor<4x4xf32>
%x, %i = "test.op"() : () -> (!tile.global<2 x f32>, i32)
%t = tile.load %x[%i, %i] dims [0] : !tile.global<2 x f32> -> tensor<4x4xf32>

// -----

// CHECK: dims [1, 1] must be different axes of a tensor of rank 2
%x, %i = "test.op"() : () -> (!tile.global<2 x f32>, i32)
%t = tile.load %x[%i, %i] dims [1, 1] : !tile.global<2 x f32> -> tensor<4x4xf32>

// -----

// CHECK: bounded [2] needs one limit each, naming axes of the tile
%x, %i = "test.op"() : () -> (!tile.global<2 x f32>, i32)
%t = tile.load %x[%i, %i] dims [0, 1] bounded [2] limits(%i) : !tile.global<2 x f32> -> tensor<4x4xf32>

// -----

// CHECK: indices and limits are all i32 or all i64, got i32, i64
%x, %i, %n = "test.op"() : () -> (!tile.global<1 x f32>, i32, i64)
%t = "tile.load"(%x, %i, %n) <{dims = array<i64: 0>, bounded = array<i64: 0>, operandSegmentSizes = array<i32: 1, 1, 1>}> : (!tile.global<1 x f32>, i32, i64) -> tensor<4xf32>

// -----

// CHECK: tensor<4xf16> does not match the elements of !tile.global<1 x f32>
%x, %i, %t = "test.op"() : () -> (!tile.global<1 x f32>, i32, tensor<4xf16>)
tile.store %t, %x[%i] dims [0] : tensor<4xf16>, !tile.global<1 x f32>

// -----

// CHECK: atomic_max is of one f32, got tensor<4xf32>
%x, %i, %t = "test.op"() : () -> (!tile.global<1 x f32>, i32, tensor<4xf32>)
tile.atomic_max %t, %x[%i] dims [0] : tensor<4xf32>, !tile.global<1 x f32>

// -----

// CHECK: atomic_add is on f32, f16, bf16 or i64
%x, %i, %t = "test.op"() : () -> (!tile.global<1 x i32>, i32, tensor<4xi32>)
tile.atomic_add %t, %x[%i] dims [0] : tensor<4xi32>, !tile.global<1 x i32>

// -----

// CHECK: !tile.global<2 x f32> needs 2 indices, got 1
%x, %i = "test.op"() : () -> (!tile.global<2 x f32>, i32)
%v = tile.gather %x[%i : i32] : !tile.global<2 x f32> -> f32

// -----

// CHECK: indices are i32 or i64
%x, %i = "test.op"() : () -> (!tile.global<1 x f32>, f32)
%v = tile.gather %x[%i : f32] : !tile.global<1 x f32> -> f32

// -----

// CHECK: result f16 does not match !tile.global<1 x f32>
%x, %i = "test.op"() : () -> (!tile.global<1 x f32>, i32)
%v = tile.gather %x[%i : i32] : !tile.global<1 x f32> -> f16

// -----

// CHECK: !tile.global<2 x f32> needs 2 indices, got 1
%x, %i, %t = "test.op"() : () -> (!tile.global<2 x f32>, i32, tensor<4xf32>)
tile.scatter_add %t, %x[%i] axes [[]] : tensor<4xf32>, !tile.global<2 x f32>, i32

// -----

// CHECK: axes has 2 entries for 1 operands
%x, %i, %t = "test.op"() : () -> (!tile.global<1 x f32>, i32, tensor<4xf32>)
tile.scatter_add %t, %x[%i] axes [[], []] : tensor<4xf32>, !tile.global<1 x f32>, i32

// -----

// CHECK: operand 0: axes [1, 0] are not ascending axes of (4, 4)
%t = "test.op"() : () -> tensor<4x4xf32>
%r = tile.map (%t) axes [[1, 0]] : (tensor<4x4xf32>) -> tensor<4x4xf32> {
^bb0(%a: f32):
  tile.yield %a : f32
}

// -----

// CHECK: operand 0: tensor<8xf32> does not match axes [0] of shape (4, 8)
%t = "test.op"() : () -> tensor<8xf32>
%r = tile.map (%t) axes [[0]] : (tensor<8xf32>) -> tensor<4x8xf32> {
^bb0(%a: f32):
  tile.yield %a : f32
}

// -----

// CHECK: a map has at least one result
"tile.map"() <{axes = []}> ({
  "tile.yield"() : () -> ()
}) : () -> ()

// -----

// CHECK: all results of a map have the same shape
%r, %s = tile.map () axes [] : () -> (tensor<4xf32>, tensor<8xf32>) {
  %c = arith.constant 1.0 : f32
  tile.yield %c, %c : f32, f32
}

// -----

// CHECK: block arguments are
%t = "test.op"() : () -> tensor<4xf32>
%r = tile.map (%t) axes [[0]] : (tensor<4xf32>) -> tensor<4xf16> {
^bb0(%a: f16):
  tile.yield %a : f16
}

// -----

// CHECK: the region must end in tile.yield of the results' element types
%t = "test.op"() : () -> tensor<4xf32>
%r = tile.map (%t) axes [[0]] : (tensor<4xf32>) -> tensor<4xf16> {
^bb0(%a: f32):
  tile.yield %a : f32
}

// -----

// CHECK: a range is a rank 1 tile of i32, got tensor<4xi64>
%i = "test.op"() : () -> i32
%r = tile.range %i : tensor<4xi64>

// -----

// CHECK: shapes (4, 8) @ (4, 8) + (4, 8) do not fit
%a, %acc = "test.op"() : () -> (tensor<4x8xf16>, tensor<4x8xf32>)
%r = tile.dot %a, %a, %acc ieee : tensor<4x8xf16>, tensor<4x8xf16>, tensor<4x8xf32> -> tensor<4x8xf32>

// -----

// CHECK: operands differ in type
%a, %b, %acc = "test.op"() : () -> (tensor<4x4xf16>, tensor<4x4xbf16>, tensor<4x4xf32>)
%r = tile.dot %a, %b, %acc ieee : tensor<4x4xf16>, tensor<4x4xbf16>, tensor<4x4xf32> -> tensor<4x4xf32>

// -----

// CHECK: accumulator and result must be the same f32 tile, got tensor<4x4xf16>
%a = "test.op"() : () -> tensor<4x4xf16>
%r = tile.dot %a, %a, %a ieee : tensor<4x4xf16>, tensor<4x4xf16>, tensor<4x4xf16> -> tensor<4x4xf16>

// -----

// CHECK: axis 2 of tensor<4x8xf32>
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.reduce sum %t, 2 : tensor<4x8xf32> -> tensor<4xf32>

// -----

// CHECK: reducing axis 0 of tensor<4x8xf32> does not give tensor<4xf32>
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.reduce sum %t, 0 : tensor<4x8xf32> -> tensor<4xf32>

// -----

// CHECK: a scan keeps its type: tensor<4xf32> and tensor<8xf32>
%t = "test.op"() : () -> tensor<4xf32>
%r = tile.scan sum %t, 0 : tensor<4xf32> -> tensor<8xf32>

// -----

// CHECK: axis 1 of tensor<4xf32>
%t = "test.op"() : () -> tensor<4xf32>
%r = tile.scan sum %t, 1 : tensor<4xf32> -> tensor<4xf32>

// -----

// CHECK: tensor<4x8xf32> is not the transpose of tensor<4x8xf32>
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.transpose %t : tensor<4x8xf32> -> tensor<4x8xf32>

// -----

// CHECK: axis 2 of tensor<4x8xf32>
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.slice %t, 2, 0 : tensor<4x8xf32> -> tensor<4x4xf32>

// -----

// CHECK: [6, 10) is outside axis 1 of tensor<4x8xf32>
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.slice %t, 1, 6 : tensor<4x8xf32> -> tensor<4x4xf32>

// -----

// CHECK: tensor<2x4xf32> is not a slice of tensor<4x8xf32> along axis 1
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.slice %t, 1, 0 : tensor<4x8xf32> -> tensor<2x4xf32>

// -----

// CHECK: tensor<4xf32> cannot be joined along axis 0 to tensor<8x4xf32>
%t = "test.op"() : () -> tensor<4xf32>
%r = tile.concat %t axis 0 : tensor<4xf32> -> tensor<8x4xf32>

// -----

// CHECK: tensor<4x8xf32> cannot be joined along axis 0 to tensor<8x4xf32>
%t = "test.op"() : () -> tensor<4x8xf32>
%r = tile.concat %t axis 0 : tensor<4x8xf32> -> tensor<8x4xf32>

// -----

// CHECK: parts have 4 along axis 0, the result 8
%t = "test.op"() : () -> tensor<4x4xf32>
%r = tile.concat %t axis 0 : tensor<4x4xf32> -> tensor<8x4xf32>
