"""DeepSeek-V4's attention over `torch.ops.mla.*`: windows, compressors and their caches.

The model's own projections and norms are called as they are. A key is its own value: 448 dims and 64 rotated ones,
shared by all heads; what the rotation does to a value is undone behind the attention, at the query's position. Each
layer attends to a sliding window, and by its type to

- `sliding_attention`: nothing else;
- `compressed_sparse_attention` (C4A): the compressed entries, one for 4 tokens, that an indexer chooses;
- `heavily_compressed_attention` (C128A): every compressed entry, one for 128 tokens.

Both sets of keys share one softmax, with a sink for each head.

The first kind of layer turns by the `main` angles, the others by the `compress` ones, in both caches and the indexer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from ..formats import INDEX_DIM, ROPE_DIM, allocate_cache, index_format_of
from ..metadata import V4StepMetadata
from ..ops import compress_and_cache, concat_and_cache, paged_sparse_attention
from ..pytrees import exportable
from .parts import choose_keys

HEAD_DIM = 512
NOPE_DIM = HEAD_DIM - ROPE_DIM
SLIDING, C4A, C128A = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@exportable
class WindowedLayerCache(NamedTuple):
    """The state of one layer, whole tensors; what its type does not have is None.

    Attributes:
        window: `[num_blocks, ...]` of the cache format, every token's key.
        compressed: the compressed entries, of the same format, in blocks of their own.
        states: `[max_num_requests, tokens of a group, ...]` float32, a ring for each request: what the compressor
            pools.
        index_keys: of the index format, the indexer's compressed keys, in the same blocks as `compressed`.
        index_states: as `states`, of the indexer's compressor.
    """

    window: torch.Tensor
    compressed: torch.Tensor | None = None
    states: torch.Tensor | None = None
    index_keys: torch.Tensor | None = None
    index_states: torch.Tensor | None = None


@dataclass(frozen=True)
class WindowedCache:
    """The caches of all layers. Block b of a request is block b in every tensor, and holds the same tokens in each.

    Blocks of 256 tokens are so 64 entries of C4A and 2 of C128A.
    """

    layers: list[WindowedLayerCache]
    cache_format: str
    index_format: str
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.layers[0].window.shape[0]


@exportable
class WindowedInputs(NamedTuple):
    """Inputs of one step besides weights and caches.

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
    ) -> WindowedInputs:
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

    @property
    def per_token(self) -> tuple[torch.Tensor, ...]:
        """The tensors that have a row for each token."""
        return self[:11]

    def mark_num_tokens_dynamic(self) -> WindowedInputs:
        """Tells `torch.compile` that the number of tokens varies, from 2 up: one graph for every length."""
        for tensor in self.per_token:
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


@dataclass(frozen=True)
class WindowedStep:
    """Values that the layers of one step share: arguments of `Decoder.forward`, and the two kinds of angles."""

    inputs: WindowedInputs
    layers: list[WindowedLayerCache]
    cache_format: str
    index_format: str
    main: Angles
    compress: Angles


