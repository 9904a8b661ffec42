// Floats of 8 bits with 3 bits of mantissa: e4m3 (bias 7, NaN is all ones, up to 448) as gfx950 multiplies it, and
// e4m3fnuz (bias 8, NaN is -0, up to 240) as gfx942 does. Elsewhere products go through half, which holds both exactly.
#pragma once

namespace attn {

template <int BIAS>
struct E4m3 {
  static constexpr bool fnuz = BIAS == 8;
  static constexpr unsigned nan = fnuz ? 0x80 : 0x7F, largest = fnuz ? 0x7F : 0x7E;

  unsigned char bits;

  E4m3() = default;
  // Rounded to nearest even. What is larger than the largest becomes that for e4m3, NaN for e4m3fnuz, as torch has it.
  ATTN_BOTH explicit E4m3(float value) {
    const unsigned whole = __builtin_bit_cast(unsigned, value), sign = whole >> 24 & 0x80;
    const float size = __builtin_fabsf(value);
    constexpr float normal = BIAS == 8 ? 0x1p-7f : 0x1p-6f, steps = BIAS == 8 ? 0x1p10f : 0x1p9f;
    unsigned magnitude = 0;
    if (size < normal) {
      magnitude = static_cast<unsigned>(__builtin_rintf(size * steps));
    } else {
      const unsigned positive = whole & 0x7FFFFFFF;
      magnitude = ((positive + 0x7FFFF + (positive >> 20 & 1)) >> 20) - ((127 - BIAS) << 3);
    }
    if (magnitude > largest) magnitude = fnuz ? nan : largest;
    if (value != value) magnitude = nan;
    bits = static_cast<unsigned char>(fnuz && (magnitude == 0 || magnitude == nan) ? magnitude : sign | magnitude);
  }
  ATTN_BOTH explicit operator float() const {
    const unsigned magnitude = bits & 0x7F, sign = unsigned(bits & 0x80) << 24;
    if (fnuz ? bits == nan : magnitude == nan) return __builtin_nanf("");
    constexpr float step = BIAS == 8 ? 0x1p-10f : 0x1p-9f;
    const float size = magnitude < 8 ? float(magnitude) * step
                                     : __builtin_bit_cast(float, (magnitude << 20) + (unsigned(127 - BIAS) << 23));
    return __builtin_bit_cast(float, __builtin_bit_cast(unsigned, size) | sign);
  }
  ATTN_BOTH explicit operator half() const { return half(float(*this)); }
};
using fp8 = E4m3<7>;
using fp8_fnuz = E4m3<8>;

namespace detail {

template <int BIAS>
struct Stored<E4m3<BIAS>> {
  using type = unsigned char;
};

// A matrix instruction on operands of type T, as they are stored.
template <class T, int M, int N, int K>
struct Product {
  template <class V, class C>
  ATTN_DEVICE static C run(V a, V b, C c) {
    return Mfma<M, N, K>::run(a, b, c);
  }
};
template <int BIAS, int M, int N, int K>
struct Product<E4m3<BIAS>, M, N, K> {
  static constexpr int held = M * K / WAVE;

  template <class C>
  ATTN_DEVICE static C run(VectorOf<unsigned char, held> a, VectorOf<unsigned char, held> b, C c) {
    if constexpr (multiplies_e4m3<BIAS>) return mfma_e4m3<E4m3<BIAS>, M, N, K>(a, b, c);
    else return Mfma<M, N, K>::run(widened(a), widened(b), c);
  }
  ATTN_DEVICE static VectorOf<half, held> widened(VectorOf<unsigned char, held> x) {
    VectorOf<half, held> y;
    ATTN_UNROLL for (int i = 0; i < held; ++i) y[i] = half(load_lane<E4m3<BIAS>>(x[i]));
    return y;
  }
};

}  // namespace detail

}  // namespace attn
