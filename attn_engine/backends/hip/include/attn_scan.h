// Running sums, maxima and minima of fragments along an axis: over a lane's own elements, the lanes, the waves.
#pragma once

namespace attn {

namespace detail {

// Over ACROSS neighbouring lanes, each lane's own value included.
template <class OP, bool REVERSE, int STEP, int ACROSS, class T>
ATTN_DEVICE T scan_lanes(T value) {
  if constexpr (STEP >= ACROSS) {
    return value;
  } else if constexpr (STEP < 16) {
    const T before = shifted<STEP, REVERSE>(value, OP::none());
    return scan_lanes<OP, REVERSE, STEP * 2, ACROSS>(OP::combine(value, before));
  } else {
    // Rows of 16 lanes are done: the later row lacks the end of the earlier one.
    const T end = take(value, lane() / 32 * 32 + (REVERSE ? 16 : 15));
    return (lane() % 32 >= 16) != REVERSE ? OP::combine(value, end) : value;
  }
}

// N numbers of this lane whose neighbours are in the next lanes; ACROSS lanes later comes the next number. The last sum
// is given back, in every lane.
template <class OP, bool REVERSE, int ACROSS, int N, class G, class S>
ATTN_DEVICE auto scan_across(G get, S set) {
  auto sum = OP::none();
  ATTN_UNROLL for (int step = 0; step < N; ++step) {
    const int i = REVERSE ? N - 1 - step : step;
    const auto value = OP::combine(scan_lanes<OP, REVERSE, 1, ACROSS>(get(i)), sum);
    set(i, value);
    sum = take(value, lane() / ACROSS * ACROSS + (REVERSE ? 0 : ACROSS - 1));
  }
  return sum;
}

// N numbers of this lane in runs of RUN neighbours; lanes that are ACROSS apart take turns with their runs. `sum` is that
// of the turns before TURN.
template <class OP, bool REVERSE, int ACROSS, int RUN, int N, int TURN = 0, class T, class G, class S>
ATTN_DEVICE T scan_along(T sum, G get, S set) {
  if constexpr (TURN == N / RUN) {
    return sum;
  } else {
    constexpr int first = (REVERSE ? N / RUN - 1 - TURN : TURN) * RUN;
    VectorOf<T, RUN> own;
    T total = OP::none(), before = sum, after = sum;
    ATTN_UNROLL for (int step = 0; step < RUN; ++step) {
      const int i = REVERSE ? RUN - 1 - step : step;
      own[i] = total = OP::combine(total, get(first + i));
    }
    ATTN_UNROLL for (int g = 0; g < WAVE / ACROSS; ++g) {
      const T part = take(total, g * ACROSS + lane() % ACROSS);
      before = (REVERSE ? g > lane() / ACROSS : g < lane() / ACROSS) ? OP::combine(before, part) : before;
      after = OP::combine(after, part);
    }
    ATTN_UNROLL for (int i = 0; i < RUN; ++i) set(first + i, OP::combine(own[i], before));
    return scan_along<OP, REVERSE, ACROSS, RUN, N, TURN + 1>(after, get, set);
  }
}

template <class OP, bool REVERSE, class L, bool ON_LANES, int N, class G, class S>
ATTN_DEVICE auto scan_line(G get, S set) {
  if constexpr (ON_LANES) return scan_across<OP, REVERSE, L::across, N>(get, set);
  else return scan_along<OP, REVERSE, L::across, L::run, N>(OP::none(), get, set);
}

// What the waves before this one have, along an axis that they share.
template <class OP, bool REVERSE, int WAVES, class T, int N>
ATTN_DEVICE T of_waves_before(const Scratch<T, N, WAVES> &scratch, int wave, int place) {
  T sum = OP::none();
  ATTN_UNROLL for (int w = 0; w < WAVES; ++w)
      if (REVERSE ? w > wave : w < wave) sum = OP::combine(sum, scratch.data[w * N + place]);
  return sum;
}

}  // namespace detail

// `to` may be `from`.
template <class OP, int AXIS, bool REVERSE, class T, int H, int W, class L, int N, int WAVES>
ATTN_DEVICE void scan(const Fragment<T, H, W, L> &from, Fragment<T, H, W, L> &to, Scratch<T, N, WAVES> &scratch) {
  using F = Fragment<T, H, W, L>;
  static_assert(WAVES == L::split(AXIS), "scratch for another number of waves");
  constexpr bool on_lanes = AXIS == L::lane_axis;
  constexpr int length = on_lanes ? F::count / F::line : F::line;
  const auto at = [](int i, int j) ATTN_INLINE { return on_lanes ? j * F::line + i : i * F::line + j; };
  Vector<T, F::size(1 - AXIS), AXIS, L> sums;
  ATTN_UNROLL for (int i = 0; i < sums.count; ++i)
      sums.set(i, detail::scan_line<OP, REVERSE, L, on_lanes, length>(
                      [&](int j) ATTN_INLINE { return from.get(at(i, j)); },
                      [&](int j, T value) ATTN_INLINE { to.set(at(i, j), value); }));
  if constexpr (WAVES > 1) {
    const int wave = L::wave_place(AXIS);
    const auto place = sums.place();
    barrier();
    ATTN_UNROLL for (int i = 0; i < sums.count; ++i) scratch.data[wave * N + place.index(0, i)] = sums.get(i);
    barrier();
    ATTN_UNROLL for (int i = 0; i < sums.count; ++i)
        sums.set(i, detail::of_waves_before<OP, REVERSE, WAVES>(scratch, wave, place.index(0, i)));
    ATTN_UNROLL for (int e = 0; e < F::count; ++e)
        to.set(e, OP::combine(to.get(e), sums.get(F::template slice<AXIS>(e))));
  }
}
template <class OP, int AXIS, bool REVERSE, class T, int N, int REMOVED, class L, int WAVES>
ATTN_DEVICE void scan(const Vector<T, N, REMOVED, L> &from, Vector<T, N, REMOVED, L> &to, Scratch<T, 1, WAVES> &scratch) {
  using V = Vector<T, N, REMOVED, L>;
  static_assert(WAVES == L::split(V::kept), "scratch for another number of waves");
  const T sum = detail::scan_line<OP, REVERSE, L, V::on_lanes, V::count>(
      [&](int j) ATTN_INLINE { return from.get(j); }, [&](int j, T value) ATTN_INLINE { to.set(j, value); });
  if constexpr (WAVES > 1) {
    const int wave = L::wave_place(V::kept);
    barrier();
    scratch.data[wave] = sum;
    barrier();
    const T before = detail::of_waves_before<OP, REVERSE, WAVES>(scratch, wave, 0);
    ATTN_UNROLL for (int j = 0; j < V::count; ++j) to.set(j, OP::combine(to.get(j), before));
  }
}

}  // namespace attn
