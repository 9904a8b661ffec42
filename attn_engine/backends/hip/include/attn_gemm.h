// Products by matrix instructions: acc += a @ b.
#pragma once

namespace attn {

namespace detail {

// One lane's elements of operand a for a row block, or of b for a column block, and one step along k: runs of up to 4,
// those of the lane groups taking turns, as an accumulator is held.
template <int AXIS, int SIZE, int K, class L, class S>
ATTN_DEVICE auto operand(const S &tile, int start, int k) {
  constexpr int n = SIZE * K / WAVE, run = n < 4 ? n : 4, groups = WAVE / SIZE;
  const int across = start + lane() % SIZE, along = k + lane() / SIZE * run;
  if constexpr (S::template group<1 - AXIS> == K)
    return AXIS == 0 ? tile.read_pair(across, along) : tile.read_pair(along, across);
  Vec<typename S::Element, n> values;
  ATTN_UNROLL for (int e = 0; e < n; e += run) {
    const int place = along + e * groups;
    Vec<typename S::Element, run> part;
    if constexpr (AXIS == 0) part = tile.template read<1, run>(across, place);
    else part = tile.template read<0, run>(place, across);
    ATTN_UNROLL for (int i = 0; i < run; ++i) values[e + i] = part[i];
  }
  return values;
}
template <int AXIS, int SIZE, int K, class L, class T, int H, int W, class F>
ATTN_DEVICE auto operand(const Fragment<T, H, W, F> &tile, int start, int k) {
  constexpr int n = SIZE * K / WAVE, run = n < 4 ? n : 4;
  static_assert(F::lane_axis == AXIS && F::across == SIZE && F::run == run, "not held as an operand");
  return tile.template get_run<n>(start / SIZE * tile.line + k / K * n);
}
// Where this wave's part of the accumulator begins; fragments count from their own.
template <class L, class S>
ATTN_DEVICE int part_start(const S &, int axis, int wave_size) {
  return L::part(axis) * wave_size;
}
template <class L, class T, int H, int W, class F>
ATTN_DEVICE int part_start(const Fragment<T, H, W, F> &, int, int) {
  return 0;
}

}  // namespace detail

template <int M, int N, int K, int DEPTH, class A, class B, int H, int W, class L>
ATTN_DEVICE void gemm(const A &a, const B &b, Fragment<float, H, W, L> &acc) {
  using F = Fragment<float, H, W, L>;
  constexpr int rows = F::wave_size(0) / M, columns = F::wave_size(1) / N;
  static_assert(L::lane_axis == 1 && L::across == N && F::chunk == M * N / WAVE, "not held as an accumulator");
  const int row = detail::part_start<L>(a, 0, rows * M), column = detail::part_start<L>(b, 1, columns * N);
  ATTN_UNROLL for (int k = 0; k < DEPTH; k += K) {
    ATTN_UNROLL for (int i = 0; i < rows; ++i) {
      const auto left = detail::operand<0, M, K, L>(a, row + i * M, k);
      ATTN_UNROLL for (int j = 0; j < columns; ++j) {
        const auto right = detail::operand<1, N, K, L>(b, column + j * N, k);
        auto &sum = acc.data[j * rows + i];
        sum = detail::Product<typename A::Element, M, N, K>::run(left, right, sum);
      }
    }
  }
}

}  // namespace attn
