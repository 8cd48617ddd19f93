"""DeepSeek-V4 over `torch.ops.mla.*`: the weights of a Hugging Face model, our attention, compressor and caches.

The model's own modules (projections, norms, routers, shared experts, hyper-connections) are called as they are. A key
is its own value: 448 dims and 64 rotated ones, shared by all heads; what the rotation does to a value is undone behind
the attention, at the query's position. Each layer attends to a sliding window, and by its type to

- `sliding_attention`: nothing else;
- `compressed_sparse_attention` (C4A): the compressed entries, one for 4 tokens, that an indexer chooses;
- `heavily_compressed_attention` (C128A): every compressed entry, one for 128 tokens.

Both sets of keys share one softmax, with a sink for each head. One function serves prefill, decode and mixed batches:
tokens are flat, what differs is in the metadata buffers, and nothing depends on a value on the host.

The first kind of layer turns by the `main` angles, the others by the `compress` ones, in both caches and the indexer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..formats import ROPE_DIM, allocate_cache
from ..metadata import V4StepMetadata
from ..ops import compress_and_cache, concat_and_cache, paged_sparse_attention
from .parts import INDEX_DIM, PLAIN_FORMATS, check_model_type, choose_keys, mix_experts

HEAD_DIM = 512
NOPE_DIM = HEAD_DIM - ROPE_DIM
SLIDING, C4A, C128A = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


class V4LayerCache(NamedTuple):
    """The state of one layer, whole tensors; what its type does not have is None.

    Attributes:
        window: `[num_blocks, ...]` of the cache format, every token's key.
        compressed: the compressed entries, of the same format, in blocks of their own.
        states: `[max_num_requests, tokens of a group, ...]` float32, a ring for each request: what the compressor
            pools.
        index_keys: `[num_blocks, block_size, 128]` of the model's dtype, the indexer's compressed keys, in the same
            blocks as `compressed`.
        index_states: as `states`, of the indexer's compressor.
    """

    window: torch.Tensor
    compressed: torch.Tensor | None = None
    states: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_states: torch.Tensor | None = None


@dataclass(frozen=True)
class V4DecoderCache:
    """The caches of all layers. Block b of a request is block b in every tensor, and holds the same tokens in each.

    Blocks of 256 tokens are so 64 entries of C4A and 2 of C128A.
    """

    layers: list[V4LayerCache]
    cache_format: str
    index_format: str
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.layers[0].window.shape[0]


class V4StepInputs(NamedTuple):
    """What one step reads besides weights and caches.

    Attributes:
        input_ids: `[num_tokens]` int64; anything valid for padding.
        positions, slot_mapping, req_id_per_token: as in `StepMetadata`, cut to `num_tokens`.
        window_indices, window_lens: as in `V4StepMetadata`, cut.
        c4a_slots, c4a_lens, c128a_slots: `slot_mapping` and `compressed_lens` of the compressed caches, cut.
        c128a_indices, c128a_lens: as in `V4StepMetadata`, cut.
        c4a_block_table: `[max_num_requests, blocks]` int32.
        state_block_table: `[max_num_requests, 1]` int32, the ring of each request in every tensor of states.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    req_id_per_token: torch.Tensor
    window_indices: torch.Tensor
    window_lens: torch.Tensor
    c4a_slots: torch.Tensor
    c4a_lens: torch.Tensor
    c128a_slots: torch.Tensor
    c128a_indices: torch.Tensor
    c128a_lens: torch.Tensor
    c4a_block_table: torch.Tensor
    state_block_table: torch.Tensor

    @classmethod
    def from_metadata(
        cls, input_ids: torch.Tensor, metadata: V4StepMetadata, state_block_table: torch.Tensor
    ) -> V4StepInputs:
        """The metadata's buffers, cut to the tokens of `input_ids` where those are fewer than the capacity."""
        num_tokens, step = input_ids.shape[0], metadata.step
        if num_tokens > step.max_num_tokens:
            raise ValueError(f"input_ids has {num_tokens} tokens, the metadata has room for {step.max_num_tokens}")
        rows = (
            step.positions,
            step.slot_mapping,
            step.req_id_per_token,
            metadata.window_indices,
            metadata.window_lens,
            metadata.c4a.slot_mapping,
            metadata.c4a.compressed_lens,
            metadata.c128a.slot_mapping,
            metadata.c128a_indices,
            metadata.c128a_lens,
        )
        cut = (buffer if num_tokens == buffer.shape[0] else buffer[:num_tokens] for buffer in rows)
        return cls._make((input_ids, *cut, metadata.c4a.block_table, state_block_table))

    def mark_num_tokens_dynamic(self) -> V4StepInputs:
        """Tells `torch.compile` that the number of tokens varies, from 2 up: one graph for every length."""
        for tensor in self[:11]:
            torch._dynamo.mark_dynamic(tensor, 0)
        return self


