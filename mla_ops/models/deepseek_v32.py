"""DeepSeek-V3.2 over `torch.ops.mla.*`: the weights of a Hugging Face model, our attention and caches.

The model's own modules (projections, norms, router, MLPs) are called as they are. Attention runs in the absorbed form:
a query is multiplied by W_UK and meets the 512-wide latents in the cache, the result is multiplied by W_UV, and
per-head keys and values never exist. W_UK and W_UV are views of `kv_b_proj`; no weight is copied. A prefill of
sequences no longer than `index_topk` runs dense, over expanded keys: the indexer would choose them all.

One function serves prefill, decode and mixed batches: tokens are flat, what differs is in the metadata buffers.
Nothing in it depends on a value on the host, so it traces with `fullgraph=True` and can be captured in a CUDA graph.

The two rotations differ, as they do in the model: the attention pairs neighbouring dims (0, 1), (2, 3), ..., the
indexer pairs the halves (0, 32), (1, 33), .... Index scores follow transformers: no Hadamard rotation (it cancels in
the dot product) and no fp8 rounding.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..formats import LATENT_DIM, ROPE_DIM, allocate_cache, get_format
from ..metadata import StepMetadata
from ..ops import choose_prefill, concat_and_cache, paged_sparse_attention
from .dense_prefill import DensePrefill, attend_expanded
from .parts import INDEX_DIM, PLAIN_FORMATS, check_model_type, choose_keys, mix_experts


class LayerCache(NamedTuple):
    """The state of one layer: two whole tensors, never views of a pool.

    Attributes:
        latent: `[num_blocks, block_size, row_width]` of the cache format, what attention reads.
        index_keys: `[num_blocks, block_size, 128]` of the model's dtype, what the indexer scores against.
    """

    latent: torch.Tensor
    index_keys: torch.Tensor


@dataclass(frozen=True)
class DecoderCache:
    """The paged caches of all layers. They share one block table: block b of a request is block b in every tensor."""

    layers: list[Any]
    cache_format: str
    index_format: str
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.layers[0].latent.shape[0]

    @property
    def latent_bytes_per_token(self) -> int:
        """Bytes that a token takes in the latent caches of all layers together."""
        return len(self.layers) * get_format(self.cache_format).bytes_per_token()

    @property
    def index_bytes_per_token(self) -> int:
        """Bytes that a token takes in the index-key caches of all layers together."""
        return len(self.layers) * get_format(self.index_format).bytes_per_token(INDEX_DIM)


class StepInputs(NamedTuple):
    """What one step reads besides weights and caches. The first six have a row for each token.

    Attributes:
        input_ids: `[num_tokens]` int64; anything valid for padding.
        positions, slot_mapping, req_id_per_token, key_lens, topk_length: as in `StepMetadata`, cut to `num_tokens`.
        block_table: `[max_num_requests, max_blocks_per_request]` int32.
        dense: what a step over expanded keys reads beside that; None for one in the absorbed form.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    req_id_per_token: torch.Tensor
    key_lens: torch.Tensor
    topk_length: torch.Tensor
    block_table: torch.Tensor
    dense: DensePrefill | None = None

    @classmethod
    def from_metadata(
        cls, input_ids: torch.Tensor, metadata: StepMetadata, max_context_tokens: int | None = None
    ) -> StepInputs:
        """The metadata's buffers, cut to the tokens of `input_ids` where those are fewer than the capacity.

        With `max_context_tokens`, an upper bound of what the requests have in the cache, the step runs dense.
        """
        num_tokens = input_ids.shape[0]
        if num_tokens > metadata.max_num_tokens:
            raise ValueError(f"input_ids has {num_tokens} tokens, the metadata has room for {metadata.max_num_tokens}")

        def cut(buffer: torch.Tensor) -> torch.Tensor:
            return buffer if num_tokens == buffer.shape[0] else buffer[:num_tokens]

        return cls(
            input_ids,
            cut(metadata.positions),
            cut(metadata.slot_mapping),
            cut(metadata.req_id_per_token),
            cut(metadata.key_lens),
            cut(metadata.topk_length),
            metadata.block_table,
            None if max_context_tokens is None else DensePrefill.plan(metadata, max_context_tokens),
        )

    def mark_num_tokens_dynamic(self) -> StepInputs:
        """Tells `torch.compile` that the number of tokens varies, from 2 up: one graph for every length.

        A step of one token is padded to two rows: a symbolic size cannot be 1 in every matmul that Inductor lowers.
        """
        for tensor in self[:6]:
            torch._dynamo.mark_dynamic(tensor, 0)
        return self


