// RUN: attn-opt %s | attn-opt | filecheck %s

// Blocks of a tensor are read and written through descriptors; they drop the ones in front.
// CHECK-LABEL: tile.kernel @copy(%x: !tile.descriptor<1x1x64x32xbf16>, %y: !tile.descriptor<1x1x64x32xbf16>)
tile.kernel @copy(%x: !tile.descriptor<1x1x64x32xbf16>, %y: !tile.descriptor<1x1x64x32xbf16>) {
  %t = tile.program_id 0
  %c0 = arith.constant 0 : i32
  // CHECK: %b = tile.load_block %x[%c0, %c0, %t, %c0] : !tile.descriptor<1x1x64x32xbf16> -> tensor<64x32xbf16>
  %b = tile.load_block %x[%c0, %c0, %t, %c0] : !tile.descriptor<1x1x64x32xbf16> -> tensor<64x32xbf16>
  // CHECK: tile.store_block %b, %y[%c0, %c0, %t, %c0] : tensor<64x32xbf16>, !tile.descriptor<1x1x64x32xbf16>
  tile.store_block %b, %y[%c0, %c0, %t, %c0] : tensor<64x32xbf16>, !tile.descriptor<1x1x64x32xbf16>
  tile.end
}

// A tile that is set aside comes back in its shape; what is where in memory is the backend's own.
// CHECK-LABEL: tile.kernel @keep(%s: tensor<64x32xbf16>, %kept: !tile.global<3 x bf16>)
tile.kernel @keep(%s: tensor<64x32xbf16>, %kept: !tile.global<3 x bf16>) {
  %h = tile.program_id 0
  %c0 = arith.constant 0 : i32
  // CHECK: tile.set_aside %s, %kept[%h, %c0, %c0] : tensor<64x32xbf16>, !tile.global<3 x bf16>
  tile.set_aside %s, %kept[%h, %c0, %c0] : tensor<64x32xbf16>, !tile.global<3 x bf16>
  // CHECK: %back = tile.take_back %kept[%h, %c0, %c0] : !tile.global<3 x bf16> -> tensor<64x32xbf16>
  %back = tile.take_back %kept[%h, %c0, %c0] : !tile.global<3 x bf16> -> tensor<64x32xbf16>
  tile.end
}
