// Strided tensors in device memory: windows with limits, copies in and out, scattered reads. Addresses have 64 bits.
#pragma once

namespace attn {

// No limit along an axis of a window.
struct All {
  static constexpr bool limited = false;
  ATTN_DEVICE All from(long long) const { return {}; }
  ATTN_DEVICE bool has(int) const { return true; }
  ATTN_DEVICE bool has_run(int, int) const { return true; }
};

// Indices of the tensor below a limit, and not negative; places in the window count from its start.
struct Below {
  static constexpr bool limited = true;
  long long limit;
  int first = 0, last = 0;
  ATTN_DEVICE Below from(long long start) const {
    const long long rest = limit - start;
    return {limit, start < 0 ? int(max_of(-start, -0x7FFFFFFFLL)) : 0, int(max_of(min_of(rest, 0x7FFFFFFFLL), 0LL))};
  }
  ATTN_DEVICE bool has(int place) const { return place >= first && place < last; }
  ATTN_DEVICE bool has_run(int place, int n) const { return place >= first && place + n <= last; }
};

ATTN_DEVICE All all() { return {}; }
ATTN_DEVICE Below below(long long limit) { return {limit}; }

// A tile of a tensor: row and column count from its corner. UNIT is the axis along which neighbours are expected side
// by side in memory; they are if `together`.
template <class T, int UNIT, class B0, class B1>
struct Window {
  using Element = T;
  using Held = typename detail::Stored<T>::type;
  static constexpr int unit = UNIT;
  Held *base;
  long long stride0, stride1;
  B0 rows;
  B1 columns;
  // What the tensor has before and from the corner on, along each axis: only emulated kernels look.
  long long before0, room0, before1, room1;

  template <int AXIS>
  static constexpr bool limited = AXIS == 0 ? B0::limited : B1::limited;

  ATTN_DEVICE bool together() const { return (UNIT == 0 ? stride0 : stride1) == 1; }
  ATTN_DEVICE Held *at(int row, int column) const {
    expect(row >= -before0 && row < room0 && column >= -before1 && column < room1, "an index outside of a tensor");
    return base + (row * stride0 + column * stride1);
  }
  // Neighbours along AXIS.
  template <int AXIS>
  ATTN_DEVICE Held *run_at(int row, int column, int n) const {
    expect(AXIS == 0 ? row + n <= room0 : column + n <= room1, "a run beyond the end of a tensor");
    return at(row, column);
  }
  ATTN_DEVICE bool has(int row, int column) const { return rows.has(row) && columns.has(column); }
  template <int AXIS>
  ATTN_DEVICE bool has_run(int row, int column, int n) const {
    return AXIS == 0 ? rows.has_run(row, n) && columns.has(column) : rows.has(row) && columns.has_run(column, n);
  }

  // N elements from (row, column) on along AXIS, 0 beyond the limits; one access where they lie together.
  template <int AXIS, int N, bool TOGETHER>
  ATTN_DEVICE Vec<T, N> read(int row, int column) const {
    Vec<T, N> values = Vec<T, N>(Held(0));
    if constexpr (TOGETHER && N > 1) {
      // Aligned as its elements are; the device loads it at once all the same.
      if (has_run<AXIS>(row, column, N)) __builtin_memcpy(&values, run_at<AXIS>(row, column, N), N * sizeof(Held));
      if constexpr (!limited<AXIS>) return values;
      else if (has_run<AXIS>(row, column, N)) return values;
    }
    ATTN_UNROLL for (int e = 0; e < N; ++e) {
      const int r = AXIS == 0 ? row + e : row, c = AXIS == 0 ? column : column + e;
      if (has(r, c)) values[e] = *at(r, c);
    }
    return values;
  }
  template <int AXIS, int N, bool TOGETHER>
  ATTN_DEVICE void write(int row, int column, Vec<T, N> values) const {
    if constexpr (TOGETHER && N > 1) {
      if (has_run<AXIS>(row, column, N)) {
        __builtin_memcpy(run_at<AXIS>(row, column, N), &values, N * sizeof(Held));
        return;
      }
      if constexpr (!limited<AXIS>) return;
    }
    ATTN_UNROLL for (int e = 0; e < N; ++e) {
      const int r = AXIS == 0 ? row + e : row, c = AXIS == 0 ? column : column + e;
      if (has(r, c)) *at(r, c) = values[e];
    }
  }
};

template <class T, int RANK>
struct Global {
  T *data;
  long long stride[RANK ? RANK : 1];
  int size[RANK ? RANK : 1];