class Angles(NamedTuple):
    """cos and sin of a step's tokens, `[num_tokens, 32]`."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Rotates the neighbouring pairs of the last 64 dims of `[num_tokens, ..., dims]`, where they stand."""
        shape = (x.shape[0], *(1,) * (x.dim() - 2), ROPE_DIM // 2)
        cos, sin = self.cos.view(shape), self.sin.view(shape)
        sin = -sin if back else sin
        rest, tail = x.split((x.shape[-1] - ROPE_DIM, ROPE_DIM), dim=-1)
        first, second = tail[..., 0::2].float(), tail[..., 1::2].float()
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((rest, turned.flatten(-2).to(x.dtype)), dim=-1)


class DeepseekV4Decoder(nn.Module):
    """Runs the weights of a transformers `DeepseekV4ForCausalLM` through `torch.ops.mla.*`.

    Args:
        model: the transformers model, on its device, in its dtype. Its modules and parameters are used, not copied;
            they are only read, without gradients.
        max_model_len: the longest request, prompt and continuation together. The RoPE tables have so many rows.

    Raises:
        TypeError: a model of another `config.model_type`.
        ValueError: a geometry that the ops have no format for, or a RoPE type that depends on the sequence length.
    """

    main_angles: torch.Tensor
    compress_angles: torch.Tensor
    head_dim = HEAD_DIM
    with_sink = True

    def __init__(self, model: Any, max_model_len: int) -> None:
        super().__init__()
        check_model_type(model, "deepseek_v4", type(self).__name__)
        config = model.config
        _check_config(config, max_model_len)
        self.config = config
        self.model: Any = model
        self.max_model_len = max_model_len
        self.num_heads = int(config.num_attention_heads)
        self.index_topk = int(config.index_topk)
        self.ratios: dict[str, int] = {name: int(config.compress_rates[name]) for name in (C4A, C128A)}
        weight = model.model.embed_tokens.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device

        # the model's own module fills the tables; a row holds the cosines of 32 pairs, then their sines, in float32
        positions = torch.arange(max_model_len, device=self.device).unsqueeze(0)
        for name in ("main", "compress"):
            with torch.no_grad():
                angles = model.model.rotary_emb(weight[:1].float(), position_ids=positions, layer_type=name)
            self.register_buffer(f"{name}_angles", torch.cat(angles, dim=-1)[0].contiguous(), persistent=False)

    def allocate_cache(
        self, cache_format: str, num_blocks: int, block_size: int, max_num_requests: int = 1
    ) -> V4DecoderCache:
        """Zeroed caches for every layer.

        Args:
            cache_format: `fp8_ds_mla_v4`, or the plain format of the model's dtype.
            num_blocks: blocks that all requests share.
            block_size: tokens a block, a multiple of 128.
            max_num_requests: rows of the batch; each has a ring of compressor states in every layer.
        """
        self._check_block_size(block_size)
        plain = PLAIN_FORMATS[self.dtype]
        if cache_format not in (plain, "fp8_ds_mla_v4"):
            raise ValueError(
                f"a model in {self.dtype} reads cache_format '{plain}' or 'fp8_ds_mla_v4', got '{cache_format}': "
                "load the model in the cache's dtype, or choose one of these"
            )
        device = self.device

        def states(ratio: int, series: int, head_dim: int) -> torch.Tensor:
            return torch.zeros(max_num_requests, ratio * series, 2 * series * head_dim, device=device)

        layers = []
        for layer in self.model.model.layers:
            kind = layer.self_attn.layer_type
            cache = V4LayerCache(allocate_cache(cache_format, num_blocks, block_size, head_dim=HEAD_DIM, device=device))
            if kind in self.ratios:
                ratio = self.ratios[kind]
                sizes, series = (num_blocks, block_size // ratio), 2 if kind == C4A else 1
                cache = cache._replace(
                    compressed=allocate_cache(cache_format, *sizes, head_dim=HEAD_DIM, device=device),
                    states=states(ratio, series, HEAD_DIM),
                )
                if kind == C4A:
                    cache = cache._replace(
                        index_keys=allocate_cache(plain, *sizes, head_dim=INDEX_DIM, device=device),
                        index_states=states(ratio, series, INDEX_DIM),
                    )
            layers.append(cache)
        return V4DecoderCache(layers, cache_format, plain, block_size)

    def _check_block_size(self, block_size: int) -> None:
        largest = max(self.ratios.values())
        if block_size < 1 or any(block_size % ratio for ratio in self.ratios.values()):
            raise ValueError(
                f"block_size must be a multiple of {largest}, the tokens of the longest group, got {block_size}"
            )

    def allocate_metadata(self, *, max_num_tokens: int, max_num_requests: int, block_size: int) -> V4StepMetadata:
        """Step metadata with room for requests of `max_model_len` tokens."""
        self._check_block_size(block_size)
        return V4StepMetadata.allocate(
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_seq_len=self.max_model_len,
            block_size=block_size,
            c4a_block_size=block_size // self.ratios[C4A],
            c128a_block_size=block_size // self.ratios[C128A],
            window=int(self.config.sliding_window),
            c4a_ratio=self.ratios[C4A],
            c128a_ratio=self.ratios[C128A],
            device=self.device,
        )

    def build_step(
        self,
        metadata: V4StepMetadata,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
    ) -> None:
        """Refreshes the metadata for a step over caches that share one block table."""
        metadata.build(query_start_loc, seq_lens, block_table, block_table, block_table)

    def dense_context(self, start: int, num_tokens: int, *, any_length: bool = False) -> None:
        """None: no prefill runs dense, since window and compressed tokens are what the model was trained with."""

    def step_inputs(
        self, input_ids: torch.Tensor, metadata: V4StepMetadata, request_rows: torch.Tensor
    ) -> V4StepInputs:
        """What `forward` takes. `request_rows` is `[max_num_requests, 1]` int32, the batch row of each request."""
        return V4StepInputs.from_metadata(input_ids, metadata, request_rows)

    def forward(
        self,
        inputs: V4StepInputs,
        layers: list[V4LayerCache],
        cache_format: str,
        index_format: str,
        one_token_per_request: bool = False,
        logit_rows: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One step over flat tokens: writes their keys, states and entries, and attends to all that came before.

        Args:
            inputs: tokens and metadata.
            layers: the caches, written in place.
            cache_format, index_format: formats of the attention caches and of the index keys.
            one_token_per_request: a hint for the indexer's scoring, which is exact either way. True reads the index
                keys of each token's request: for decode. False scores all tokens against each request: for prefill.
            logit_rows: `[n]` int64, tokens whose logits are wanted; None for all.

        Returns:
            logits `[num_tokens or n, vocab_size]` in the model's dtype. Rows of padding mean nothing.
        """
        for tensor in inputs[1:11]:
            torch._check(tensor.shape[0] == inputs.input_ids.shape[0])
        model = self.model.model
        positions = inputs.positions.long()
        main = Angles(*self.main_angles[positions].chunk(2, dim=-1))
        compress = Angles(*self.compress_angles[positions].chunk(2, dim=-1))
        # [1, num_tokens, streams, hidden_size]: the hyper-connections' own layout
        hidden = model.embed_tokens(inputs.input_ids).unsqueeze(1)
        hidden = hidden.expand(-1, self.config.hc_mult, -1).unsqueeze(0).contiguous()
        for layer, cache in zip(model.layers, layers, strict=True):
            angles = main if layer.self_attn.layer_type == SLIDING else compress
            post, comb, collapsed = layer.attn_hc(hidden)
            normed = layer.input_layernorm(collapsed)[0]
            out = self._attention(
                layer.self_attn, normed, angles, inputs, cache, cache_format, index_format, one_token_per_request
            )
            hidden = _mix_streams(post, comb, out, hidden)
            post, comb, collapsed = layer.ffn_hc(hidden)
            out = _feed_forward(layer.mlp, layer.post_attention_layernorm(collapsed)[0], inputs.input_ids)
            hidden = _mix_streams(post, comb, out, hidden)
        if logit_rows is not None:
            hidden = hidden[:, logit_rows]
        return self.model.lm_head(model.norm(model.hc_head(hidden))[0])

    def _attention(
        self,
        attention: Any,
        hidden: torch.Tensor,
        angles: Angles,
        inputs: V4StepInputs,
        cache: V4LayerCache,
        cache_format: str,
        index_format: str,
        one_token_per_request: bool,
    ) -> torch.Tensor:
        num_tokens = hidden.shape[0]
        q_residual = attention.q_a_norm(attention.q_a_proj(hidden))
        q = attention.q_b_proj(q_residual).view(num_tokens, self.num_heads, HEAD_DIM)
        q = angles.rotate(attention.q_b_norm(q))
        key = angles.rotate(attention.kv_norm(attention.kv_proj(hidden)))
        latent, rope = key.split((NOPE_DIM, ROPE_DIM), dim=-1)
        concat_and_cache(latent, rope, cache.window, inputs.slot_mapping, cache_format)

        kind = attention.layer_type
        extra: dict[str, Any] = {}
        if kind == C4A:
            assert cache.compressed is not None
            assert cache.states is not None
            compressor = attention.compressor
            self._compress(compressor, hidden, cache.states, cache.compressed, inputs, inputs.c4a_slots, cache_format)
            chosen = self._select_entries(
                compressor.indexer, hidden, q_residual, angles, inputs, cache, index_format, one_token_per_request
            )
            extra = {
                "extra_kv_cache": cache.compressed,
                "extra_indices": chosen,
                "extra_block_table": inputs.c4a_block_table,
                "req_id_per_token": inputs.req_id_per_token,
            }
        elif kind == C128A:
            assert cache.compressed is not None
            assert cache.states is not None
            slots = inputs.c128a_slots
            self._compress(attention.compressor, hidden, cache.states, cache.compressed, inputs, slots, cache_format)
            extra = {
                "extra_kv_cache": cache.compressed,
                "extra_indices": inputs.c128a_indices,
                "extra_topk_length": inputs.c128a_lens,
            }
        out, _ = paged_sparse_attention(
            q,
            cache.window,
            inputs.window_indices,
            attention.scaling,
            cache_format,
            topk_length=inputs.window_lens,
            attn_sink=attention.sinks.float(),
            **extra,
        )
        out = angles.rotate(out, back=True)
        grouped = attention.o_a_proj(out.reshape(num_tokens, self.config.o_groups, -1))
        return attention.o_b_proj(grouped.flatten(1))

    def _compress(
        self,
        compressor: Any,
        hidden: torch.Tensor,
        states: torch.Tensor,
        entries: torch.Tensor,
        inputs: V4StepInputs,
        slots: torch.Tensor,
        cache_format: str,
    ) -> None:
        """The part that an attention's compressor and an indexer's have in common."""
        hidden = hidden.to(compressor.kv_proj.weight.dtype)
        compress_and_cache(
            compressor.kv_proj(hidden),
            compressor.gate_proj(hidden),
            compressor.position_bias.float(),
            compressor.kv_norm.weight,
            self.compress_angles,
            states,
            entries,
            inputs.state_block_table,
            inputs.req_id_per_token,
            inputs.positions,
            slots,
            compressor.kv_norm.variance_epsilon,
            cache_format,
        )

    def _select_entries(
        self,
        indexer: Any,
        hidden: torch.Tensor,
        q_residual: torch.Tensor,
        angles: Angles,
        inputs: V4StepInputs,
        cache: V4LayerCache,
        index_format: str,
        one_token_per_request: bool,
    ) -> torch.Tensor:
        """The lightning indexer over compressed keys.

        Returns:
            `[num_tokens, min(index_topk, capacity)]` int32 entries of the token's request, best first, -1 where a token
            sees fewer.
        """
        index_keys, index_states = cache.index_keys, cache.index_states
        assert index_keys is not None
        assert index_states is not None
        num_tokens = hidden.shape[0]
        self._compress(indexer, hidden, index_states, index_keys, inputs, inputs.c4a_slots, index_format)
        q = angles.rotate(indexer.q_b_proj(q_residual).view(num_tokens, indexer.num_heads, INDEX_DIM))
        scorer = indexer.scorer
        projected = scorer.weights_proj(hidden.to(scorer.weights_proj.weight.dtype))
        weights = projected.float() * scorer.weights_scaling

        return choose_keys(
            q,
            weights,
            scorer.softmax_scale,
            index_keys,
            inputs.c4a_block_table,
            inputs.req_id_per_token,
            inputs.c4a_lens,
            self.index_topk,
            one_token_per_request,
        )


def _mix_streams(post: torch.Tensor, comb: torch.Tensor, out: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A hyper-connection's way out: the block's output spread over the streams, plus the streams mixed.

    Args:
        post: `[1, num_tokens, streams]` float32.
        comb: `[1, num_tokens, streams in, streams out]` float32: taken transposed.
        out: `[num_tokens, hidden_size]`.
        hidden: `[1, num_tokens, streams, hidden_size]`.
    """
    spread = post.to(hidden.dtype).unsqueeze(-1) * out.unsqueeze(-2)
    return spread + torch.matmul(comb.to(hidden.dtype).transpose(-1, -2), hidden)


def _feed_forward(mlp: Any, hidden: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
    """A mixture of experts, routed by score or by a table of token ids; `[num_tokens, hidden_size]` both ways."""
    _, weights, routing = mlp.gate(hidden, input_ids) if mlp.is_hash else mlp.gate(hidden)
    experts = mlp.experts

    def activate(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return experts.act_fn(gate.clamp(max=experts.limit)) * up.clamp(min=-experts.limit, max=experts.limit)

    return mix_experts(experts, hidden, routing, weights, activate) + mlp.shared_experts(hidden)


def _check_config(config: Any, max_model_len: int) -> None:
    expected = {"head_dim": HEAD_DIM, "qk_rope_head_dim": ROPE_DIM, "index_head_dim": INDEX_DIM}
    for name, value in expected.items():
        if getattr(config, name) != value:
            raise ValueError(
                f"config.{name} must be {value}, the width that the cache formats have, got {getattr(config, name)}"
            )
    if not 1 <= config.num_attention_heads <= 128:
        raise ValueError(f"config.num_attention_heads must be 1 to 128, got {config.num_attention_heads}")
    for name in ("main", "compress"):
        rope_type = config.rope_parameters[name].get("rope_type", "default")
        if rope_type in ("dynamic", "longrope"):
            raise ValueError(
                f"RoPE type '{rope_type}' changes with the sequence length, which a table of angles cannot hold"
            )
    if not 1 <= max_model_len <= config.max_position_embeddings:
        raise ValueError(f"max_model_len must be 1 to {config.max_position_embeddings}, got {max_model_len}")
