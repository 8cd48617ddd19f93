"""Sparse MLA for the vLLM whose sparse backends share a base (0.33): DeepSeek-V3.2, GLM-5.

The base builds the metadata, and sends short prefills to dense attention. Everything else is one launch over the
indexer's choice, which the kernel translates. Where vLLM translates itself (decode context parallelism, offloaded
caches) the kernel reads rows of a flat view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm import envs
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, MultipleOf
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from ... import ops
from .shared import CacheWriter, SparseMlaBackend, attend_chosen, cache_format, query_of, serve_indexer


@dataclass(kw_only=True)
class SparseMetadata(SparseMLACommonMetadata):
    """The base's."""


class SparseMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMetadata]):
    """The base's, which works on the device; decodes may differ in length."""

    metadata_cls = SparseMetadata

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True, supports_dcp_with_varlen=interleave == 1)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Any batch, where none of it goes to dense attention, which plans on the host."""
        if vllm_config.attention_config.sparse_mla_force_mqa or envs.VLLM_BATCH_INVARIANT:
            return AttentionCGSupport.ALWAYS
        return AttentionCGSupport.UNIFORM_BATCH


class SparseImpl(CacheWriter, SparseMLACommonImpl[SparseMetadata]):
    """One layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(self, *arguments: Any, indexer: Any = None, **options: Any) -> None:
        super().__init__(*arguments, indexer=indexer, **options)
        self.deterministic = bool(envs.VLLM_BATCH_INVARIANT)
        self.supports_dense_mha_prefill = not self.deterministic  # dense or not, by the other prefills of a step
        serve_indexer(indexer, self.deterministic)

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: SparseMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self.dcp_world_size > 1 or isinstance(self.index_group, HiSparseMLAIndexGroup):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        return attend_chosen(
            q,
            kv_c_and_k_pe_cache,
            self.topk_indices_buffer,
            self.scale,
            self.kv_cache_dtype,
            attn_metadata,
            deterministic=self.deterministic,
        )

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,
        valid_counts: torch.Tensor,
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Over physical rows: other layers' pages may lie between those of this cache, and count."""
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        queries, q_rope = query_of(q)
        return ops.paged_sparse_attention(
            queries,
            rows.unsqueeze(1),
            topk_indices,
            self.scale,
            cache_format(self.kv_cache_dtype, kv_cache),
            q_rope=q_rope,
            deterministic=self.deterministic,
        )


class SparseBackend(SparseMlaBackend, AttentionBackend):
    """The answers that vLLM wants from a backend before it makes one."""

    @staticmethod
    def get_name() -> str:
        return "MLA_OPS"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(64)]  # the indexer's, whose cache has the same blocks; the kernels take any

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks whole rows apart, where other layers' pages lie between them: `_forward_mqa_kernel` reads rows."""
        return align_blocks_to_rows(spec)

    @staticmethod
    def get_builder_cls() -> type[SparseMetadataBuilder]:
        return SparseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl
