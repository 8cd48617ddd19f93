"""Varlen attention written a second time, for the tests: float64, token by token, with a bound for each element.

The bound is derived in `attention_oracle`; here the reductions are as long as the head dim and the visible keys.
"""

from __future__ import annotations

import math

import torch
from attention_oracle import ACCUMULATE, FUNCTION, UNIT, Expected


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    scale: float,
    *,
    causal: bool,
    operand: torch.dtype | None,
    tokens: list[int] | None = None,
) -> Expected:
    """`operand` is what probabilities are rounded to, None if to nothing; `tokens` None is every token."""
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    num_tokens, num_heads, head_dim = q.shape
    group = num_heads // k.shape[1]
    unit = UNIT[operand] if operand is not None else 0.0
    tokens = list(range(num_tokens)) if tokens is None else tokens
    shape = len(tokens), num_heads, v.shape[2]
    out, lse = q.new_zeros(shape, dtype=torch.float64), q.new_full(shape[:2], -math.inf, dtype=torch.float64)
    out_tolerance, lse_tolerance = torch.zeros_like(out), torch.zeros_like(lse)
    for row, token in enumerate(tokens):
        owners = [r for r in range(len(starts_q) - 1) if starts_q[r] <= token < starts_q[r + 1]]
        if not owners:
            continue
        (request,) = owners
        first, last = starts_k[request], starts_k[request + 1]
        if causal:
            last -= starts_q[request + 1] - 1 - token
        if last <= first:
            continue
        keys = k[first:last].double().repeat_interleave(group, 1)
        values = v[first:last].double().repeat_interleave(group, 1)
        query = q[token].double()
        scores = torch.einsum("hd,khd->hk", query, keys) * scale
        error = (head_dim + 4) * ACCUMULATE * scale * torch.einsum("hd,khd->hk", query.abs(), keys.abs())
        error = (error + FUNCTION * (scores.abs() + 1)).amax(1)
        n = (last - first) * ACCUMULATE
        lse[row] = torch.logsumexp(scores, 1)
        weights = scores.softmax(1)
        out[row] = torch.einsum("hk,khd->hd", weights, values)
        relative = unit + 2 * error + 2 * n + 4 * FUNCTION
        own = torch.einsum("hk,khd->hd", weights, values.abs()) * relative[:, None]
        # a mean of the values, however the weights are off
        mean = values.amax(0) - values.amin(0) + (unit + 2 * n + 4 * FUNCTION) * values.abs().amax(0)
        own = torch.fmin(own, mean)
        floor = 2.0**-126 * values.abs().amax() + (2.0**-25 if q.dtype == torch.float16 else 2.0**-134)
        out_tolerance[row] = own + UNIT[q.dtype] * (out[row].abs() + own) + floor
        lse_tolerance[row] = error + n + FUNCTION * lse[row].abs()
    return Expected(tokens, out, lse, out_tolerance, lse_tolerance)
