"""Row functions of which one loop over the keys is not enough, though some look as if."""

from __future__ import annotations


def temperature_per_key(r, s):
    e = r.exp((s - r.max(s)) * r.per_key)
    return e / r.sum(e)


def centred(r, s):
    return s - r.sum(s) / r.count(s)


def clamped_difference(r, s):
    e = r.exp(r.maximum(s - r.max(s), -20.0))
    return e / r.sum(e)


def clamped_weight(r, s):
    e = r.maximum(r.exp(s - r.max(s)), 0.1)
    return e / r.sum(e)


def sparse(r, s):
    e = r.exp(s - r.max(s))
    return r.maximum(e / r.sum(e) - 0.1, 0.0)


def near_maximum(r, s):
    m = r.max(s)
    e = r.select(s > m - 1.0, r.exp(s - m), 0.0)
    return e / r.sum(e)


def relu_of_difference(r, s):
    e = r.maximum(s - r.max(s) + 1.0, 0.0)
    return e / r.sum(e)


def mean_stabilised(r, s):
    e = r.exp(s - r.sum(s) / r.count(s))
    return e / r.sum(e)


def maximum_of_signed(r, s):
    t = s / r.sum(s)
    return t, r.max(t)


def foreign_stabiliser(r, s):
    e = r.exp(s + r.per_key - r.max(0.5 * s))
    return e / r.sum(e)


def hidden_exponential(r, s):
    m = r.max(s)
    e = r.exp(s - m) + r.exp(-m)
    return e / r.sum(e)


def high_power(r, s):
    return (s / r.max(r.abs(s))) ** 64.0


def guarded_division(r, s):
    return r.select(s > 0.0, s / r.sum(r.maximum(s, 0.0)), 0.0)


def standardised(r, s):
    c = centred(r, s)
    return c / r.sqrt(r.sum(c * c) + 1.0)


def sum_that_cancels(r, s):
    """Term by term it would be one loop, and lose everything where the terms cancel."""
    m = r.max(s)
    return s / (1.0 + r.sum(r.exp(s - m) - r.exp(s * 2.0 - m * 2.0)) ** 2.0)


TWO_LOOPS = [
    sum_that_cancels,
    temperature_per_key,
    centred,
    clamped_difference,
    clamped_weight,
    sparse,
    near_maximum,
    relu_of_difference,
    mean_stabilised,
    maximum_of_signed,
    foreign_stabiliser,
    hidden_exponential,
    high_power,
    guarded_division,
    standardised,
]


def sparse_renormalised(r, s):
    p = sparse(r, s)
    return r.maximum(p / (r.sum(p) + 1e-3) - 0.05, 0.0)
