"""DeepSeek-V3 over `torch.ops.mla.*`: the weights of a Hugging Face model with dense MLA, our attention and caches.

What `DeepseekV32Decoder` does, without an indexer: a prefill attends to expanded keys, its cached context a chunk at a
time; a decode step attends to the latents of every cached token. Both are exact, for any batch; which one runs is in
the step's inputs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..formats import LATENT_DIM, ROPE_DIM, allocate_cache
from ..ops import concat_and_cache, paged_attention
from .deepseek_v32 import (
    DecoderCache,
    DeepseekV32Decoder,
    StepInputs,
    check_sizes,
    rotate_halves,
    rotate_neighbours,
)
from .dense_prefill import attend_expanded
from .parts import PLAIN_FORMATS


class V3LayerCache(NamedTuple):
    """The state of one layer.

    Attributes:
        latent: `[num_blocks, block_size, row_width]` of the cache format.
    """

    latent: torch.Tensor


class V3DecoderCache(DecoderCache):
    """The paged caches of all layers; there are no index keys."""

    @property
    def index_bytes_per_token(self) -> int:
        return 0


class DeepseekV3Decoder(DeepseekV32Decoder):
    """Runs the weights of a transformers `DeepseekV3ForCausalLM` through `torch.ops.mla.*`.

    Args:
        model: the transformers model, on its device, in its dtype. Its modules and parameters are used, not copied;
            they are only read, without gradients.
        max_model_len: the longest request, prompt and continuation together. The RoPE table has so many rows.

    Raises:
        TypeError: a model of another `config.model_type`.
        ValueError: a geometry that the ops have no format for, or a RoPE type that depends on the sequence length.
    """

    model_type = "deepseek_v3"

    @staticmethod
    def check_config(config: Any, max_model_len: int) -> None:
        """Raises ValueError for a geometry that the ops have no format for."""
        check_sizes(config, max_model_len, kv_lora_rank=LATENT_DIM, qk_rope_head_dim=ROPE_DIM)

    def allocate_cache(
        self, cache_format: str, num_blocks: int, block_size: int, max_num_requests: int = 1
    ) -> V3DecoderCache:
        """Zeroed caches for every layer; arguments as `DeepseekV32Decoder.allocate_cache` takes them."""
        self.check_cache_format(cache_format)
        layers = [
            V3LayerCache(allocate_cache(cache_format, num_blocks, block_size, device=self.device))
            for _ in self.model.model.layers
        ]
        return V3DecoderCache(layers, cache_format, PLAIN_FORMATS[self.dtype], block_size)

    def dense_context(self, start: int, num_tokens: int, *, any_length: bool = False) -> int:
        """An upper bound of the cached tokens of a prefill; arguments as `DeepseekV32Decoder.dense_context`."""
        return self.max_model_len if any_length else start

    def _attention(
        self,
        attention: Any,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        cache: Any,
        cache_format: str,
        index_format: str,
        one_token_per_request: bool,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        nope_dim = attention.qk_nope_head_dim
        rotate = rotate_neighbours if self.config.rope_interleave else rotate_halves
        if attention.q_lora_rank is None:
            q = attention.q_proj(hidden)
        else:
            q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
        q_nope, q_pe = q.unflatten(-1, (self.num_heads, -1)).split((nope_dim, ROPE_DIM), dim=-1)
        q_pe = rotate(q_pe, cos, sin)

        kv_c, k_pe = attention.kv_a_proj_with_mqa(hidden).split((LATENT_DIM, ROPE_DIM), dim=-1)
        kv_c = attention.kv_a_layernorm(kv_c)
        k_pe = rotate(k_pe, cos[:, 0], sin[:, 0])
        concat_and_cache(kv_c, k_pe, cache.latent, inputs.slot_mapping, cache_format)

        if inputs.dense is not None and workspace is not None:
            q = torch.cat((q_nope, q_pe), dim=-1)
            latents = kv_c, k_pe, cache.latent, cache_format, inputs.block_table
            value = attend_expanded(attention, q, *latents, inputs.dense, workspace)
            return attention.o_proj(value.flatten(1))

        w_uk, w_uv = self._absorbed(attention)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        out, _ = paged_attention(
            torch.cat((q_latent, q_pe), dim=-1),
            cache.latent,
            inputs.block_table,
            inputs.req_id_per_token,
            inputs.key_lens,
            attention.scaling,
            cache_format,
        )
        value = torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        return attention.o_proj(value.flatten(1))