  template <class... I>
  ATTN_DEVICE T *address(I... indices) const {
    long long offset = 0;
    int axis = 0;
    ((offset += static_cast<long long>(indices) * stride[axis++]), ...);
    return data + offset;
  }
  template <class... I>
  ATTN_DEVICE T *at(I... indices) const {
    int axis = 0;
    (expect(indices >= 0 && indices < size[axis++], "an index outside of a tensor"), ...);
    return address(indices...);
  }
  template <class... I>
  ATTN_DEVICE T load(I... indices) const {
    return *at(indices...);
  }
  template <class... I>
  ATTN_DEVICE T gather(bool guard, I... indices) const {
    return guard ? *at(indices...) : T{};
  }
  template <class... I>
  ATTN_DEVICE void store(T value, I... indices) const {
    if (thread() == 0) *at(indices...) = value;
  }

  template <class... I>
  ATTN_DEVICE void add(bool guard, T value, I... indices) const {
    if (guard) atomic_add(at(indices...), value);
  }

  // Tile axes along D0 and D1 of the tensor from these indices on; the other indices are fixed.
  template <int D0, int D1, class B0, class B1, class... I>
  ATTN_DEVICE auto window(B0 rows, B1 columns, I... indices) const {
    const long long start[] = {static_cast<long long>(indices)...};
    constexpr int unit = D0 == RANK - 1 ? 0 : 1;
    using R = Window<T, unit, decltype(rows.from(0)), decltype(columns.from(0))>;
    return R{reinterpret_cast<typename R::Held *>(address(indices...)),
             stride[D0],
             stride[D1],
             rows.from(start[D0]),
             columns.from(start[D1]),
             start[D0],
             size[D0] - start[D0],
             start[D1],
             size[D1] - start[D1]};
  }
  // The same for a tile of rank 1, which is a single row.
  template <int D, class B, class... I>
  ATTN_DEVICE auto line(B limit, I... indices) const {
    const long long start[] = {static_cast<long long>(indices)...};
    using R = Window<T, 1, All, decltype(limit.from(0))>;
    return R{reinterpret_cast<typename R::Held *>(address(indices...)),
             0,
             stride[D],
             All{},
             limit.from(start[D]),
             0,
             1,
             start[D],
             size[D] - start[D]};
  }
};

namespace detail {

// 16 bytes, or what divides the tile.
constexpr int copy_length(int bytes, int size) {
  int n = 16 / bytes;
  while (size % n) n /= 2;
  return n;
}
template <class S, int UNIT>
constexpr int copy_length() {
  return copy_length(sizeof(typename S::Held), S::size(UNIT));
}

// The threads share a tile in vectors of N along UNIT. Where that is the rows' axis, neighbouring threads take
// neighbours of one row, for a column of LDS would fall on one bank.
template <int THREADS, int UNIT, int N, class S, class F>
ATTN_DEVICE void for_vectors(F visit) {
  constexpr int per_line = S::size(UNIT) / N, lines = S::size(1 - UNIT), units = per_line * lines;
  const auto step = [&](int unit) ATTN_INLINE {
    if (units % THREADS && unit >= units) return;
    const int line = UNIT == 1 ? unit / per_line : unit % lines;
    const int along = (UNIT == 1 ? unit % per_line : unit / lines) * N;
    visit(UNIT == 0 ? along : line, UNIT == 0 ? line : along);
  };
  if constexpr (N > 1) {
    ATTN_UNROLL for (int first = 0; first < units; first += THREADS) step(first + thread());
  } else {
    ATTN_ROLLED for (int first = 0; first < units; first += THREADS) step(first + thread());
  }
}

template <int THREADS, int N, class W, class S>
ATTN_DEVICE void copy_in_vectors(const W &from, S &to) {
  for_vectors<THREADS, W::unit, N, S>([&](int row, int column) ATTN_INLINE {
    to.template write<W::unit, N>(row, column, from.template read<W::unit, N, true>(row, column));
  });
}
template <int THREADS, int N, class S, class W>
ATTN_DEVICE void copy_out_vectors(const S &from, const W &to) {
  for_vectors<THREADS, W::unit, N, S>([&](int row, int column) ATTN_INLINE {
    to.template write<W::unit, N, true>(row, column, from.template read<W::unit, N>(row, column));
  });
}

}  // namespace detail

template <int THREADS, class W, class T, int H, int WIDTH, class PLACE>
ATTN_DEVICE void copy_in(const W &from, Shared<T, H, WIDTH, PLACE> &to) {
  using S = Shared<T, H, WIDTH, PLACE>;
  if (__builtin_expect(from.together(), true)) detail::copy_in_vectors<THREADS, detail::copy_length<S, W::unit>()>(from, to);
  else detail::copy_in_vectors<THREADS, 1>(from, to);
}
template <int THREADS, class T, int H, int WIDTH, class PLACE, class W>
ATTN_DEVICE void copy_out(const Shared<T, H, WIDTH, PLACE> &from, const W &to) {
  using S = Shared<T, H, WIDTH, PLACE>;
  if (__builtin_expect(to.together(), true)) detail::copy_out_vectors<THREADS, detail::copy_length<S, W::unit>()>(from, to);
  else detail::copy_out_vectors<THREADS, 1>(from, to);
}

// A tile on its way from memory to LDS: each thread holds the vectors along UNIT that it copies, as words. Where rows of
// LDS lie across them, a thread takes `side` vectors side by side, so that it writes as many neighbours of a row at once.
template <class T, int H, int W, int UNIT, int THREADS>
struct Staged {
  using Held = typename detail::Stored<T>::type;
  static constexpr int rank = 2;
  static constexpr int size(int axis) { return axis == 0 ? H : W; }
  static constexpr int length = detail::copy_length(sizeof(Held), size(UNIT)), lines = size(1 - UNIT);
  static constexpr int vectors = (H * W / length + THREADS - 1) / THREADS, count = vectors * length;
  static constexpr int widest = detail::copy_length(sizeof(Held), lines);
  static constexpr int side = UNIT == 1 || vectors % 2 ? 1 : widest < vectors ? widest : vectors;
  static constexpr int groups = H * W / length / side;
  static_assert((side & (side - 1)) == 0 && vectors % side == 0, "vectors side by side do not divide into writes");
  static constexpr int words = length * int(sizeof(Held)) / 4;
  using Words = VectorOf<unsigned, words>;

