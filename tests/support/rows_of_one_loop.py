"""Row functions that need one loop over the keys, for `tests.support.row_functions.attention`."""

from __future__ import annotations

LOG2E = 1.44269504


def softmax(r, s):
    e = r.exp(s - r.max(s))
    return e / r.sum(e)


def softmax_base_two(r, s):
    t = s * LOG2E
    e = r.exp2(t - r.max(t))
    return e / r.sum(e)


def softmax_from_lse(r, s):
    m = r.max(s)
    lse = m + r.log(r.sum(r.exp(s - m)))
    return r.exp(s - lse), lse


def softmax_from_lse_base_two(r, s):
    m = r.max(s)
    lse = m * LOG2E + r.log2(r.sum(r.exp2((s - m) * LOG2E)))
    return r.exp2(s * LOG2E - lse), lse / LOG2E


def softmax_guarded(r, s):
    m = r.max(s)
    m = r.select(m.equals(float("-inf")), 0.0, m)
    e = r.exp(s - m)
    total = r.sum(e)
    return e / r.select(total.equals(0.0), 1.0, total)


def softmax_then_select(r, s):
    e = r.exp(s - r.max(s))
    return r.select(r.per_key > 1.0, e / r.sum(e), 0.0)


def softmax_masked_by_select(r, s):
    e = r.select(r.per_key > 1.0, r.exp(s - r.max(s)), 0.0)
    return e / (r.sum(e) + 1e-3)


def softmax_one(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    return e / (r.exp(-m) + r.sum(e))


def softmax_sink(r, s):
    sink = r.per_row
    m = r.maximum(sink, r.max(s))
    e = r.exp(s - m)
    return e / (r.sum(e) + r.exp(sink - m))


def softmax_sink_merged(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    both = r.maximum(m, r.per_row)
    return e * r.exp(m - both) / (r.exp(m - both) * r.sum(e) + r.exp(r.per_row - both))


def two_way(r, s):
    both = r.maximum(s, 0.0)
    return r.exp(s - both) / (r.exp(s - both) + r.exp(-both)) / r.maximum(r.sum(r.abs(s)), 1.0)


def softmax_doubled(r, s):
    p = softmax(r, s)
    return 2.0 * p + p * 0.5


def softmax_temperature(r, s):
    e = r.exp((s - r.max(s)) * r.per_row)
    return e / r.sum(e)


def softmax_weighted(r, s):
    e = r.exp(s - r.max(s)) * r.per_key
    return e / r.sum(e)


def softmin(r, s):
    e = r.exp(r.min(s) - s)
    return e / r.sum(e)


def softmax_by_largest_size(r, s):
    e = r.exp(s - r.max(r.abs(s)))
    return e / r.sum(e)


def softmax_squared(r, s):
    e = r.exp(s - r.max(s)) ** 2.0
    return e / r.sqrt(r.sum(e * e))


def raw_exponential(r, s):
    e = r.exp(s * 0.01)
    return e / r.sum(e)


def entropy(r, s):
    m = r.max(s)
    e = r.exp(s - m)
    total = r.sum(e)
    return e / total, m + r.log(total) - r.sum(s * e) / total


def weighted_by_score(r, s):
    e = s * r.exp(s - r.max(s))
    return e / (r.sum(r.abs(e)) + 1.0)


def softmax_with_largest_size(r, s):
    return softmax(r, s), r.max(r.abs(s))


def scaled_by_maximum(r, s):
    return s / (r.max(s) + 1.0)


def sigmoid(r, s):
    return 1.0 / (1.0 + r.exp(-s))


def squared_relu(r, s):
    return r.maximum(s, 0.0) * r.maximum(s, 0.0)


def retention(r, s):
    return s / r.maximum(r.sum(r.abs(s)), 1.0)


def cosine(r, s):
    return s * r.rsqrt(r.sum(s * s))


def three_norm(r, s):
    return s / r.sum(r.abs(s) ** 3.0) ** (1.0 / 3.0)


def softplus(r, s):
    t = r.log1p(r.exp(s * 0.02))
    return t / r.sum(t)


def relu_of_scaled(r, s):
    t = r.maximum(s, 0.0)
    return r.maximum(s / (r.sum(t) + 1.0), 0.0)


def signed(r, s):
    return s / r.sum(s)


def mean(r, s):
    return 1.0 / r.count(s)


def unused(r, s):
    r.sum(r.exp(s - r.sum(s)))
    return softmax(r, s)


def maximum_of_shifted(r, s):
    m = r.max(s)
    again = r.max(s - m)
    return r.exp(s - m - again)


def maximum_of_weights(r, s):
    e = r.exp(s - r.max(s)) * r.per_key
    return e / r.max(e)


def softmax_from_clamped_maximum(r, s):
    m = r.max(s)
    m = r.select(r.compare("olt", m, -5.0), -5.0, m)
    e = r.exp(s - m)
    return e / r.sum(e)


def log_cosh(r, s):
    m = r.max(r.abs(s))
    c = m + r.log(r.sum(r.exp(s - m) + r.exp(-s - m)) * 0.5)
    return r.exp(s - c), c


def log_cosh_stabilised(r, s):
    m = r.max(r.abs(s))
    c = m + r.log(r.sum(r.exp(s - m) + r.exp(-s - m)))
    e = r.exp(s - c)
    return e / r.sum(e)


ONE_LOOP = [
    softmax_from_clamped_maximum,
    log_cosh,
    log_cosh_stabilised,
    softmax,
    softmax_base_two,
    softmax_from_lse,
    softmax_from_lse_base_two,
    softmax_guarded,
    softmax_then_select,
    softmax_masked_by_select,
    softmax_one,
    softmax_sink,
    softmax_sink_merged,
    two_way,
    softmax_doubled,
    softmax_temperature,
    softmax_weighted,
    softmin,
    softmax_by_largest_size,
    softmax_squared,
    raw_exponential,
    entropy,
    weighted_by_score,
    softmax_with_largest_size,
    scaled_by_maximum,
    sigmoid,
    squared_relu,
    retention,
    cosine,
    three_norm,
    softplus,
    relu_of_scaled,
    signed,
    mean,
    unused,
    maximum_of_shifted,
    maximum_of_weights,
]
