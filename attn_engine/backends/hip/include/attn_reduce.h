// Reductions of a fragment along one axis: over a lane's own elements, then over lanes, then over waves.
#pragma once

namespace attn {

// A NaN is noted beside the running value, two elements at a time, and put back at the end of a lane's own elements.
struct Max {
  template <class T>
  ATTN_DEVICE static T pick(T a, T b) {
    return max_of(a, b);
  }
  ATTN_DEVICE static float pick(float a, float b) { return __builtin_fmaxf(a, b); }
  ATTN_DEVICE static float combine(float a, float b) { return maximum(a, b); }
  template <class T>
  ATTN_DEVICE static T combine(T a, T b) {
    return max_of(a, b);
  }
  ATTN_DEVICE static float none() { return -__builtin_inff(); }
  static constexpr bool drops_nan = true;
};
struct Min {
  template <class T>
  ATTN_DEVICE static T pick(T a, T b) {
    return min_of(a, b);
  }
  ATTN_DEVICE static float pick(float a, float b) { return __builtin_fminf(a, b); }
  ATTN_DEVICE static float combine(float a, float b) { return minimum(a, b); }
  template <class T>
  ATTN_DEVICE static T combine(T a, T b) {
    return min_of(a, b);
  }
  ATTN_DEVICE static float none() { return __builtin_inff(); }
  static constexpr bool drops_nan = true;
};
struct Sum {
  template <class T>
  ATTN_DEVICE static T pick(T a, T b) {
    return a + b;
  }
  template <class T>
  ATTN_DEVICE static T combine(T a, T b) {
    return a + b;
  }
  ATTN_DEVICE static float none() { return 0.0f; }
  static constexpr bool drops_nan = false;
};

namespace detail {

// Over N elements get(0) ... get(N - 1) of this lane.
template <class OP, int N, class G>
ATTN_DEVICE auto fold(G get) {
  auto result = get(0);
  if constexpr (OP::drops_nan && __is_same(decltype(result), float)) {
    bool odd = unordered(result, result);
    ATTN_UNROLL for (int i = 1; i < N; i += 2) {
      const float next = get(i), after = get(i + 1 < N ? i + 1 : i);
      odd |= unordered(next, after);
      result = OP::pick(OP::pick(result, next), after);
    }
    return odd ? __builtin_nanf("") : result;
  } else {
    ATTN_UNROLL for (int i = 1; i < N; ++i) result = OP::pick(result, get(i));
    return result;
  }
}

template <class OP, int STEP, int END, class T>
ATTN_DEVICE T over_lanes(T value) {
  if constexpr (STEP < END) return over_lanes<OP, STEP * 2, END>(OP::combine(value, exchange<STEP>(value)));
  else return value;
}

}  // namespace detail

// LDS for a reduction along an axis that waves share; one element where none is needed.
template <class T, int N, int WAVES>
struct Scratch {
  T data[WAVES > 1 ? N * WAVES : 1];
};

// Each wave's result goes through LDS: waves in a row along the axis combine in one order, so that all get the same.
template <class OP, int AXIS, class L, class V, class T, int N, int WAVES>
ATTN_DEVICE void over_waves(V &result, Scratch<T, N, WAVES> &scratch) {
  const auto at = result.place();
  barrier();
  ATTN_UNROLL for (int i = 0; i < V::count; ++i) scratch.data[L::wave_place(AXIS) * N + at.index(0, i)] = result.get(i);
  barrier();
  ATTN_UNROLL for (int i = 0; i < V::count; ++i) {
    T value = scratch.data[at.index(0, i)];
    for (int w = 1; w < WAVES; ++w) value = OP::combine(value, scratch.data[w * N + at.index(0, i)]);
    result.set(i, value);
  }
}

template <class OP, int AXIS, class T, int H, int W, class L, int N, int REMOVED, class R, int WAVES>
ATTN_DEVICE void reduce(const Fragment<T, H, W, L> &from, Vector<T, N, REMOVED, R> &to, Scratch<T, N, WAVES> &scratch) {
  using F = Fragment<T, H, W, L>;
  static_assert(WAVES == L::split(AXIS), "scratch for another number of waves");
  ATTN_UNROLL for (int i = 0; i < to.count; ++i) {
    if constexpr (AXIS == L::lane_axis) {
      const T own = detail::fold<OP, F::count / F::line>([&](int j) ATTN_INLINE { return from.get(j * F::line + i); });
      to.set(i, detail::over_lanes<OP, 1, L::across>(own));
    } else {
      const T own = detail::fold<OP, F::line>([&](int j) ATTN_INLINE { return from.get(i * F::line + j); });
      to.set(i, detail::over_lanes<OP, L::across, WAVE>(own));
    }
  }
  if constexpr (WAVES > 1) over_waves<OP, AXIS, L>(to, scratch);
}

// A vector to a number, the same for all threads: over a lane's own elements, the lanes that hold others, the waves.
template <class OP, class T, int N, int REMOVED, class L, int WAVES>
ATTN_DEVICE T total(const Vector<T, N, REMOVED, L> &from, Scratch<T, 1, WAVES> &scratch) {
  using V = Vector<T, N, REMOVED, L>;
  static_assert(WAVES == L::split(V::kept), "scratch for another number of waves");
  const T own = detail::fold<OP, V::count>([&](int i) ATTN_INLINE { return from.get(i); });
  T result = detail::over_lanes<OP, V::on_lanes ? 1 : L::across, V::on_lanes ? L::across : WAVE>(own);
  if constexpr (WAVES > 1) {
    barrier();
    scratch.data[L::wave_place(V::kept)] = result;
    barrier();
    result = scratch.data[0];
    for (int w = 1; w < WAVES; ++w) result = OP::combine(result, scratch.data[w]);
  }
  return result;
}

}  // namespace attn
