// The device, emulated: the same names as in ../include/attn_device.h, on fibers of the CPU.
#pragma once
#include <attn_fibers.h>
#include <attn_checks.h>

#define ATTN_DEVICE inline
#define ATTN_BOTH inline
#define ATTN_SHARED static __attribute__((section("attn_lds")))
#define ATTN_KERNEL(threads)
#define ATTN_INLINE
#define ATTN_UNROLL
#define ATTN_ROLLED

namespace attn {

struct Dim3 {
  unsigned x, y, z;
};

template <class T, int N>
using VectorOf = T __attribute__((ext_vector_type(N)));
using half4 = VectorOf<_Float16, 4>;
using short4 = VectorOf<short, 4>;
using half8 = VectorOf<_Float16, 8>;
using short8 = VectorOf<short, 8>;
using float4 = VectorOf<float, 4>;
using float16 = VectorOf<float, 16>;

constexpr int WAVE = emulation::WAVE_LANES;

ATTN_DEVICE int thread() { return emulation::here().current; }
ATTN_DEVICE int lane() { return thread() % WAVE; }
ATTN_DEVICE int wave() { return thread() / WAVE; }

template <int AXIS>
ATTN_DEVICE int program() {
  return emulation::here().id[AXIS];
}

ATTN_DEVICE void barrier() { emulation::here().wait(emulation::State::at_barrier, "a barrier"); }

template <class T>
ATTN_DEVICE T opaque(T x) {
  return x;
}

ATTN_DEVICE void expect(bool holds, const char *otherwise) {
  if (!holds) emulation::here().fail(otherwise);
}

ATTN_DEVICE float exp2(float x) { return ::exp2f(x); }
ATTN_DEVICE float log2(float x) { return ::log2f(x); }
ATTN_DEVICE float rsqrt(float x) { return 1.0f / ::sqrtf(x); }
ATTN_DEVICE float sin_turns(float x) { return float(::sin(x * 6.283185307179586)); }
ATTN_DEVICE float cos_turns(float x) { return float(::cos(x * 6.283185307179586)); }
ATTN_DEVICE float sqrt(float x) { return ::sqrtf(x); }

ATTN_DEVICE void atomic_add(float *to, float value) { *to += value; }

namespace detail {

// The lane that a step of exchange reads, as the instructions on the device choose it.
template <int STEP>
constexpr int partner(int lane) {
  if (STEP == 4) return lane / 8 * 8 + 7 - lane % 8;
  if (STEP == 8) return lane / 16 * 16 + 15 - lane % 16;
  return lane ^ STEP;
}

template <class T>
T offered(const char *bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

struct Number {
  float operator()(_Float16 value) const { return value; }
  float operator()(float value) const { return value; }
  float operator()(short bits) const { return __builtin_bit_cast(float, unsigned(static_cast<unsigned short>(bits)) << 16); }
};
template <class T>
struct NumberOf {
  float operator()(unsigned char bits) const { return float(__builtin_bit_cast(T, bits)); }
};

}  // namespace detail

template <int STEP, class T>
ATTN_DEVICE T exchange(T value) {
  static_assert(sizeof(T) % 4 == 0, "lanes exchange words of 32 bits");
  return emulation::meet("an exchange of lanes", value, 0, [](const emulation::Slot *wave) {
    return detail::offered<T>(wave[detail::partner<STEP>(lane())].a);
  });
}

template <int STEP, bool REVERSE>
ATTN_DEVICE float shifted(float value, float none) {
  return emulation::meet("a shift of lanes", value, 0, [none](const emulation::Slot *wave) {
    const int from = lane() % 16 + (REVERSE ? STEP : -STEP);
    return from < 0 || from > 15 ? none : detail::offered<float>(wave[lane() / 16 * 16 + from].a);
  });
}

ATTN_DEVICE float take(float value, int lane) {
  return emulation::meet("a lane's value", value, 0, [lane](const emulation::Slot *wave) {
    return detail::offered<float>(wave[lane % WAVE].a);
  });
}

// Element r of a lane: row 8 * (r / 4) + 4 * (lane / 32) + r % 4 of column lane % 32 where M is 32, row
// 4 * (lane / 16) + r of column lane % 16 where it is 16. Of a and b a lane holds K * M / 64 neighbours along k of row
// and column lane % M: as the widest instructions have it. Where the device runs several narrower ones, k is in another
// order, the same for both.
template <int M, int N, int K>
struct Mfma {
  template <class NUMBER = detail::Number, class V, class C>
  static C run(V a, V b, C c) {
    constexpr int held = M * K / WAVE;
    return emulation::meet("a matrix instruction", a, b, [c](const emulation::Slot *wave) mutable {
      for (int r = 0; r < M * N / WAVE; ++r) {
        const int row = M == 32 ? 8 * (r / 4) + 4 * (lane() / 32) + r % 4 : 4 * (lane() / 16) + r;
        float sum = c[r];
        for (int k = 0; k < K; ++k) {
          const V left = detail::offered<V>(wave[k / held * M + row].a);
          const V right = detail::offered<V>(wave[k / held * N + lane() % N].b);
          sum += NUMBER()(left[k % held]) * NUMBER()(right[k % held]);
        }
        c[r] = sum;
      }
      return c;
    });
  }
};

// Both kinds, as if a device had instructions for either.
template <int BIAS>
constexpr bool multiplies_e4m3 = true;
template <class T, int M, int N, int K, class V, class C>
C mfma_e4m3(V a, V b, C c) {
  return Mfma<M, N, K>::template run<detail::NumberOf<T>>(a, b, c);
}

template <class... P, class... A>
int launch(void (*kernel)(P...), Dim3 grid, int threads, void *, A... arguments) {
  const char *seed = std::getenv("ATTN_EMULATION_SEED");
  emulation::Program program(threads, seed ? std::atoi(seed) : 1);
  auto body = [&] { kernel(arguments...); };
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        program.id[0] = x, program.id[1] = y, program.id[2] = z;
        if (program.run(body)) continue;
        emulation::last_error() = program.error;
        return 1;
      }
  return 0;
}
inline int allocate(void **memory, unsigned long bytes, void *) { return (*memory = std::malloc(bytes)) ? 0 : 2; }
inline int release(void *memory, void *) { return std::free(memory), 0; }

}  // namespace attn
