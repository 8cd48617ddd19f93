"""Error bounds that follow from the dtypes and the length of a reduction, not from what a kernel happens to give.

The model is the standard one (Higham, Accuracy and Stability of Numerical Algorithms, chapter 3): each operation rounds
once, with relative error at most the unit roundoff `u`, and a sum of n products in any order is off by at most
`gamma(n) * sum |x_i y_i|`, with `gamma(n) = n u / (1 - n u)`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

# exp and log on a GPU are within 2 ulp (CUDA C++ Programming Guide), and so is the rounding of their argument
_ELEMENTARY_ULP = 4


class Bound(NamedTuple):
    """`|actual - expected| <= atol + rtol * |expected|`; unpacks into `torch.testing.assert_close`."""

    rtol: float
    atol: float


def unit_roundoff(dtype: torch.dtype) -> float:
    """Largest relative error of rounding to `dtype`: half of its epsilon."""
    return torch.finfo(dtype).eps / 2


def gamma(length: int, dtype: torch.dtype = torch.float32) -> float:
    """Relative error of a sum of `length` products accumulated in `dtype`, in any order."""
    n_u = length * unit_roundoff(dtype)
    if n_u >= 1:
        raise ValueError(f"gamma: a sum of {length} products in {dtype} has no bound")
    return n_u / (1 - n_u)


def rounding(dtype: torch.dtype) -> Bound:
    """One rounding to `dtype`, results below its normal range included."""
    info = torch.finfo(dtype)
    return Bound(info.eps / 2, info.tiny * info.eps / 2)


def dot(length: int, magnitude: float, dtype: torch.dtype = torch.float32) -> Bound:
    """A dot product of `length` whose sum of |x_i y_i| is at most `magnitude`, accumulated in `dtype`."""
    return Bound(0.0, gamma(length, dtype) * magnitude)


def attention_lse(head_dim: int, topk: int, score_magnitude: float) -> Bound:
    """The logsumexp of `topk` scores, computed in float32 from exact keys.

    Args:
        head_dim: length of each dot product.
        topk: keys a query attends.
        score_magnitude: an upper bound of `softmax_scale * sum |q_i k_i|` over all queries and keys.
    """
    score_error = _score_error(head_dim, score_magnitude)
    sum_error = gamma(topk) + _ELEMENTARY_ULP * unit_roundoff(torch.float32) * (1 + math.log(max(topk, 2)))
    return Bound(2 * unit_roundoff(torch.float32), score_error + sum_error)


def attention_out(
    dtype: torch.dtype, head_dim: int, topk: int, score_magnitude: float, value_magnitude: float
) -> Bound:
    """The softmax-weighted mean of `topk` values, accumulated in float32 and rounded once to `dtype`.

    Args:
        dtype: of the output.
        head_dim, topk, score_magnitude: as in `attention_lse`.
        value_magnitude: an upper bound of |value|.

    A score that is off by e scales its weight by exp(e); numerator and normaliser move by no more than that each, so
    the mean is off by at most (exp(2 e) - 1) * value_magnitude, and each rounding of a weight adds its unit roundoff.
    """
    u32 = unit_roundoff(torch.float32)
    weight_error = math.expm1(2 * (_score_error(head_dim, score_magnitude) + _ELEMENTARY_ULP * u32))
    weight_error += 2 * gamma(topk) + 3 * u32
    out = rounding(dtype)
    return Bound(out.rtol, weight_error * (1 + out.rtol) * value_magnitude + out.atol)


def compressed_entry(
    dtype: torch.dtype,
    window: int,
    head_dim: int,
    score_magnitude: float,
    value_magnitude: float,
    smallest_rms: float,
    weight_magnitude: float,
    entry_magnitude: float,
) -> Bound:
    """An entry of the compressor: softmax-weighted mean, RMS norm, rotation, in float32, rounded once to `dtype`.

    Args:
        dtype: of the cache.
        window: states that are pooled.
        head_dim: channels that are normalised together.
        score_magnitude: an upper bound of |score + bias|.
        value_magnitude: an upper bound of the softmax-weighted mean of |key|.
        smallest_rms: a lower bound of the root mean square of a pooled row.
        weight_magnitude: an upper bound of |norm_weight|.
        entry_magnitude: an upper bound of |entry| before the rotation.

    A score that is off by e scales its weight by exp(e). The maximum may grow once in 8 states, and each growth
    rescales by an exp; but the differences it is taken of add up to twice the largest score, so their roundings do not
    multiply. The mean moves as in `attention_out`; divided by its root mean square, so does that. A rotation adds two
    such numbers.
    """
    u32 = unit_roundoff(torch.float32)
    rescalings = window // 8 + 2
    weight_error = math.expm1(2 * (5 * score_magnitude + _ELEMENTARY_ULP * rescalings) * u32) + 2 * gamma(window)
    relative = (weight_error + 2 * u32) * value_magnitude / smallest_rms
    normed = weight_magnitude * relative + entry_magnitude * (relative + gamma(head_dim) + 8 * u32)
    out = rounding(dtype)
    return Bound(out.rtol, 2 * normed * (1 + out.rtol) + out.atol)


def merge(dtype: torch.dtype, lse_magnitude: float, value_magnitude: float) -> Bound:
    """Two partial results merged in float32 and rounded once to `dtype`."""
    u32 = unit_roundoff(torch.float32)
    # the weights are exp of a difference of lse: the difference is rounded, exp turns that into a relative error
    weight_error = math.expm1(2 * (2 * lse_magnitude + _ELEMENTARY_ULP) * u32) + 4 * u32
    out = rounding(dtype)
    return Bound(out.rtol, weight_error * (1 + out.rtol) * value_magnitude + out.atol)


def e4m3(group_amax: float) -> Bound:
    """A value stored as e4m3 under a power-of-two scale chosen for `group_amax` (448 fits, at most 2x too coarse).

    e4m3 keeps 3 mantissa bits: half an ulp is 2**-4 of the value; below its normal range, 2**-10 of the scale.
    """
    scale = 2.0 ** max(math.ceil(math.log2(group_amax / 448)), -13) if group_amax > 0 else 2.0**-13
    return Bound(2.0**-4, scale * 2.0**-10)


def _score_error(head_dim: int, score_magnitude: float) -> float:
    """Absolute error of a scaled score: the dot product, the scaling and the subtraction of the maximum."""
    return (gamma(head_dim) + 3 * unit_roundoff(torch.float32)) * score_magnitude
