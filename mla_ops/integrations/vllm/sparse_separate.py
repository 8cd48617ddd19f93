"""Sparse MLA for the vLLM whose sparse backends are classes of their own (0.24): DeepSeek-V3.2, GLM-5.

Prefill, decode, speculative decode and mixed batches are one launch: the indexer's choice says which keys a token sees.
Its entries are positions in a request; the kernel translates them, so that no index tensor is written a layer. Heads
are not padded, nothing is planned, and no batch has to be ordered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    SparseMLAAttentionImpl,
)

from ...formats import FORMATS
from .shared import CacheWriter, SparseMlaBackend, attend_chosen, request_of_token, serve_indexer


@dataclass
class SparseMetadata(AttentionMetadata):
    """The tensors that the layers of a step read.

    Attributes:
        num_actual_tokens: query tokens, with those that pad a captured step.
        block_table: `[num_requests, max_blocks]` int32.
        req_id_per_token: `[num_actual_tokens]` int32; of padding, past the last request.
    """

    num_reqs: int
    max_query_len: int
    max_seq_len: int
    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor


class SparseMetadataBuilder(AttentionMetadataBuilder[SparseMetadata]):
    """One launch on the device a step: no copy, no synchronisation, no look at lengths on the host."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.tokens = torch.arange(max_num_tokens, dtype=torch.int32, device=device)
        self.req_id_per_token = torch.zeros_like(self.tokens)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> SparseMetadata:
        common = common_attn_metadata
        num_tokens = common.num_actual_tokens
        return SparseMetadata(
            num_reqs=common.num_reqs,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            num_actual_tokens=num_tokens,
            query_start_loc=common.query_start_loc,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            req_id_per_token=request_of_token(
                common.query_start_loc, self.tokens[:num_tokens], self.req_id_per_token[:num_tokens]
            ),
        )


class SparseImpl(CacheWriter, SparseMLAAttentionImpl[SparseMetadata]):
    """One layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        topk_indices_buffer: torch.Tensor | None = None,
        indexer: Any = None,
        **mla_arguments: Any,
    ) -> None:
        if alibi_slopes is not None or sliding_window is not None or logits_soft_cap is not None:
            raise NotImplementedError(
                "mla_ops: sparse MLA takes no alibi_slopes, sliding_window or logits_soft_cap, got "
                f"{alibi_slopes}, {sliding_window}, {logits_soft_cap}"
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank: int = mla_arguments["kv_lora_rank"]
        self.deterministic = bool(envs.VLLM_BATCH_INVARIANT)
        self._indexer = indexer
        self._topk_indices_buffer = topk_indices_buffer
        serve_indexer(indexer, self.deterministic)

    @property
    def topk_indices_buffer(self) -> torch.Tensor:
        """The indexer's choice. Layers that have no indexer read that of another, by the buffer they were given."""
        buffer = self._topk_indices_buffer if self._indexer is None else self._indexer.topk_indices_buffer
        assert isinstance(buffer, torch.Tensor)
        return buffer

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        out, _ = attend_chosen(
            q,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer,
            self.scale,
            self.kv_cache_dtype,
            attn_metadata,
            deterministic=self.deterministic,
        )
        return out, None


class SparseBackend(SparseMlaBackend, AttentionBackend):
    """The answers that vLLM wants from a backend before it makes one."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        return [64]  # the indexer's, whose cache has the same blocks; the kernels take any

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        width = FORMATS["fp8_ds_mla"].row_widths[0] if cache_dtype_str == "fp8_ds_mla" else head_size
        return (num_blocks, block_size, width)
