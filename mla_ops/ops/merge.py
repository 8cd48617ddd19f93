"""Joining partial attention results."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import Contract, computing, require
from ._checks import FLOAT_DTYPES, check_no_grad, check_tensor


def _merged(op: str, outs: torch.Tensor, shape: tuple[int, ...]) -> Contract:
    num_tokens, num_heads, head_dim_v = shape
    call = Call(op, outs.device, outs.dtype, head_dim=head_dim_v, num_heads=num_heads, num_tokens=num_tokens)
    return call, {"out": (shape, outs.dtype), "lse": ((num_tokens, num_heads), torch.float32)}


def _check_lse(
    op: str,
    name: str,
    lse: torch.Tensor,
    num_tokens: int,
    num_heads: int,
    device: torch.device,
    num_parts: int | None = None,
) -> None:
    """Like `check_tensor`, for any strides: some kernels return `[num_heads, num_tokens]` transposed."""
    if lse.dtype != torch.float32:
        raise TypeError(f"{op}: {name} must be torch.float32, got {lse.dtype}")
    if lse.device != device:
        raise ValueError(f"{op}: {name} must be on {device} like the first argument, got {lse.device}")

    sizes = {"num_tokens": num_tokens, "num_heads": num_heads}
    if num_parts is not None:
        sizes = {"num_parts": num_parts, **sizes}

    def message() -> str:
        expected = ", ".join(f"{label}={size}" for label, size in sizes.items())
        return f"{op}: {name} must have shape [{expected}], got {list(lse.shape)}"

    if lse.dim() != len(sizes):
        raise ValueError(message())
    for actual, size in zip(lse.shape, sizes.values(), strict=True):
        require(actual == size, message)


@computing("out", "lse")
def merge_attention_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> Contract:
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
    op = "merge_attention_states"
    device = out_a.device
    check_tensor(
        op, "out_a", out_a, FLOAT_DTYPES, (("num_tokens", None), ("num_heads", None), ("head_dim_v", None)), device
    )
    num_tokens, num_heads, head_dim_v = out_a.shape
    dims = (("num_tokens", num_tokens), ("num_heads", num_heads), ("head_dim_v", head_dim_v))
    check_tensor(op, "out_b", out_b, (out_a.dtype,), dims, device)
    _check_lse(op, "lse_a", lse_a, num_tokens, num_heads, device)
    _check_lse(op, "lse_b", lse_b, num_tokens, num_heads, device)
    check_no_grad(op, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    return _merged(op, out_a, (num_tokens, num_heads, head_dim_v))


@computing("out", "lse", op="merge_attention_states.stacked")
def merge_stacked_attention_states(outs: torch.Tensor, lses: torch.Tensor) -> Contract:
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
    op = "merge_attention_states.stacked"
    dims = (("num_parts", None), ("num_tokens", None), ("num_heads", None), ("head_dim_v", None))
    check_tensor(op, "outs", outs, FLOAT_DTYPES, dims, outs.device)
    num_parts, num_tokens, num_heads, head_dim_v = outs.shape
    _check_lse(op, "lses", lses, num_tokens, num_heads, outs.device, num_parts)
    check_no_grad(op, outs=outs, lses=lses)
    return _merged(op, outs, (num_tokens, num_heads, head_dim_v))
