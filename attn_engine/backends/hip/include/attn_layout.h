// Who holds which element: layouts of matrix instructions, fragments of rank 2, vectors of rank 1.
#pragma once

namespace attn {

// ROWS x COLUMNS waves of a program cut a fragment into SPLIT0 x SPLIT1 contiguous parts (1: all waves along that axis
// hold copies); further waves hold copies too. In a wave's part, ACROSS neighbouring lanes lie along LANE_AXIS, and a
// lane holds runs of RUN elements along the other axis, the runs of the lane groups taking turns.
template <int LANE_AXIS, int ACROSS, int RUN, int SPLIT0, int SPLIT1, int ROWS, int COLUMNS>
struct Layout {
  static constexpr int lane_axis = LANE_AXIS, across = ACROSS, run = RUN, groups = WAVE / ACROSS;
  static constexpr int split(int axis) { return axis == 0 ? SPLIT0 : SPLIT1; }
  // Place of this wave along an axis, and which part that is.
  ATTN_DEVICE static int wave_place(int axis) { return axis == 0 ? wave() / COLUMNS % ROWS : wave() % COLUMNS; }
  // Whether this wave is one of those that the layout is for.
  ATTN_DEVICE static bool counts() { return wave() < ROWS * COLUMNS; }
  ATTN_DEVICE static int part(int axis) { return split(axis) == 1 ? 0 : wave_place(axis); }
};

// Of the product of M x K by K x N on ROWS x COLUMNS waves: the accumulator and both operands.
template <int M, int N, int K, int ROWS, int COLUMNS>
using Acc = Layout<1, N, 4, ROWS, COLUMNS, ROWS, COLUMNS>;
template <int M, int N, int K, int ROWS, int COLUMNS>
using OperandA = Layout<0, M, (M * K / WAVE < 4 ? M * K / WAVE : 4), ROWS, 1, ROWS, COLUMNS>;
template <int M, int N, int K, int ROWS, int COLUMNS>
using OperandB = Layout<1, N, (K * N / WAVE < 4 ? K * N / WAVE : 4), 1, COLUMNS, ROWS, COLUMNS>;

template <class T, int H, int W, class L>
struct Fragment {
  using Element = T;
  using Lanes = L;
  static constexpr int rank = 2, run = L::run;
  static constexpr int size(int axis) { return axis == 0 ? H : W; }
  static constexpr int wave_size(int axis) { return size(axis) / L::split(axis); }
  // Elements of one lane: `line` of them for each block of ACROSS lanes.
  static constexpr int line = wave_size(1 - L::lane_axis) / L::groups;
  static constexpr int count = wave_size(L::lane_axis) / L::across * line;
  // An f32 accumulator lies in vectors as its instruction takes them, all else in runs.
  static constexpr int whole = L::across * L::across / WAVE;
  static constexpr int chunk = sizeof(T) == 4 && run == 4 && line % whole == 0 ? whole : run;
  static_assert(count > 0 && line % run == 0, "the fragment does not divide into blocks");

  Vec<T, chunk> data[count / chunk];

  ATTN_DEVICE T get(int i) const { return load_lane<T>(data[i / chunk][i % chunk]); }
  ATTN_DEVICE void set(int i, T value) { data[i / chunk][i % chunk] = store_lane(value); }
  // Neighbouring elements that lie in one vector.
  template <int N>
  ATTN_DEVICE Vec<T, N> get_run(int i) const {
    Vec<T, N> values;
    ATTN_UNROLL for (int e = 0; e < N; ++e) values[e] = data[(i + e) / chunk][(i + e) % chunk];
    return values;
  }
  template <int N>
  ATTN_DEVICE void set_run(int i, Vec<T, N> values) {
    ATTN_UNROLL for (int e = 0; e < N; ++e) data[(i + e) / chunk][(i + e) % chunk] = values[e];
  }

  // Where this lane's elements stand: element i of it along an axis.
  struct Place {
    int across, along;
    ATTN_DEVICE int index(int axis, int i) const {
      if (axis == L::lane_axis) return across + i / line * L::across;
      return along + i % line / run * (L::groups * run) + i % run;
    }
  };
  ATTN_DEVICE static Place place() {
    return {opaque(L::part(L::lane_axis) * wave_size(L::lane_axis) + lane() % L::across),
            opaque(L::part(1 - L::lane_axis) * wave_size(1 - L::lane_axis) + lane() / L::across * run)};
  }
  // Which element of this lane of a vector without axis REMOVED stands in line with element i.
  template <int REMOVED>
  ATTN_DEVICE static constexpr int slice(int i) {
    return REMOVED == L::lane_axis ? i % line : i / line;
  }
  // Of the waves that hold copies, the first one.
  ATTN_DEVICE static bool owner() {
    return L::counts() && (L::split(0) > 1 || L::wave_place(0) == 0) && (L::split(1) > 1 || L::wave_place(1) == 0);
  }
};

// Rank 1, held where a fragment with layout L is, its axis REMOVED taken away.
template <class T, int N, int REMOVED, class L>
struct Vector {
  using Element = T;
  using Lanes = L;
  static constexpr int rank = 1, kept = 1 - REMOVED, removed = REMOVED;
  static constexpr bool on_lanes = kept == L::lane_axis;
  static constexpr int size(int) { return N; }
  static constexpr int wave_size = N / L::split(kept);
  static constexpr int count = wave_size / (on_lanes ? L::across : L::groups);
  static_assert(count > 0, "the vector does not divide into blocks");

  T data[count];

  ATTN_DEVICE T get(int i) const { return data[i]; }
  ATTN_DEVICE void set(int i, T value) { data[i] = value; }
  struct Place {
    int start;
    ATTN_DEVICE int index(int, int i) const {
      return start + (on_lanes ? i * L::across : i / L::run * (L::groups * L::run) + i % L::run);
    }
  };
  ATTN_DEVICE static Place place() {
    return {opaque(L::part(kept) * wave_size + (on_lanes ? lane() % L::across : lane() / L::across * L::run))};
  }
  // Of the lanes that hold copies, the first one.
  ATTN_DEVICE static bool owner() {
    const bool first_lane = on_lanes ? lane() / L::across == 0 : lane() % L::across == 0;
    return first_lane && L::counts() && L::wave_place(removed) == 0 && (L::split(kept) > 1 || L::wave_place(kept) == 0);
  }
};

template <class F, class T>
ATTN_DEVICE void fill(F &target, T value) {
  ATTN_UNROLL for (int i = 0; i < F::count; ++i) target.set(i, value);
}

}  // namespace attn
