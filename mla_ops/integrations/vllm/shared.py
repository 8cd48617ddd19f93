"""Parts of the backends of both generations of vLLM's interface. Nothing of vLLM's is imported."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from ... import ops
from ...formats import PLAIN_FORMATS
from ...metadata import StepMetadata
from . import words_asked

KV_CACHE_DTYPES = ("auto", "bfloat16", "fp8_ds_mla")


def cache_format(kv_cache_dtype: str, kv_cache: torch.Tensor) -> str:
    """Our name of the format of vLLM's cache."""
    return kv_cache_dtype if kv_cache_dtype == "fp8_ds_mla" else PLAIN_FORMATS[kv_cache.dtype]


def query_of(q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`q` and `q_rope` as our ops take them: vLLM passes a query whole, or its latent and its RoPE part apart."""
    return q if isinstance(q, tuple) else (q, None)


def serve_indexer(indexer: Any, deterministic: bool) -> None:
    """Takes over the indexer of a sparse layer, where it has one: if `MLA_OPS_VLLM` says so, or if it must.

    A deterministic layer needs it: the order of vLLM's choice, and the choice among near scores, vary with the batch
    and from run to run.
    """
    if indexer is not None and (deterministic or "indexer" in words_asked()):
        from .indexer import serve

        serve(indexer)


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


def step_metadata(vllm_config: Any, block_size: int, device: torch.device) -> StepMetadata:
    """Rows for each token of a step; vLLM's block table is read where it is."""
    max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
    return StepMetadata.allocate(
        max_num_tokens=max_num_tokens,
        max_num_requests=max_num_tokens,  # a captured step may be padded with requests
        max_blocks_per_request=0,
        block_size=block_size,
        index_topk=0,
        device=device,
    )


def request_of_token(query_start_loc: torch.Tensor, tokens: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Writes the request of each of `tokens`, 0, 1, ...; past the last token of the step, the number of requests.

    One launch. A request without tokens is passed over, as are those that pad a captured step.
    """
    return torch.searchsorted(query_start_loc[1:], tokens, right=True, out_int32=True, out=out)


def attend_chosen(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_cache: torch.Tensor,
    chosen: torch.Tensor,
    scale: float,
    kv_cache_dtype: str,
    metadata: Any,
    *,
    deterministic: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the indexer's choice, positions in each token's request, which the kernel translates.

    Args:
        q: the query, whole or in its two parts.
        kv_cache: of one layer.
        chosen: the indexer's buffer, of which the step's tokens have the first rows.
        scale: of the softmax.
        kv_cache_dtype: vLLM's name of the format.
        metadata: has `block_table` and `req_id_per_token`.
        deterministic: a row's bits do not depend on the batch.
    """
    queries, q_rope = query_of(q)
    num_tokens = queries.shape[0]
    return ops.paged_sparse_attention(
        queries,
        kv_cache,
        chosen[:num_tokens],
        scale,
        cache_format(kv_cache_dtype, kv_cache),
        q_rope=q_rope,
        block_table=metadata.block_table,
        req_id_per_token=metadata.req_id_per_token[:num_tokens],
        deterministic=deterministic,
    )


class CacheWriter:
    """Writes the keys of a layer, as every layer does."""

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        skip_scale: bool = False,
    ) -> None:
        write_cache(kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype)


class MlaBackend:
    """Facts of every backend here."""

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return [576]

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


class SparseMlaBackend(MlaBackend):
    """Facts of the sparse ones."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @classmethod
    def is_mla(cls) -> bool:
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True
