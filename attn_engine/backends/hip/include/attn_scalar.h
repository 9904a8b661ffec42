// Scalars: the element types, how they are stored in vectors, casts, and functions that C++ spells otherwise.
#pragma once

namespace attn {

using half = _Float16;

// Rounded to nearest even; computing is done in float.
struct bfloat {
  unsigned short bits;

  bfloat() = default;
  ATTN_BOTH explicit bfloat(float value) {
    const unsigned whole = __builtin_bit_cast(unsigned, value);
    const unsigned rounded = (whole + 0x7FFFu + (whole >> 16 & 1)) >> 16;
    bits = static_cast<unsigned short>(value != value ? whole >> 16 | 0x40 : rounded);
  }
  ATTN_BOTH explicit operator float() const { return __builtin_bit_cast(float, unsigned(bits) << 16); }
};

namespace detail {

template <class T>
struct Stored {
  using type = T;
};
template <>
struct Stored<bfloat> {
  using type = short;
};
template <>
struct Stored<bool> {
  using type = unsigned char;
};

}  // namespace detail

// N elements in a register vector; a bfloat is held as its bits.
template <class T, int N>
using Vec = VectorOf<typename detail::Stored<T>::type, N>;

template <class T>
ATTN_BOTH T load_lane(typename detail::Stored<T>::type held) {
  return __builtin_bit_cast(T, held);
}
template <class T>
ATTN_BOTH typename detail::Stored<T>::type store_lane(T value) {
  return __builtin_bit_cast(typename detail::Stored<T>::type, value);
}

// Between float and the narrow types, integers and floats. From bool, true is 1.
template <class To, class From>
ATTN_BOTH To to(From value) {
  return static_cast<To>(value);
}
template <class To, class From>
ATTN_BOTH To bits(From value) {
  static_assert(sizeof(To) == sizeof(From));
  return __builtin_bit_cast(To, value);
}

template <class T>
ATTN_BOTH T min_of(T a, T b) {
  return b < a ? b : a;
}
template <class T>
ATTN_BOTH T max_of(T a, T b) {
  return a < b ? b : a;
}
template <class T>
ATTN_BOTH T floor_div(T a, T b) {
  const T quotient = a / b;
  return quotient * b != a && (a < 0) != (b < 0) ? quotient - 1 : quotient;
}
template <class T>
ATTN_BOTH T ceil_div(T a, T b) {
  const T quotient = a / b;
  return quotient * b != a && (a < 0) == (b < 0) ? quotient + 1 : quotient;
}
template <class T>
ATTN_BOTH T abs_of(T a) {
  return a < 0 ? -a : a;
}

ATTN_BOTH bool unordered(float a, float b) { return __builtin_isunordered(a, b); }
// A NaN on either side gives NaN.
ATTN_DEVICE float maximum(float a, float b) { return unordered(a, b) ? __builtin_nanf("") : __builtin_fmaxf(a, b); }
ATTN_DEVICE float minimum(float a, float b) { return unordered(a, b) ? __builtin_nanf("") : __builtin_fminf(a, b); }

ATTN_DEVICE float exp(float x) { return attn::exp2(x * 1.4426950408889634f); }
ATTN_DEVICE float log(float x) { return attn::log2(x) * 0.6931471805599453f; }

namespace detail {

// x in turns, the whole turns taken off first in three parts so that large angles keep their precision.
ATTN_DEVICE float turns(float x) {
  const float whole = __builtin_rintf(x * 0.15915494309189535f);
  float rest = __builtin_fmaf(-whole, 6.28125f, x);
  rest = __builtin_fmaf(-whole, 0.0019350051879882812f, rest);
  rest = __builtin_fmaf(-whole, 3.019916050e-07f, rest);
  return rest * 0.15915494309189535f;
}

}  // namespace detail

ATTN_DEVICE float sin(float x) { return sin_turns(detail::turns(x)); }
ATTN_DEVICE float cos(float x) { return cos_turns(detail::turns(x)); }

}  // namespace attn