def rotate_neighbours(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (0, 1), (2, 3), ... of the last dim; the result holds all firsts, then all seconds.

    Queries and keys are permuted alike, so their dot products are those of the pairs left in place.
    """
    first, second = x[..., 0::2], x[..., 1::2]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (0, 32), (1, 33), ... of the first 64 dims; the other dims stay."""
    first, second, rest = x.split((ROPE_DIM // 2, ROPE_DIM // 2, x.shape[-1] - ROPE_DIM), dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class DeepseekV32Decoder(nn.Module):
    """Runs the weights of a transformers `DeepseekV32ForCausalLM` through `torch.ops.mla.*`.

    Args:
        model: the transformers model, on its device, in its dtype. Its modules and parameters are used, not copied;
            they are only read, without gradients.
        max_model_len: the longest request, prompt and continuation together. The RoPE table has so many rows.

    Raises:
        TypeError: a model of another `config.model_type`.
        ValueError: a geometry that the ops have no format for, or a RoPE type that depends on the sequence length.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    head_dim = LATENT_DIM + ROPE_DIM
    with_sink = False
    model_type = "deepseek_v32"

    def __init__(self, model: Any, max_model_len: int) -> None:
        super().__init__()
        check_model_type(model, self.model_type, type(self).__name__)
        config = model.config
        self.check_config(config, max_model_len)
        self.config = config
        self.model: Any = model
        self.max_model_len = max_model_len
        self.num_heads = int(config.num_attention_heads)
        self.index_topk = int(getattr(config, "index_topk", max_model_len))
        weight = model.model.embed_tokens.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device

        # The model's own module fills the table, so that every RoPE variant it knows is rounded as it rounds it.
        # The first half of a row holds the angles of the 32 pairs; the second half repeats it.
        positions = torch.arange(max_model_len, device=self.device).unsqueeze(0)
        with torch.no_grad():
            cos, sin = model.model.rotary_emb(weight[:1].unsqueeze(0), position_ids=positions)
        self.register_buffer("cos", cos[0, :, : ROPE_DIM // 2].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0, :, : ROPE_DIM // 2].contiguous(), persistent=False)

    @staticmethod
    def check_config(config: Any, max_model_len: int) -> None:
        """Raises ValueError for a geometry that the ops have no format for."""
        check_sizes(config, max_model_len, kv_lora_rank=LATENT_DIM, qk_rope_head_dim=ROPE_DIM, index_head_dim=INDEX_DIM)
        if config.q_lora_rank is None:
            raise ValueError("config.q_lora_rank must be set: the indexer reads the low-rank query")

    def allocate_cache(
        self, cache_format: str, num_blocks: int, block_size: int, max_num_requests: int = 1
    ) -> DecoderCache:
        """Zeroed caches for every layer.

        Args:
            cache_format: `fp8_ds_mla`, or the plain format of the model's dtype.
            num_blocks: blocks that all requests share.
            block_size: tokens a block.
            max_num_requests: no matter here: all state of a request is in its blocks.
        """
        plain = PLAIN_FORMATS[self.dtype]
        self.check_cache_format(cache_format)
        layers = [
            LayerCache(
                allocate_cache(cache_format, num_blocks, block_size, device=self.device),
                allocate_cache(plain, num_blocks, block_size, head_dim=INDEX_DIM, device=self.device),
            )
            for _ in self.model.model.layers
        ]
        return DecoderCache(layers, cache_format, plain, block_size)

    def check_cache_format(self, cache_format: str) -> None:
        """Raises ValueError for a format that does not go with the model's dtype."""
        plain = PLAIN_FORMATS[self.dtype]
        if cache_format not in (plain, "fp8_ds_mla"):
            raise ValueError(
                f"a model in {self.dtype} reads cache_format '{plain}' or 'fp8_ds_mla', got '{cache_format}': "
                "load the model in the cache's dtype, or choose one of these"
            )

    def allocate_metadata(self, *, max_num_tokens: int, max_num_requests: int, block_size: int) -> StepMetadata:
        """Step metadata with room for requests of `max_model_len` tokens."""
        return StepMetadata.allocate(
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_blocks_per_request=math.ceil(self.max_model_len / block_size),
            block_size=block_size,
            index_topk=self.index_topk,
            device=self.device,
        )

    def build_step(
        self,
        metadata: StepMetadata,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        """Refreshes the metadata for a step; arguments as `StepMetadata.build` takes them."""
        metadata.build(query_start_loc, seq_lens, block_table)

    def step_inputs(
        self,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        request_rows: torch.Tensor,
        max_context_tokens: int | None = None,
    ) -> StepInputs:
        """What `forward` takes. `request_rows`, the batch row of each request, is for models with state a row.

        `max_context_tokens` is what `dense_context` gave for the step: not None runs it dense.
        """
        return StepInputs.from_metadata(input_ids, metadata, max_context_tokens)

    def dense_context(self, start: int, num_tokens: int, *, any_length: bool = False) -> int | None:
        """An upper bound of the cached tokens of a prefill that runs dense; None if it has to run sparse.

        Args:
            start: tokens of the request that are in the cache.
            num_tokens: new tokens.
            any_length: the bound of every such prefill, so that one compiled step serves them all, at the price of
                chunks that are empty.
        """
        if choose_prefill(start + num_tokens, self.index_topk) == "sparse":
            return None
        return min(self.index_topk, self.max_model_len) if any_length else start

    def forward(
        self,
        inputs: StepInputs,
        layers: list[LayerCache],
        cache_format: str,
        index_format: str,
        one_token_per_request: bool = False,
        logit_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over flat tokens: writes their keys into the caches and attends to all that came before.

        Args:
            inputs: tokens and metadata.
            layers: the caches, written in place.
            cache_format, index_format: formats of the latent and the index caches.
            one_token_per_request: a hint for the indexer's scoring, which is exact either way. True reads the keys of
                each token's request (memory `num_tokens * max_model_len * 128`): for decode. False scores all tokens
                against each request of the block table (work times the number of requests): for prefill.
            logit_rows: `[n]` int64, tokens whose logits are wanted; None for all.

        Returns:
            logits `[num_tokens or n, vocab_size]` in the model's dtype. Rows of padding are finite and mean nothing.
        """
        for tensor in inputs[1:6]:
            torch._check(tensor.shape[0] == inputs.input_ids.shape[0])
        model = self.model.model
        positions = inputs.positions.long()
        cos, sin = self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)
        hidden = model.embed_tokens(inputs.input_ids)
        workspace = None if inputs.dense is None else inputs.dense.workspace(cache_format, hidden.device)
        formats = cache_format, index_format
        for layer, cache in zip(model.layers, layers, strict=True):
            normed = layer.input_layernorm(hidden)
            hidden = hidden + self._attention(
                layer.self_attn, normed, cos, sin, inputs, cache, *formats, one_token_per_request, workspace
            )
            normed = layer.post_attention_layernorm(hidden)
            hidden = hidden + feed_forward(layer.mlp, normed)
        if logit_rows is not None:
            hidden = hidden[logit_rows]
        return self.model.lm_head(model.norm(hidden))

    def _attention(
        self,
        attention: Any,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        cache: LayerCache,
        cache_format: str,
        index_format: str,
        one_token_per_request: bool,
        workspace: torch.Tensor | None,
    ) -> torch.Tensor:
        num_tokens = hidden.shape[0]
        nope_dim = attention.qk_nope_head_dim

        q_residual = attention.q_a_layernorm(attention.q_a_proj(hidden))
        q = attention.q_b_proj(q_residual).view(num_tokens, self.num_heads, nope_dim + ROPE_DIM)
        q_nope, q_pe = q.split((nope_dim, ROPE_DIM), dim=-1)
        q_pe = rotate_neighbours(q_pe, cos, sin)

        kv_c, k_pe = attention.kv_a_proj_with_mqa(hidden).split((LATENT_DIM, ROPE_DIM), dim=-1)
        kv_c = attention.kv_a_layernorm(kv_c)
        k_pe = rotate_neighbours(k_pe, cos[:, 0], sin[:, 0])
        concat_and_cache(kv_c, k_pe, cache.latent, inputs.slot_mapping, cache_format)

        self._write_index_keys(attention.indexer, hidden, cos, sin, inputs, cache.index_keys, index_format)
        if inputs.dense is not None and workspace is not None:
            q = torch.cat((q_nope, q_pe), dim=-1)
            latents = kv_c, k_pe, cache.latent, cache_format, inputs.block_table
            value = attend_expanded(attention, q, *latents, inputs.dense, workspace)
            return attention.o_proj(value.flatten(1))

        indices = self._select_keys(
            attention.indexer, hidden, q_residual, cos, sin, inputs, cache.index_keys, one_token_per_request
        )
        w_uk, w_uv = self._absorbed(attention)
        q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1)
        out, _ = paged_sparse_attention(
            torch.cat((q_latent, q_pe), dim=-1),
            cache.latent,
            indices,
            attention.scaling,
            cache_format,
            topk_length=inputs.topk_length,
            block_table=inputs.block_table,
            req_id_per_token=inputs.req_id_per_token,
        )
        value = torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        return attention.o_proj(value.flatten(1))

    def _absorbed(self, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK `[num_heads, nope, 512]` and W_UV `[num_heads, v, 512]`, views of `kv_b_proj`."""
        dims = attention.qk_nope_head_dim, attention.v_head_dim
        w_uk, w_uv = attention.kv_b_proj.weight.view(self.num_heads, sum(dims), LATENT_DIM).split(dims, dim=1)
        return w_uk, w_uv

    def _write_index_keys(
        self,
        indexer: Any,
        hidden: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        index_cache: torch.Tensor,
        index_format: str,
    ) -> None:
        k = rotate_halves(indexer.k_norm(indexer.wk(hidden)), cos[:, 0], sin[:, 0])
        half = INDEX_DIM // 2
        concat_and_cache(k[:, :half], k[:, half:], index_cache, inputs.slot_mapping, index_format)

    def _select_keys(
        self,
        indexer: Any,
        hidden: torch.Tensor,
        q_residual: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        inputs: StepInputs,
        index_cache: torch.Tensor,
        one_token_per_request: bool,
    ) -> torch.Tensor:
        """The lightning indexer: scores every key, this step's included, and keeps the best.

        Returns:
            `[num_tokens, min(index_topk, capacity)]` int32 positions in the token's request, best first, -1 where a
            token sees fewer keys.
        """
        num_tokens = hidden.shape[0]
        q = indexer.wq_b(q_residual).view(num_tokens, indexer.n_heads, INDEX_DIM)
        q = rotate_halves(q, cos, sin)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype)).float() * indexer.n_heads**-0.5

        return choose_keys(
            q,
            weights,
            indexer.softmax_scale,
            index_cache,
            inputs.block_table,
            inputs.req_id_per_token,
            inputs.key_lens,
            self.index_topk,
            one_token_per_request,
        )


def feed_forward(mlp: Any, hidden: torch.Tensor) -> torch.Tensor:
    """A dense layer's MLP, or a sparse layer's mixture of experts; `[num_tokens, hidden_size]` both ways."""
    if not hasattr(mlp, "experts"):
        return mlp(hidden)
    _, routing_weights, routing = mlp.gate(hidden)
    experts = mlp.experts

    def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return experts.act_fn(gate) * up

    return mix_experts(experts, hidden, routing, routing_weights, activate) + mlp.shared_experts(hidden)


def check_sizes(config: Any, max_model_len: int, **expected: int) -> None:
    """Raises ValueError unless the config has these sizes, and heads, RoPE and lengths that the ops can take."""
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"config.{name} must be {value}, the width that the cache formats have, got {getattr(config, name)}"
            )
    if not 1 <= config.num_attention_heads <= 128:
        raise ValueError(f"config.num_attention_heads must be 1 to 128, got {config.num_attention_heads}")
    rope_type = (config.rope_parameters or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ValueError(
            f"RoPE type '{rope_type}' changes with the sequence length, which a table of angles cannot hold"
        )
    if not 1 <= max_model_len <= config.max_position_embeddings:
        raise ValueError(f"max_model_len must be 1 to {config.max_position_embeddings}, got {max_model_len}")