class WindowedAttention(nn.Module):
    """The attention of every layer of a model, its caches and its metadata.

    Args:
        backbone: the transformers model between embedding and head.
        config: its config.
        max_model_len: the longest request. The RoPE tables have so many rows.
    """

    main_angles: torch.Tensor
    compress_angles: torch.Tensor
    head_dim = HEAD_DIM
    with_sink = True
    quantized_format = "fp8_ds_mla_v4"
    deterministic = False

    def __init__(self, backbone: Any, config: Any, max_model_len: int) -> None:
        super().__init__()
        self.config = config
        self.kinds: list[str] = [layer.self_attn.layer_type for layer in backbone.layers]
        self.max_model_len = max_model_len
        self.num_heads = self.query_heads = int(config.num_attention_heads)
        self.index_topk, self.index_heads = int(config.index_topk), int(config.index_n_heads)
        self.ratios: dict[str, int] = {name: int(config.compress_rates[name]) for name in (C4A, C128A)}
        weight = backbone.embed_tokens.weight
        self.dtype: torch.dtype = weight.dtype
        self.device: torch.device = weight.device

        # the model's own module fills the tables; a row holds the cosines of 32 pairs, then their sines, in float32
        positions = torch.arange(max_model_len, device=self.device).unsqueeze(0)
        for name in ("main", "compress"):
            with torch.no_grad():
                angles = backbone.rotary_emb(weight[:1].float(), position_ids=positions, layer_type=name)
            self.register_buffer(f"{name}_angles", torch.cat(angles, dim=-1)[0].contiguous(), persistent=False)

    def allocate_cache(
        self, cache_format: str, num_blocks: int, block_size: int, max_num_requests: int = 1
    ) -> WindowedCache:
        """Zeroed caches for every layer; each row of the batch has a ring of compressor states in every layer."""
        self._check_block_size(block_size)
        index_format = index_format_of(cache_format)
        device = self.device

        def states(ratio: int, series: int, head_dim: int) -> torch.Tensor:
            return torch.zeros(
                max_num_requests, ratio * series, 2 * series * head_dim, dtype=torch.float32, device=device
            )

        layers = []
        for kind in self.kinds:
            cache = WindowedLayerCache(
                allocate_cache(cache_format, num_blocks, block_size, head_dim=HEAD_DIM, device=device)
            )
            if kind in self.ratios:
                ratio = self.ratios[kind]
                sizes, series = (num_blocks, block_size // ratio), 2 if kind == C4A else 1
                cache = cache._replace(
                    compressed=allocate_cache(cache_format, *sizes, head_dim=HEAD_DIM, device=device),
                    states=states(ratio, series, HEAD_DIM),
                )
                if kind == C4A:
                    cache = cache._replace(
                        index_keys=allocate_cache(index_format, *sizes, head_dim=INDEX_DIM, device=device),
                        index_states=states(ratio, series, INDEX_DIM),
                    )
            layers.append(cache)
        return WindowedCache(layers, cache_format, index_format, block_size)

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
        # the caches share one block table
        metadata.build(query_start_loc, seq_lens, block_table, block_table, block_table)

    def dense_context(self, start: int, num_tokens: int, *, any_length: bool = False) -> None:
        """None: no prefill runs dense, since window and compressed tokens are what the model was trained with."""

    def step_inputs(
        self,
        input_ids: torch.Tensor,
        metadata: V4StepMetadata,
        request_rows: torch.Tensor,
        max_context_tokens: int | None = None,
    ) -> WindowedInputs:
        return WindowedInputs.from_metadata(input_ids, metadata, request_rows)

    def begin(
        self,
        inputs: WindowedInputs,
        layers: list[WindowedLayerCache],
        cache_format: str,
        index_format: str,
    ) -> WindowedStep:
        """The values that every layer of a step reads."""
        positions = inputs.positions.long()
        main = Angles(*self.main_angles[positions].chunk(2, dim=-1))
        compress = Angles(*self.compress_angles[positions].chunk(2, dim=-1))
        return WindowedStep(inputs, layers, cache_format, index_format, main, compress)

    def attend(self, number: int, attention: Any, hidden: torch.Tensor, step: WindowedStep) -> torch.Tensor:
        """One layer: `[num_tokens, hidden_size]` normed in, the same out of the output projections."""
        inputs, cache, cache_format = step.inputs, step.layers[number], step.cache_format
        angles = step.main if self.kinds[number] == SLIDING else step.compress
        num_tokens = hidden.shape[0]
        q_residual = attention.q_a_norm(attention.q_a_proj(hidden))
        q = attention.q_b_proj(q_residual).view(num_tokens, self.num_heads, HEAD_DIM)
        q = angles.rotate(attention.q_b_norm(q))
        key = angles.rotate(attention.kv_norm(attention.kv_proj(hidden)))
        latent, rope = key.split((NOPE_DIM, ROPE_DIM), dim=-1)
        concat_and_cache(latent, rope, cache.window, inputs.slot_mapping, cache_format)

        kind = self.kinds[number]
        extra: dict[str, Any] = {}
        if kind == C4A:
            assert cache.compressed is not None
            assert cache.states is not None
            compressor = attention.compressor
            self._compress(compressor, hidden, cache.states, cache.compressed, inputs, inputs.c4a_slots, cache_format)
            indexer = compressor.indexer
            chosen, counts = self._select_entries(indexer, hidden, q_residual, angles, inputs, cache, step.index_format)
            extra = {
                "extra_kv_cache": cache.compressed,
                "extra_indices": chosen,
                "extra_topk_length": counts,
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
            deterministic=self.deterministic,
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
        inputs: WindowedInputs,
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
        inputs: WindowedInputs,
        cache: WindowedLayerCache,
        index_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The lightning indexer over compressed keys: entries of each token's request, as `choose_keys` says."""
        index_keys, index_states = cache.index_keys, cache.index_states
        assert index_keys is not None
        assert index_states is not None
        num_tokens = hidden.shape[0]
        self._compress(indexer, hidden, index_states, index_keys, inputs, inputs.c4a_slots, index_format)
        q = angles.rotate(indexer.q_b_proj(q_residual).view(num_tokens, indexer.num_heads, INDEX_DIM))
        scorer = indexer.scorer
        weights = scorer.weights_proj(hidden.to(scorer.weights_proj.weight.dtype))
        return choose_keys(
            q,
            weights,
            scorer.softmax_scale * scorer.weights_scaling,
            index_keys,
            inputs.c4a_block_table,
            inputs.req_id_per_token,
            inputs.c4a_lens,
            self.index_topk,
            index_format,
        )
