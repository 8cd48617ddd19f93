"""What the backends of both generations of vLLM's interface share. It imports nothing of vLLM's."""

from __future__ import annotations

import torch

from ... import ops

PLAIN = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla")


def cache_format(kv_cache_dtype: str, kv_cache: torch.Tensor) -> str:
    """Our name of the format of vLLM's cache."""
    return kv_cache_dtype if kv_cache_dtype == "fp8_ds_mla" else PLAIN[kv_cache.dtype]


def whole_query(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """The query `[num_tokens, num_heads, 576]`, whose latent and RoPE parts vLLM passes apart."""
    return torch.cat(q, dim=-1) if isinstance(q, tuple) else q


def write_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, kv_cache_dtype: str
) -> None:
    """Writes the keys of the tokens that have a slot. vLLM pads either side of it for captured steps."""
    if kv_cache.numel() == 0:
        return  # a run for profiling, before caches are allocated
    slots = slot_mapping.flatten()
    num_tokens = min(slots.shape[0], kv_c.shape[0])
    ops.concat_and_cache(
        kv_c[:num_tokens],
        k_pe[:num_tokens].view(num_tokens, k_pe.shape[-1]),
        kv_cache,
        slots[:num_tokens],
        cache_format(kv_cache_dtype, kv_cache),
    )


def request_of_token(query_start_loc: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes the request of each of `tokens`, 0, 1, ...; past the last token of the step, the number of requests.

    One launch. A request without tokens is passed over, as are those that pad a captured step.
    """
    return torch.searchsorted(query_start_loc[1:], tokens, right=True, out_int32=True, out=out)
