"""Merging partial attention results: schema, preconditions, fake."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import OutputSpec, define_computing, require
from ._checks import FLOAT_DTYPES, check_no_grad, check_tensor


def check_merge(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
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


def outputs_merge(out_a: torch.Tensor, *_: object, **__: object) -> dict[str, OutputSpec]:
    num_tokens, num_heads, head_dim_v = out_a.shape
    return {
        "out": ((num_tokens, num_heads, head_dim_v), out_a.dtype),
        "lse": ((num_tokens, num_heads), torch.float32),
    }


def describe_merge(out_a: torch.Tensor, *_: object, **__: object) -> Call:
    num_tokens, num_heads, head_dim_v = out_a.shape
    op = "merge_attention_states"
    return Call(op, out_a.device, out_a.dtype, head_dim=head_dim_v, num_heads=num_heads, num_tokens=num_tokens)


merge_attention_states, merge_attention_states_out = define_computing(
    "merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor out, Tensor lse)",
    check=check_merge,
    outputs=outputs_merge,
    describe=describe_merge,
)


def check_stacked(outs: torch.Tensor, lses: torch.Tensor) -> None:
    op = "merge_attention_states.stacked"
    dims = (("num_parts", None), ("num_tokens", None), ("num_heads", None), ("head_dim_v", None))
    check_tensor(op, "outs", outs, FLOAT_DTYPES, dims, outs.device)
    num_parts, num_tokens, num_heads, _ = outs.shape
    _check_lse(op, "lses", lses, num_tokens, num_heads, outs.device, num_parts)
    check_no_grad(op, outs=outs, lses=lses)


def outputs_stacked(outs: torch.Tensor, lses: torch.Tensor) -> dict[str, OutputSpec]:
    _, num_tokens, num_heads, head_dim_v = outs.shape
    return {
        "out": ((num_tokens, num_heads, head_dim_v), outs.dtype),
        "lse": ((num_tokens, num_heads), torch.float32),
    }


def describe_stacked(outs: torch.Tensor, lses: torch.Tensor) -> Call:
    _, num_tokens, num_heads, head_dim_v = outs.shape
    op = "merge_attention_states.stacked"
    return Call(op, outs.device, outs.dtype, head_dim=head_dim_v, num_heads=num_heads, num_tokens=num_tokens)


merge_attention_states_stacked, merge_attention_states_stacked_out = define_computing(
    "merge_attention_states.stacked(Tensor outs, Tensor lses) -> (Tensor out, Tensor lse)",
    check=check_stacked,
    outputs=outputs_stacked,
    describe=describe_stacked,
)
