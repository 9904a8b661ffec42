// Kernels over tiles: fragments with compile-time layouts, tiles in LDS, matrix instructions, copies, reductions.
//
// attn_device.h is all that touches the device. A directory with another attn_device.h, put before this one on the
// include path, runs the same kernels elsewhere (see ../emulation).
#pragma once
#if __cplusplus < 201703L
#error "compile as C++17 (-std=c++17), which older hipcc do not do by themselves"
#endif
#include <attn_device.h>
#include <attn_tensor.h>

#include <attn_scalar.h>
#include <attn_fp8.h>
#include <attn_layout.h>
#include <attn_shared.h>
#include <attn_copy.h>
#include <attn_gemm.h>
#include <attn_reduce.h>
#include <attn_scan.h>
#include <attn_host.h>