  Words data[vectors];

  ATTN_DEVICE Vec<T, length> get_vector(int i) const { return __builtin_bit_cast(Vec<T, length>, data[i]); }
  ATTN_DEVICE void set_vector(int i, Vec<T, length> values) { data[i] = __builtin_bit_cast(Words, values); }
  ATTN_DEVICE void set(int i, T value) {
    Vec<T, length> values = get_vector(i / length);
    values[i % length] = store_lane(value);
    set_vector(i / length, values);
  }

  // The first vector of each of this thread's groups, and where it begins.
  template <class F>
  ATTN_DEVICE static void for_groups(F visit) {
    constexpr int across = lines / side, per_line = size(UNIT) / length;
    ATTN_UNROLL for (int i = 0; i < vectors / side; ++i) {
      const int group = i * THREADS + thread();
      if (groups % THREADS && group >= groups) return;
      const int line = UNIT == 1 ? group / per_line : group % across * side;
      const int along = (UNIT == 1 ? group % per_line : group / across) * length;
      visit(i * side, UNIT == 0 ? along : line, UNIT == 0 ? line : along);
    }
  }
};

template <int THREADS, class W, class T, int H, int WIDTH, int UNIT>
ATTN_DEVICE void copy_in(const W &from, Staged<T, H, WIDTH, UNIT, THREADS> &to) {
  using S = Staged<T, H, WIDTH, UNIT, THREADS>;
  static_assert(W::unit == UNIT, "staged along another axis than memory is read");
  if (__builtin_expect(from.together(), true)) {
    S::for_groups([&](int first, int row, int column) ATTN_INLINE {
      ATTN_UNROLL for (int i = 0; i < S::side; ++i)
          to.set_vector(first + i, from.template read<UNIT, S::length, true>(row, column + i * (1 - UNIT)));
    });
    return;
  }
  // One vector after the other, and packed at once; their many addresses are not kept: registers are for others.
  S::for_groups([&](int first, int row, int column) ATTN_INLINE {
    ATTN_UNROLL for (int i = 0; i < S::side; ++i) {
      const int r = opaque(row), c = opaque(column) + i * (1 - UNIT);
      auto words = __builtin_bit_cast(typename S::Words, from.template read<UNIT, S::length, false>(r, c));
      ATTN_UNROLL for (int w = 0; w < S::words; ++w) words[w] = opaque(words[w]);
      to.data[first + i] = words;
    }
  });
}
template <int THREADS, class T, int H, int WIDTH, int UNIT, class PLACE>
ATTN_DEVICE void copy(const Staged<T, H, WIDTH, UNIT, THREADS> &from, Shared<T, H, WIDTH, PLACE> &to) {
  using S = Staged<T, H, WIDTH, UNIT, THREADS>;
  S::for_groups([&](int first, int row, int column) ATTN_INLINE {
    if constexpr (S::side == 1) {
      to.template write<UNIT, S::length>(row, column, from.get_vector(first));
    } else {
      ATTN_UNROLL for (int e = 0; e < S::length; ++e) {
        Vec<T, S::side> values;
        ATTN_UNROLL for (int i = 0; i < S::side; ++i) values[i] = from.get_vector(first + i)[e];
        to.template write<1, S::side>(row + e, column, values);
      }
    }
  });
}

// A fragment's lanes copy their own runs; where those lie apart, or the other way round, one element at a time.
template <int THREADS, class W, class T, int H, int WIDTH, class L>
ATTN_DEVICE void copy_in(const W &from, Fragment<T, H, WIDTH, L> &to) {
  constexpr int along = 1 - L::lane_axis, n = L::run;
  const auto at = to.place();
  if (__builtin_expect(W::unit == along && from.together(), true)) {
    ATTN_UNROLL for (int i = 0; i < to.count; i += n)
        to.template set_run<n>(i, from.template read<along, n, true>(at.index(0, i), at.index(1, i)));
  } else {
    ATTN_UNROLL for (int i = 0; i < to.count; i += n)
        to.template set_run<n>(i, from.template read<along, n, false>(at.index(0, i), at.index(1, i)));
  }
}
template <int THREADS, class T, int H, int WIDTH, class L, class W>
ATTN_DEVICE void copy_out(const Fragment<T, H, WIDTH, L> &from, const W &to) {
  constexpr int along = 1 - L::lane_axis, n = L::run;
  if (!from.owner()) return;
  const auto at = from.place();
  if (__builtin_expect(W::unit == along && to.together(), true)) {
    ATTN_UNROLL for (int i = 0; i < from.count; i += n)
        to.template write<along, n, true>(at.index(0, i), at.index(1, i), from.template get_run<n>(i));
  } else {
    ATTN_UNROLL for (int i = 0; i < from.count; i += n)
        to.template write<along, n, false>(at.index(0, i), at.index(1, i), from.template get_run<n>(i));
  }
}

template <int THREADS, class W, class T, int N, int REMOVED, class L>
ATTN_DEVICE void copy_in(const W &from, Vector<T, N, REMOVED, L> &to) {
  const auto at = to.place();
  ATTN_UNROLL for (int i = 0; i < to.count; ++i)
      to.set(i, load_lane<T>(from.template read<1, 1, false>(0, at.index(0, i))[0]));
}
template <int THREADS, class T, int N, int REMOVED, class L, class W>
ATTN_DEVICE void copy_out(const Vector<T, N, REMOVED, L> &from, const W &to) {
  if (!from.owner()) return;
  const auto at = from.place();
  ATTN_UNROLL for (int i = 0; i < from.count; ++i)
      to.template write<1, 1, false>(0, at.index(0, i), Vec<T, 1>(store_lane(from.get(i))));
}

template <class F, class W>
ATTN_DEVICE void atomic_add(const F &from, const W &to) {
  if (!from.owner()) return;
  const auto at = from.place();
  ATTN_UNROLL for (int i = 0; i < F::count; ++i) {
    const int row = F::rank == 1 ? 0 : at.index(0, i), column = at.index(F::rank - 1, i);
    if (to.has(row, column)) atomic_add(to.at(row, column), from.get(i));
  }
}

}  // namespace attn
