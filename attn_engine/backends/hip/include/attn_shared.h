// Tiles in LDS, padded or swizzled, and copies between them and fragments.
#pragma once

namespace attn {

// Rows of W elements, each followed by E unused ones.
template <int E>
struct Padded {
  template <int W>
  static constexpr int pitch = W + E;
  template <int W>
  ATTN_DEVICE static int place(int row, int column) {
    return row * pitch<W> + column;
  }
  template <int W>
  static constexpr int vector = pitch<W>;
};

// Column c of row r lies at ((c / V) ^ (r / P % PHASES)) * V + c % V.
template <int V, int P, int PHASES>
struct Swizzled {
  template <int W>
  static constexpr int pitch = W;
  template <int W>
  ATTN_DEVICE static int place(int row, int column) {
    static_assert(W % (V * PHASES) == 0, "a swizzle stays within its row");
    return row * W + (column / V ^ row / P % PHASES) * V + column % V;
  }
  template <int W>
  static constexpr int vector = V;
};

template <class T, int H, int W, class PLACE = Padded<0>>
struct Shared {
  using Element = T;
  static constexpr int rank = H == 1 ? 1 : 2;
  static constexpr int contiguous_axis = 1;
  static constexpr int size(int axis) { return axis == 0 ? H : W; }
  using Held = typename detail::Stored<T>::type;

  alignas(16) Held data[H * PLACE::template pitch<W>];

  ATTN_DEVICE static int place(int row, int column) {
    expect(row >= 0 && row < H && column >= 0 && column < W, "an index outside of a tile in LDS");
    return PLACE::template place<W>(row, column);
  }
  ATTN_DEVICE T get(int row, int column) const { return load_lane<T>(data[place(row, column)]); }
  ATTN_DEVICE void set(int row, int column, T value) { data[place(row, column)] = store_lane(value); }

  // How many neighbours of a row, from a multiple of N on, lie together and aligned: N or 1.
  template <int N>
  static constexpr bool together = PLACE::template vector<W> % N == 0 && PLACE::template pitch<W> % N == 0 && W % N == 0;

  // N elements from (row, column) on along AXIS.
  template <int AXIS, int N>
  ATTN_DEVICE Vec<T, N> read(int row, int column) const {
    if constexpr (AXIS == 1 && together<N>) return *reinterpret_cast<const Vec<T, N> *>(&data[place(row, column)]);
    Vec<T, N> values;
    ATTN_UNROLL for (int e = 0; e < N; ++e)
        values[e] = data[AXIS == 0 ? place(row + e, column) : place(row, column + e)];
    return values;
  }
  template <int AXIS, int N>
  ATTN_DEVICE void write(int row, int column, Vec<T, N> values) {
    if constexpr (AXIS == 1 && together<N>) {
      *reinterpret_cast<Vec<T, N> *>(&data[place(row, column)]) = values;
    } else {
      ATTN_UNROLL for (int e = 0; e < N; ++e)
          data[AXIS == 0 ? place(row + e, column) : place(row, column + e)] = values[e];
    }
  }
};

template <class T, int N>
using SharedVector = Shared<T, 1, N>;

// A tile read as its transpose.
template <class S>
struct Transposed {
  using Element = typename S::Element;
  const S &tile;
  template <int AXIS, int N>
  ATTN_DEVICE Vec<Element, N> read(int row, int column) const {
    return tile.template read<1 - AXIS, N>(column, row);
  }
};
template <class S>
ATTN_DEVICE Transposed<S> transposed(const S &tile) {
  return {tile};
}

template <int THREADS, class T, int H, int W, class PLACE>
ATTN_DEVICE void fill(Shared<T, H, W, PLACE> &target, T value) {
  for (int i = thread(); i < H * W; i += THREADS) target.set(i / W, i % W, value);
}

// Fragment to LDS: each lane writes what it holds.
template <int THREADS, class T, int H, int W, class L, class PLACE>
ATTN_DEVICE void copy(const Fragment<T, H, W, L> &from, Shared<T, H, W, PLACE> &to) {
  using F = Fragment<T, H, W, L>;
  if (!F::owner()) return;
  const auto at = F::place();
  ATTN_UNROLL for (int i = 0; i < F::count; i += L::run)
      to.template write<1 - L::lane_axis, L::run>(at.index(0, i), at.index(1, i), from.template get_run<L::run>(i));
}
template <int THREADS, class T, int H, int W, class L, class PLACE>
ATTN_DEVICE void copy(const Shared<T, H, W, PLACE> &from, Fragment<T, H, W, L> &to) {
  const auto at = to.place();
  ATTN_UNROLL for (int i = 0; i < to.count; i += L::run)
      to.template set_run<L::run>(i, from.template read<1 - L::lane_axis, L::run>(at.index(0, i), at.index(1, i)));
}
template <int THREADS, class T, int N, int REMOVED, class L>
ATTN_DEVICE void copy(const Vector<T, N, REMOVED, L> &from, SharedVector<T, N> &to) {
  if (!from.owner()) return;
  const auto at = from.place();
  ATTN_UNROLL for (int i = 0; i < from.count; ++i) to.set(0, at.index(0, i), from.get(i));
}
template <int THREADS, class T, int N, int REMOVED, class L>
ATTN_DEVICE void copy(const SharedVector<T, N> &from, Vector<T, N, REMOVED, L> &to) {
  const auto at = to.place();
  ATTN_UNROLL for (int i = 0; i < to.count; ++i) to.set(i, from.get(0, at.index(0, i)));
}
template <int THREADS, class T, int H, int W, class A, class B>
ATTN_DEVICE void copy(const Shared<T, H, W, A> &from, Shared<T, H, W, B> &to) {
  for (int i = thread(); i < H * W; i += THREADS) to.set(i / W, i % W, from.get(i / W, i % W));
}

// Fragments that are held alike, of one type or not.
template <int THREADS, class T, int H, int W, class L, class R>
ATTN_DEVICE void copy(const Fragment<T, H, W, L> &from, Fragment<T, H, W, R> &to) {
  ATTN_UNROLL for (int i = 0; i < from.count; ++i) to.set(i, from.get(i));
}
template <int THREADS, class T, int N, int A, class L, int B, class R>
ATTN_DEVICE void copy(const Vector<T, N, A, L> &from, Vector<T, N, B, R> &to) {
  ATTN_UNROLL for (int i = 0; i < from.count; ++i) to.set(i, from.get(i));
}

}  // namespace attn
