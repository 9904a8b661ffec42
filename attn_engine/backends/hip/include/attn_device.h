// The device: address spaces, threads, barriers, lanes, matrix instructions, and how the host launches. No ROCm header
// is needed, and none is in the way; the host side is four functions of libamdhip64.
#pragma once

#define ATTN_DEVICE __attribute__((device, always_inline)) inline
#define ATTN_BOTH __attribute__((host, device, always_inline)) inline
#define ATTN_SHARED __attribute__((shared))
#define ATTN_KERNEL(threads) __attribute__((global, amdgpu_flat_work_group_size(threads, threads)))
#define ATTN_INLINE __attribute__((always_inline))
#define ATTN_UNROLL _Pragma("unroll")
#define ATTN_ROLLED _Pragma("clang loop unroll(disable)")

namespace attn {

struct Dim3 {
  unsigned x, y, z;
};

// Functions of libamdhip64, under names that HIP's own headers do not have.
namespace runtime {

int launch(const void *kernel, Dim3 grid, Dim3 threads, void **arguments, unsigned long shared, void *stream)
    __asm__("hipLaunchKernel");
int allocate(void **memory, unsigned long bytes, void *stream) __asm__("hipMallocAsync");
int release(void *memory, void *stream) __asm__("hipFreeAsync");

}  // namespace runtime

}  // namespace attn

// The compiler makes calls of these; a file that includes HIP's headers before has them from there.
#ifndef HIP_INCLUDE_HIP_HIP_RUNTIME_API_H
extern "C" {
int hipLaunchKernel(const void *kernel, attn::Dim3 grid, attn::Dim3 threads, void **arguments, unsigned long shared,
                    void *stream);
int __hipPopCallConfiguration(attn::Dim3 *grid, attn::Dim3 *threads, unsigned long *shared, void **stream);
}
#endif

namespace attn {

template <class T, int N>
using VectorOf = T __attribute__((ext_vector_type(N)));
using half4 = VectorOf<_Float16, 4>;
using short4 = VectorOf<short, 4>;
using half8 = VectorOf<_Float16, 8>;
using short8 = VectorOf<short, 8>;
using brain8 = VectorOf<__bf16, 8>;
using float4 = VectorOf<float, 4>;
using float16 = VectorOf<float, 16>;

constexpr int WAVE = 64;

ATTN_DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
ATTN_DEVICE int lane() { return thread() % WAVE; }
ATTN_DEVICE int wave() { return __builtin_amdgcn_readfirstlane(thread() / WAVE); }

template <int AXIS>
ATTN_DEVICE int program() {
  if constexpr (AXIS == 0) return __builtin_amdgcn_workgroup_id_x();
  else if constexpr (AXIS == 1) return __builtin_amdgcn_workgroup_id_y();
  else return __builtin_amdgcn_workgroup_id_z();
}

// Waits for all threads of the program; what they wrote to LDS is seen after it.
ATTN_DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// The same number, of which the compiler knows nothing: what is computed from it in a loop stays there, and takes no
// register outside.
template <class T>
ATTN_DEVICE T opaque(T x) {
  asm volatile("" : "+v"(x));
  return x;
}

// Checked where kernels are emulated only.
ATTN_DEVICE void expect(bool, const char *) {}

ATTN_DEVICE float exp2(float x) { return __builtin_amdgcn_exp2f(x); }
ATTN_DEVICE float log2(float x) { return __builtin_amdgcn_logf(x); }
ATTN_DEVICE float rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }
// Of an angle in turns.
ATTN_DEVICE float sin_turns(float x) { return __builtin_amdgcn_sinf(x); }
ATTN_DEVICE float cos_turns(float x) { return __builtin_amdgcn_cosf(x); }
ATTN_DEVICE float sqrt(float x) { return __builtin_sqrtf(x); }

ATTN_DEVICE void atomic_add(float *to, float value) {
  __hip_atomic_fetch_add(to, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

namespace detail {

template <int CONTROL>
ATTN_DEVICE int dpp(int value) {
  return __builtin_amdgcn_update_dpp(0, value, CONTROL, 0xf, 0xf, true);
}

template <int STEP>
ATTN_DEVICE int exchange_bits(int value) {
  if constexpr (STEP == 1) return dpp<0xB1>(value);                                    // quad_perm:[1,0,3,2]
  else if constexpr (STEP == 2) return dpp<0x4E>(value);                               // quad_perm:[2,3,0,1]
  else if constexpr (STEP == 4) return dpp<0x141>(value);                              // row_half_mirror
  else if constexpr (STEP == 8) return dpp<0x140>(value);                              // row_mirror
  else if constexpr (STEP == 16) return __builtin_amdgcn_ds_swizzle(value, 0x401F);    // lane ^ 16
  else return __builtin_amdgcn_ds_bpermute((lane() ^ 32) * 4, value);
}

}  // namespace detail

// The value of a lane in the other half of this lane's group of 2 * STEP. For steps of 4 and 8 it is a mirrored lane,
// so that groups of STEP lanes must already agree.
template <int STEP, class T>
ATTN_DEVICE T exchange(T value) {
  constexpr int words = sizeof(T) / 4;
  static_assert(words * 4 == sizeof(T), "lanes exchange words of 32 bits");
  auto bits = __builtin_bit_cast(VectorOf<int, words>, value);
  ATTN_UNROLL for (int w = 0; w < words; ++w) bits[w] = detail::exchange_bits<STEP>(bits[w]);
  return __builtin_bit_cast(T, bits);
}

// The value of the lane STEP before (REVERSE: after) this one in its row of 16; `none` where there is no such lane.
template <int STEP, bool REVERSE>
ATTN_DEVICE float shifted(float value, float none) {
  constexpr int row_shl = 0x100, row_shr = 0x110;
  return __builtin_bit_cast(
      float, __builtin_amdgcn_update_dpp(__builtin_bit_cast(int, none), __builtin_bit_cast(int, value),
                                         (REVERSE ? row_shl : row_shr) + STEP, 0xf, 0xf, false));
}

// The value of some lane of the wave.
ATTN_DEVICE float take(float value, int lane) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute(lane * 4, __builtin_bit_cast(int, value)));
}

