"""Attention over latents: DeepSeek-V3 and V3.2, Kimi K2, GLM-5, HY-V4 and Mistral Large 4, by the parts of each layer.

The model's own projections and norms are called as they are. Attention runs in the absorbed form: a query is multiplied
by W_UK and meets the 512-wide latents in the cache, the result is multiplied by W_UV, and per-head keys and values
never exist. W_UK and W_UV are views of `kv_b_proj`; no weight is copied. A prefill runs over expanded keys where that
is exact: without an indexer always, with one as long as it would choose every key.

Index scores follow transformers: no Hadamard rotation, which cancels in the dot product. Beside an fp8 cache the index
keys are fp8 as well, and so are the queries that meet them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..formats import INDEX_DIM, LATENT_DIM, ROPE_DIM, allocate_cache, index_format_of
from ..metadata import StepMetadata
from ..ops import choose_prefill, concat_and_cache, paged_attention, paged_sparse_attention, write_index_cache
from ..pytrees import exportable
from .dense_prefill import DensePrefill, attend_expanded
from .parallel import Ranks
from .parts import Rope, choose_keys, prepare_index_query

if TYPE_CHECKING:  # DTensor takes half a second to import, and some builds of torch have none
    from ..distributed import ContextParallel

OWN, SHARED = "own", "shared"


class LatentLayer(NamedTuple):
    """The parts of one layer's attention.

    Attributes:
        rope: how queries and keys turn; None for a layer without RoPE, whose RoPE dims are zeros here.
        indexer: `own`; `shared` for one that takes what the last layer with its own chose; None for all keys.
        index_rope: how the indexer's queries and keys turn; None for not at all.
        kv_source: the layer whose latents this one reads; its own number, or an earlier one.
    """

    rope: Rope | None
    indexer: str | None
    index_rope: Rope | None
    kv_source: int


@exportable
class LayerCache(NamedTuple):
    """The state of one layer: whole tensors, never views of a pool; what a layer does not have is None.

    Attributes:
        latent: `[num_blocks, block_size, row_width]` of the cache format, what attention reads; None for a layer that
            reads an earlier one's.
        index_keys: of the index format, what an indexer scores against; None for a layer without an indexer of its
            own.
    """

    latent: torch.Tensor | None
    index_keys: torch.Tensor | None = None


@dataclass(frozen=True)
class DecoderCache:
    """The paged caches of all layers. They share one block table: block b of a request is block b in every tensor."""

    layers: list[Any]
    cache_format: str
    index_format: str
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.layers[0][0].shape[0]


@exportable
class StepInputs(NamedTuple):
    """Inputs of one step besides weights and caches. The first five have a row for each token.

    Attributes:
        input_ids: `[num_tokens]` int64; anything valid for padding.
        positions, slot_mapping, req_id_per_token, key_lens: as in `StepMetadata`, cut to `num_tokens`.
        block_table: `[max_num_requests, max_blocks_per_request]` int32.
        dense: what a step over expanded keys reads beside that; None for one in the absorbed form.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    req_id_per_token: torch.Tensor
    key_lens: torch.Tensor
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
            metadata.block_table,
            None if max_context_tokens is None else DensePrefill.plan(metadata, max_context_tokens),
        )

    @property
    def per_token(self) -> tuple[torch.Tensor, ...]:
        """The tensors that have a row for each token."""
        return self[:5]

    def mark_num_tokens_dynamic(self) -> StepInputs:
        """Tells `torch.compile` that the number of tokens varies, from 2 up: one graph for every length.

        A step of one token is padded to two rows: a symbolic size cannot be 1 in every matmul that Inductor lowers.
        """
        for tensor in self.per_token:
            torch._dynamo.mark_dynamic(tensor, 0)
        return self


