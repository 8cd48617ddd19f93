"""Joining partial attention results."""

from __future__ import annotations

import torch

from ..contracts import merge as contracts


def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over two disjoint sets of keys, from the attention over each: exact, in float32.

    Args:
        out_a, out_b: `[num_tokens, num_heads, head_dim_v]`, one dtype of bfloat16, float16, float32.
        lse_a, lse_b: `[num_tokens, num_heads]` float32, natural log, any strides (a transposed `[num_heads,
            num_tokens]` is fine). -inf marks an empty side, and so does +inf, as some kernels have it; the output of
            an empty side may hold anything, NaN included.

    Returns:
        out `[num_tokens, num_heads, head_dim_v]` of the inputs' dtype and lse `[num_tokens, num_heads]` float32. Where
        both sides are empty, out is 0 and lse is -inf.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow.

    Source: FlashAttention's online softmax (arXiv:2205.14135), section 3.1.
    """
    return contracts.merge_attention_states(out_a, lse_a, out_b, lse_b)


def merge_stacked_attention_states(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention over any number of disjoint sets of keys: exact, in float32, in one pass.

    The parts come from an all-gather over context-parallel ranks, or from splits of a context.

    Args:
        outs: `[num_parts, num_tokens, num_heads, head_dim_v]` bfloat16, float16 or float32, any number of parts.
        lses: `[num_parts, num_tokens, num_heads]` float32, natural log, any strides. -inf and +inf mark an empty part
            of a row, as in `merge_attention_states`.

    Returns:
        out and lse as `merge_attention_states` returns them; no parts at all are like empty ones. The op is
        `torch.ops.mla.merge_attention_states.stacked`, its buffers' form `.stacked_out`.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow.

    Source: FlashAttention's online softmax (arXiv:2205.14135), section 3.1.
    """
    return contracts.merge_attention_states_stacked(outs, lses)