// Matrix products: result[row, column] += sum over k of a[row, k] * b[k, column], shared by the lanes of a wave. A
// product that is deeper than the device's instruction is several of them. Which k an instruction pairs does not
// matter, as long as both operands are held alike.
template <int M, int N, int K>
struct Mfma;

template <>
struct Mfma<32, 32, 8> {
  ATTN_DEVICE static float16 run(half4 a, half4 b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x8f16(a, b, c, 0, 0, 0);
  }
  ATTN_DEVICE static float16 run(short4 a, short4 b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(a, b, c, 0, 0, 0);
  }
  ATTN_DEVICE static float16 run(float4 a, float4 b, float16 c) {
    ATTN_UNROLL for (int i = 0; i < 4; ++i) c = __builtin_amdgcn_mfma_f32_32x32x2f32(a[i], b[i], c, 0, 0, 0);
    return c;
  }
};

template <>
struct Mfma<16, 16, 16> {
  ATTN_DEVICE static float4 run(half4 a, half4 b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x16f16(a, b, c, 0, 0, 0);
  }
  ATTN_DEVICE static float4 run(short4 a, short4 b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
  }
  ATTN_DEVICE static float4 run(float4 a, float4 b, float4 c) {
    ATTN_UNROLL for (int i = 0; i < 4; ++i) c = __builtin_amdgcn_mfma_f32_16x16x4f32(a[i], b[i], c, 0, 0, 0);
    return c;
  }
};

template <>
struct Mfma<32, 32, 2> {
  ATTN_DEVICE static float16 run(VectorOf<float, 1> a, VectorOf<float, 1> b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x2f32(a[0], b[0], c, 0, 0, 0);
  }
};

template <>
struct Mfma<16, 16, 4> {
  ATTN_DEVICE static float4 run(VectorOf<float, 1> a, VectorOf<float, 1> b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x4f32(a[0], b[0], c, 0, 0, 0);
  }
};

#if defined(__gfx950__)
template <>
struct Mfma<32, 32, 16> {
  ATTN_DEVICE static float16 run(half8 a, half8 b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x16_f16(a, b, c, 0, 0, 0);
  }
  ATTN_DEVICE static float16 run(short8 a, short8 b, float16 c) {
    return __builtin_amdgcn_mfma_f32_32x32x16_bf16(
        __builtin_bit_cast(brain8, a), __builtin_bit_cast(brain8, b), c, 0, 0, 0);
  }
};

template <>
struct Mfma<16, 16, 32> {
  ATTN_DEVICE static float4 run(half8 a, half8 b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(a, b, c, 0, 0, 0);
  }
  ATTN_DEVICE static float4 run(short8 a, short8 b, float4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(
        __builtin_bit_cast(brain8, a), __builtin_bit_cast(brain8, b), c, 0, 0, 0);
  }
};
#else
template <int M, int N, int K>
struct Twice {
  template <class V, class C>
  ATTN_DEVICE static C run(V a, V b, C c) {
    return Mfma<M, N, K>::run(a.hi, b.hi, Mfma<M, N, K>::run(a.lo, b.lo, c));
  }
};
template <>
struct Mfma<32, 32, 16> : Twice<32, 32, 8> {};
template <>
struct Mfma<16, 16, 32> : Twice<16, 16, 16> {};
#endif

// Products of e4m3 with a bias, eight of each operand in a lane: which one the device's instructions read.
#if defined(__gfx950__)
template <int BIAS>
constexpr bool multiplies_e4m3 = BIAS == 7;
#elif defined(__gfx942__)
template <int BIAS>
constexpr bool multiplies_e4m3 = BIAS == 8;
#else
template <int BIAS>
constexpr bool multiplies_e4m3 = false;
#endif

template <class T, int M, int N, int K, class V, class C>
ATTN_DEVICE C mfma_e4m3(V a, V b, C c) {
  static_assert((M == 32 && K == 16) || (M == 16 && K == 32), "no such instruction");
  const long left = __builtin_bit_cast(long, a), right = __builtin_bit_cast(long, b);
  if constexpr (M == 32) return __builtin_amdgcn_mfma_f32_32x32x16_fp8_fp8(left, right, c, 0, 0, 0);
  else return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(left, right, c, 0, 0, 0);
}

// The host side. 0 is success, anything else an error of the HIP runtime.
template <class... P, class... A>
int launch(void (*kernel)(P...), Dim3 grid, int threads, void *stream, A... arguments) {
  void *pointers[] = {static_cast<void *>(&arguments)...};
  return runtime::launch(reinterpret_cast<const void *>(kernel), grid, {unsigned(threads), 1, 1}, pointers, 0, stream);
}
inline int allocate(void **memory, unsigned long bytes, void *stream) { return runtime::allocate(memory, bytes, stream); }
inline int release(void *memory, void *stream) { return runtime::release(memory, stream); }

}  // namespace attn
