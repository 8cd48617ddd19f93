"""Dense MLA decode: DeepSeek-V3, Kimi K2. Prefill is the layer's, by its MLA prefill backend.

Decodes may have several tokens, and differ in how many: each token has its own number of keys, worked out once a step
on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonDecodeMetadata,
    MLACommonImpl,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionCGSupport, MultipleOf

from ... import ops
from .shared import CacheWriter, MlaBackend, cache_format, query_of, step_metadata


@dataclass
class DenseDecodeMetadata(MLACommonDecodeMetadata):
    """The tensors that the layers of a step read.

    Attributes:
        req_id_per_token: `[num_decode_tokens]` int32, -1 for padding.
        key_lens: `[num_decode_tokens]` int32, keys that each token sees, 0 for padding.
    """

    req_id_per_token: torch.Tensor
    key_lens: torch.Tensor


class DenseMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """The base's, and two rows a decode token: one launch on the device a step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.step = step_metadata(vllm_config, kv_cache_spec.block_size, device)

    def _build_decode(
        self,
        *,
        block_table_tensor: torch.Tensor,
        seq_lens_device: torch.Tensor,
        query_start_loc_device: torch.Tensor,
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **_: Any,
    ) -> DenseDecodeMetadata:
        self.step.build(query_start_loc_device, seq_lens_device, block_table_tensor[:, :0])
        return DenseDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            req_id_per_token=self.step.req_id_per_token[:num_decode_tokens],
            key_lens=self.step.key_lens[:num_decode_tokens],
        )


class DenseImpl(CacheWriter, MLACommonImpl[MLACommonMetadata]):
    """One layer."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        decode = attn_metadata.decode
        assert isinstance(decode, DenseDecodeMetadata)
        queries, q_rope = query_of(q)
        num_tokens = queries.shape[0]
        return ops.paged_attention(
            queries,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.req_id_per_token[:num_tokens],
            decode.key_lens[:num_tokens],
            self.scale,
            cache_format(self.kv_cache_dtype, kv_c_and_k_pe_cache),
            q_rope=q_rope,
        )


class DenseBackend(MlaBackend, MLACommonBackend):
    """The answers that vLLM wants from a backend before it makes one."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "bfloat16", "float16"]

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @staticmethod
    def get_builder_cls() -> type[DenseMetadataBuilder]:
        return DenseMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[DenseImpl]:
        return DenseImpl