@dataclass
class LatentStep:
    """Values that the layers of one step share, and that one leaves for the next.

    Attributes:
        inputs, layers, cache_format, index_format: what `Decoder.forward` was given.
        cos, sin: `[num_tokens, 32]`.
        workspace: room for a chunk of expanded context; None for a step in the absorbed form.
        fresh: the latents and RoPE keys that this step wrote, by layer.
        key_lens: keys of each token in this rank's cache.
        context: this rank's part of the contexts; None where caches are whole.
        chosen: what the last indexer chose, and how many keys of each token: positions in the request, or slots of this
            rank's cache under `context`.
    """

    inputs: StepInputs
    layers: list[LayerCache]
    cache_format: str
    index_format: str
    cos: torch.Tensor
    sin: torch.Tensor
    workspace: torch.Tensor | None
    fresh: dict[int, tuple[torch.Tensor, torch.Tensor]]
    key_lens: torch.Tensor
    context: ContextParallel | None = None
    chosen: tuple[torch.Tensor, torch.Tensor] | None = None


class LatentAttention(nn.Module):
    """The attention of every layer of a model, its caches and its metadata.

    Args:
        backbone: the transformers model between embedding and head.
        config: its config.
        parts: what each layer is made of.
        max_model_len: the longest request. The RoPE table has so many rows.
        ranks: who shares weights and caches.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    head_dim = LATENT_DIM + ROPE_DIM
    quantized_format = "fp8_ds_mla"
    deterministic = False

    def __init__(self, backbone: Any, config: Any, parts: list[LatentLayer], max_model_len: int, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.contexts: dict[int, ContextParallel] = {}
        self.parts = parts
        self.max_model_len = max_model_len
        self.num_heads = int(config.num_attention_heads) // ranks.tp_size
        # a rank with a part of the keys attends with every head
        self.query_heads = self.num_heads * (1 if ranks.dcp_group is None else ranks.tp_size)
        self.has_indexer = any(part.indexer is not None for part in parts)
        self.index_topk = int(config.index_topk) if self.has_indexer else max_model_len
        self.index_heads = int(config.index_n_heads) if self.has_indexer else 0
        self.with_sink = hasattr(backbone.layers[0].self_attn, "sinks")
        weight = backbone.embed_tokens.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device

        # The model's own module fills the table, so that every RoPE variant it knows is rounded as it rounds it.
        # The first half of a row holds the angles of the 32 pairs; the second half repeats it.
        positions = torch.arange(max_model_len, device=self.device).unsqueeze(0)
        with torch.no_grad():
            cos, sin = backbone.rotary_emb(weight[:1].unsqueeze(0), position_ids=positions)
        self.register_buffer("cos", cos[0, :, : ROPE_DIM // 2].contiguous(), persistent=False)
        self.register_buffer("sin", sin[0, :, : ROPE_DIM // 2].contiguous(), persistent=False)

    def allocate_cache(
        self, cache_format: str, num_blocks: int, block_size: int, max_num_requests: int = 1
    ) -> DecoderCache:
        """Zeroed caches for every layer; all state of a request is in its blocks.

        `block_size` counts tokens on all ranks together: with contexts over ranks, each has its part of every block.
        """
        rows = self._rows(block_size)
        index_format = index_format_of(cache_format)
        layers = []
        for number, part in enumerate(self.parts):
            latent = index_keys = None
            if part.kv_source == number:
                latent = allocate_cache(cache_format, num_blocks, rows, device=self.device)
            if part.indexer == OWN:
                index_keys = allocate_cache(index_format, num_blocks, rows, head_dim=INDEX_DIM, device=self.device)
            layers.append(LayerCache(latent, index_keys))
        return DecoderCache(layers, cache_format, index_format, block_size)

    def _rows(self, block_size: int) -> int:
        """Tokens of a block in this rank's cache."""
        if self.ranks.dcp_group is None:
            return block_size
        from ..distributed import ContextParallel

        context = ContextParallel.of(self.ranks.dcp_group, block_size, self.ranks.interleave)
        self.contexts[context.local_block_size] = context
        return context.local_block_size

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
        metadata.build(query_start_loc, seq_lens, block_table)

    def step_inputs(
        self,
        input_ids: torch.Tensor,
        metadata: StepMetadata,
        request_rows: torch.Tensor,
        max_context_tokens: int | None = None,
    ) -> StepInputs:
        return StepInputs.from_metadata(input_ids, metadata, max_context_tokens)

    def dense_context(self, start: int, num_tokens: int, *, any_length: bool = False) -> int | None:
        """An upper bound of the cached tokens of a prefill that runs dense; None if it has to run sparse."""
        if self.ranks.dcp_group is not None:  # the context's latents are on other ranks
            return None
        if self.has_indexer and choose_prefill(start + num_tokens, self.index_topk) == "sparse":
            return None
        return min(self.index_topk, self.max_model_len) if any_length else start

    def begin(
        self,
        inputs: StepInputs,
        layers: list[LayerCache],
        cache_format: str,
        index_format: str,
    ) -> LatentStep:
        """The values that every layer of a step reads."""
        positions = inputs.positions.long()
        workspace = None if inputs.dense is None else inputs.dense.workspace(cache_format, self.device)
        rotation = self.cos[positions], self.sin[positions]
        context, key_lens = None, inputs.key_lens
        if self.ranks.dcp_group is not None:
            latent = layers[0].latent
            assert latent is not None
            context = self.contexts[latent.shape[1]]
            key_lens = context.lengths(key_lens)
            inputs = inputs._replace(slot_mapping=context.slots(inputs.slot_mapping))
        shared = inputs, layers, cache_format, index_format
        return LatentStep(*shared, *rotation, workspace, {}, key_lens, context)

    def attend(self, number: int, attention: Any, hidden: torch.Tensor, step: LatentStep) -> torch.Tensor:
        """One layer: `[num_tokens, hidden_size]` normed in, the same out of `o_proj`."""
        inputs, part, cache = step.inputs, self.parts[number], step.layers[number]
        q_residual, q = self._queries(attention, hidden)
        nope_dim = attention.qk_nope_head_dim
        q_nope, q_pe = q.split((nope_dim, q.shape[-1] - nope_dim), dim=-1)
        q_pe = q.new_zeros(*q.shape[:2], ROPE_DIM) if part.rope is None else part.rope.rotate(q_pe, step.cos, step.sin)
        if hasattr(attention, "softmax_scaling"):  # a factor of each head that depends on the position
            both = torch.cat((q_nope, q_pe), dim=-1).unsqueeze(0)
            both = attention.softmax_scaling(both, inputs.positions.unsqueeze(0), head_dim_first=False)
            q_nope, q_pe = both[0].split((nope_dim, ROPE_DIM), dim=-1)

        latent = step.layers[part.kv_source].latent
        assert latent is not None
        if part.kv_source == number:
            kv_c, k_pe = self._keys(attention, hidden, part, step)
            concat_and_cache(kv_c, k_pe, latent, inputs.slot_mapping, step.cache_format)
            step.fresh[number] = kv_c, k_pe
        if cache.index_keys is not None:
            self._write_index_keys(attention.indexer, hidden, part, step, cache.index_keys)

        if inputs.dense is not None and step.workspace is not None:
            q = torch.cat((q_nope, q_pe), dim=-1)
            fresh = step.fresh[part.kv_source]
            value, lse = attend_expanded(
                attention, q, *fresh, latent, step.cache_format, inputs.block_table, inputs.dense, step.workspace
            )
            if self.with_sink:
                value = (value * torch.sigmoid(lse - attention.sinks.float()).unsqueeze(-1)).to(value.dtype)
            return self._leave(attention, hidden, value)

        dims = nope_dim, attention.v_head_dim
        w_uk, w_uv = attention.kv_b_proj.weight.view(self.num_heads, sum(dims), LATENT_DIM).split(dims, dim=1)
        q, q_rope = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1), q_pe
        if step.context is not None and self.ranks.tp_mesh is not None:
            both = step.context.gather_heads(torch.cat((q, q_rope), dim=-1))  # one collective for both
            q, q_rope = both.split((LATENT_DIM, ROPE_DIM), dim=-1)
        sink = attention.sinks.float() if self.with_sink else None
        if part.indexer is None:
            out, lse = paged_attention(
                q,
                latent,
                inputs.block_table,
                inputs.req_id_per_token,
                step.key_lens,
                attention.scaling,
                step.cache_format,
                q_rope=q_rope,
                deterministic=self.deterministic,
            )
        else:
            if part.indexer == OWN:
                assert cache.index_keys is not None
                step.chosen = self._select_keys(attention.indexer, hidden, q_residual, part, step, cache.index_keys)
            assert step.chosen is not None
            indices, counts = step.chosen
            whole = step.context is None
            out, lse = paged_sparse_attention(
                q,
                latent,
                indices,
                attention.scaling,
                step.cache_format,
                q_rope=q_rope,
                topk_length=counts,
                attn_sink=sink if whole else None,
                block_table=inputs.block_table if whole else None,
                req_id_per_token=inputs.req_id_per_token if whole else None,
                deterministic=self.deterministic,
            )
        if step.context is not None:
            merge = step.context.merge if self.ranks.tp_mesh is None else step.context.merge_heads
            out, _ = merge(out, lse, sink)
        value = torch.bmm(out.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        return self._leave(attention, hidden, value)

    def _queries(self, attention: Any, hidden: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """The low-rank query, None where a model has none, and `[num_tokens, num_heads, head_dim]`."""
        residual = None
        if getattr(attention, "q_a_proj", None) is not None:
            residual = attention.q_a_layernorm(attention.q_a_proj(hidden))
            q = attention.q_b_proj(residual)
        else:
            q = attention.q_proj(hidden)
        return residual, torch.unflatten(q, -1, (self.num_heads, -1))

    def _keys(
        self, attention: Any, hidden: torch.Tensor, part: LatentLayer, step: LatentStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        both = attention.kv_a_proj_with_mqa(hidden)
        if part.rope is None:
            return attention.kv_a_layernorm(both), both.new_zeros(both.shape[0], ROPE_DIM)
        kv_c, k_pe = both.split((LATENT_DIM, ROPE_DIM), dim=-1)
        return attention.kv_a_layernorm(kv_c), part.rope.rotate(k_pe, step.cos, step.sin)

    @staticmethod
    def _leave(attention: Any, hidden: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if hasattr(attention, "gate_proj"):
            value = value * torch.sigmoid(attention.gate_proj(hidden).view_as(value))
        return attention.o_proj(value.flatten(1))

    def _write_index_keys(
        self, indexer: Any, hidden: torch.Tensor, part: LatentLayer, step: LatentStep, index_cache: torch.Tensor
    ) -> None:
        # a norm that is kept in float32 takes its input there
        k = indexer.k_norm(indexer.wk(hidden).to(indexer.k_norm.weight.dtype)).to(hidden.dtype)
        if part.index_rope is not None:
            k = part.index_rope.rotate(k, step.cos, step.sin)
        write_index_cache(k, index_cache, step.inputs.slot_mapping, step.index_format)

    def _select_keys(
        self,
        indexer: Any,
        hidden: torch.Tensor,
        q_residual: torch.Tensor | None,
        part: LatentLayer,
        step: LatentStep,
        index_cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The lightning indexer: scores every key, this step's included, and keeps the best, as `choose_keys` says."""
        inputs = step.inputs
        q = indexer.wq_b(indexer.q_input_norm(hidden) if q_residual is None else q_residual)
        q = q.view(hidden.shape[0], indexer.n_heads, INDEX_DIM)
        if hasattr(indexer, "softmax_scaling"):
            q = indexer.softmax_scaling(q.unsqueeze(0), inputs.positions.unsqueeze(0), head_dim_first=False)[0]
        if part.index_rope is not None:
            q = part.index_rope.rotate(q, step.cos, step.sin)
        weights = indexer.weights_proj(hidden.to(indexer.weights_proj.weight.dtype))
        context = step.context
        if context is not None:
            q, weights = prepare_index_query(
                q, weights, indexer.softmax_scale * indexer.n_heads**-0.5, step.index_format
            )
            requests = inputs.block_table, inputs.req_id_per_token
            chosen, _ = context.select_keys(
                q, index_cache, weights, inputs.key_lens, *requests, self.index_topk, step.index_format
            )
            return context.local_indices(chosen, *requests)
        return choose_keys(
            q,
            weights,
            indexer.softmax_scale * indexer.n_heads**-0.5,
            index_cache,
            inputs.block_table,
            inputs.req_id_per_token,
            inputs.key_lens,
            self.index_topk,
            step.index_format,
        )
