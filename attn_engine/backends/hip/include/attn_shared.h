// Tiles in LDS, padded or swizzled, and copies between them and fragments.
#pragma once

namespace attn {

// Rows of W elements, each followed by E unused ones. With a GROUP, runs of 4 change places in each group of that many
// columns, so that the two runs which a lane multiplies lie side by side: those of the first half, then of the second.
template <int E, int GROUP = 0>
struct Padded {
  static constexpr int group = GROUP;
  template <int W>
  static constexpr int pitch = W + E;
  template <int W>
  ATTN_DEVICE static int place(int row, int column) {
    if constexpr (GROUP > 0) {
      static_assert(W % GROUP == 0, "columns do not divide into groups");
      const int run = column % GROUP / 4, halves = GROUP / 8;
      column = column / GROUP * GROUP + (run % halves * 2 + run / halves) * 4 + column % 4;
    }
    return row * pitch<W> + column;
  }
  template <int W>
  static constexpr int vector = GROUP > 0 ? 4 : pitch<W>;
};

// Column c of row r lies at ((c / V) ^ (r / P % PHASES)) * V + c % V.
template <int V, int P, int PHASES>
struct Swizzled {
  static constexpr int group = 0;
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

  // How many neighbours of a row, from a multiple of N on, lie together and aligned: N, or less.
  template <int N>
  static constexpr int together() {
    int n = N;
    while (PLACE::template vector<W> % n || PLACE::template pitch<W> % n || W % n) n /= 2;
    return n;
  }

  // N elements from (row, column) on along AXIS.
  template <int AXIS, int N>
  ATTN_DEVICE Vec<T, N> read(int row, int column) const {
    constexpr int n = AXIS == 1 ? together<N>() : 1;
    Vec<T, N> values;
    ATTN_UNROLL for (int e = 0; e < N; e += n) {
      const int r = AXIS == 0 ? row + e : row, c = AXIS == 0 ? column : column + e;
      const auto part = *reinterpret_cast<const Vec<T, n> *>(&data[place(r, c)]);
      ATTN_UNROLL for (int i = 0; i < n; ++i) values[e + i] = part[i];
    }
    return values;
  }
  template <int AXIS, int N>
  ATTN_DEVICE void write(int row, int column, Vec<T, N> values) {
    constexpr int n = AXIS == 1 ? together<N>() : 1;
    ATTN_UNROLL for (int e = 0; e < N; e += n) {
      Vec<T, n> part;
      ATTN_UNROLL for (int i = 0; i < n; ++i) part[i] = values[e + i];
      const int r = AXIS == 0 ? row + e : row, c = AXIS == 0 ? column : column + e;
      *reinterpret_cast<Vec<T, n> *>(&data[place(r, c)]) = part;
    }
  }
  // The two runs of 4 of a group that lie side by side, the first of them at (row, column).
  ATTN_DEVICE Vec<T, 8> read_pair(int row, int column) const {
    return *reinterpret_cast<const Vec<T, 8> *>(&data[place(row, column)]);
  }
  // The group's length along an axis; 0 along the other one.
  template <int AXIS>
  static constexpr int group = AXIS == 1 ? PLACE::group : 0;
};

template <class T, int N>
using SharedVector = Shared<T, 1, N>;

// A tile in the memory of another one, which must not be needed as long as it is.
template <class S, class H>
ATTN_DEVICE S &within(H &host) {
  static_assert(sizeof(S) <= sizeof(H) && alignof(S) <= alignof(H), "a tile does not fit into another one");
  return *reinterpret_cast<S *>(&host);
}

// A tile read as its transpose.
template <class S>
struct Transposed {
  using Element = typename S::Element;
  template <int AXIS>
  static constexpr int group = S::template group<1 - AXIS>;
  const S &tile;
  template <int AXIS, int N>
  ATTN_DEVICE Vec<Element, N> read(int row, int column) const {
    return tile.template read<1 - AXIS, N>(column, row);
  }
  ATTN_DEVICE Vec<Element, 8> read_pair(int row, int column) const { return tile.read_pair(column, row); }
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
