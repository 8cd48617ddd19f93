"""An installed FlashAttention, 3 or 2, as a lowering of prefill_attention.

FlashAttention-3 takes values that are narrower than keys where the keys are those of MLA; FlashAttention-2 has one
width for all heads, and what is narrower is padded here.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..dispatch import Call, Lowering, Missing, device_capability, into_buffers, is_installed
from .alignment import aligned
from .torch_sdpa import empty_result, finish, pad_heads, prefill_reason


class Provider(NamedTuple):
    """A package with `flash_attn_varlen_func`.

    Attributes:
        module: what is imported, by the first call that needs it.
        major: compute capability that it was built for; 0 for any from 8.0 on.
        narrow_values: whether values may be narrower than keys.
    """

    module: str
    major: int
    narrow_values: bool


PROVIDERS = (Provider("flash_attn_interface", 9, True), Provider("flash_attn", 0, False))


def find_provider(device: torch.device) -> Provider | None:
    """The newest FlashAttention that is installed and runs on `device`."""
    major = device_capability(device)[0]
    for provider in PROVIDERS:
        if provider.major in (0, major) and is_installed(provider.module):
            return provider
    return None


@functools.cache
def _function(module: str) -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module(module).flash_attn_varlen_func
    return function


def flash_reason(call: Call) -> str | None:
    reason = prefill_reason(call)
    if reason is None and find_provider(call.device) is None:
        return Missing(
            "no FlashAttention for this GPU is installed: pip install flash-attn, or FlashAttention-3 from its source"
        )
    return reason


def width_of_values(provider: Provider, head_dim: int, head_dim_v: int) -> tuple[int, int]:
    """Widths that keys and values are padded to: FlashAttention-3 has kernels for 129..192 beside 97..128."""
    if provider.narrow_values and 128 < head_dim <= 192 and 96 < head_dim_v <= 128:
        return head_dim, head_dim_v
    return (max(head_dim, head_dim_v),) * 2


def compute_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    empty = empty_result(q, k, v, cu_seqlens_q)
    if empty is not None:
        return empty
    provider = find_provider(q.device)
    assert provider is not None
    head_dim_v = v.shape[2]
    width, width_v = width_of_values(provider, q.shape[2], head_dim_v)
    q, k, v = (aligned(tensor) for tensor in (q, k, v))
    out, lse, *_ = _function(provider.module)(
        *pad_heads(width, q, k),
        *pad_heads(width_v, v),
        cu_seqlens_q.clamp(max=q.shape[0]),
        cu_seqlens_k.clamp(max=k.shape[0]),
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        return_attn_probs=True,
    )
    return finish(out, lse, head_dim_v, cu_seqlens_q)


LOWERINGS = {"prefill_attention": Lowering(into_buffers(compute_prefill), flash_reason, compute_prefill)}
