"""One decoder for every supported model, assembled from parts: attention by its caches, residual, experts, head.

One function serves prefill, decode and mixed batches: tokens are flat, what differs is in the metadata buffers. Nothing
in it depends on a value on the host, so it traces with `fullgraph=True` and can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..formats import PLAIN_FORMATS
from ..sizes import check_sizes
from .experts import feed_forward
from .latent import LatentAttention
from .parallel import Ranks, shard_weights
from .streams import HyperStreams, Residual
from .supported import check_hooks, dtype_and_device, read_model
from .windowed import WindowedAttention


def decoder_for(
    model: Any,
    max_model_len: int,
    *,
    tp_mesh: Any = None,
    dcp_mesh: Any = None,
    interleave: int = 1,
    deterministic: bool = False,
) -> Decoder:
    """The decoder that runs a transformers model's weights through `torch.ops.mla.*`.

    Args:
        model: a loaded transformers model with its head, on one device, in one of float32, bfloat16 and float16. Its
            `config.model_type` is one of `mla_ops.models.SUPPORTED`.
        max_model_len: the longest request, prompt and continuation together. The RoPE table has so many rows.
        tp_mesh: one-dimensional DeviceMesh of the ranks that have a share of the heads and experts each. The model's
            weights are split in place, unless `from_pretrained` did; its own `forward` cannot be used afterwards.
        dcp_mesh: one-dimensional DeviceMesh of the ranks that have a part of every context each; with `tp_mesh`, the
            same ranks. Prefill runs in the absorbed form.
        interleave: neighbouring tokens of a context on one rank of `dcp_mesh`.
        deterministic: attention is; a `GenerationSession` then gives a request the same bits whatever runs beside it.

    Raises:
        TypeError: not a transformers model, one of a model type that is not supported, or one without a head.
        ValueError: a geometry without a cache format, a RoPE type that depends on the sequence length, weights that are
            quantized, spread over devices, not loaded, or under an adapter in `kv_b_proj` or experts; forward hooks
            of modules that are not called; heads or widths that do not divide over the ranks, or a model type that does
            not run over ranks.
    """
    return Decoder(model, max_model_len, Ranks.of(tp_mesh, dcp_mesh, interleave), deterministic)


class Decoder(nn.Module):
    """Runs the weights of a transformers model through `torch.ops.mla.*`; `decoder_for` makes one.

    The model's modules and parameters are used, not copied; they are only read, without gradients.

    Attributes:
        model: the transformers model.
        config: of its text model.
        max_model_len: the longest request.
        num_heads, head_dim, with_sink: of its attention, as this rank runs it.
        ranks: who shares its weights and caches.
        index_topk: keys that its indexer chooses; `max_model_len` without one.
        index_heads: heads of its indexer; 0 without one.
        dtype, device: of its embedding.
    """

    def __init__(self, model: Any, max_model_len: int, ranks: Ranks | None = None, deterministic: bool = False) -> None:
        super().__init__()
        if not isinstance(deterministic, bool):
            raise TypeError(f"decoder_for: deterministic must be a bool, got {type(deterministic).__name__}")
        (max_model_len,) = check_sizes("decoder_for", 1, max_model_len=max_model_len)
        text = read_model(model, max_model_len)
        self.ranks = ranks = Ranks() if ranks is None else ranks
        if ranks.tp_mesh is not None:
            shard_weights(text.backbone, text.config, ranks.tp_mesh)
        self.model: Any = model
        self.config = text.config
        self.max_model_len = max_model_len
        self.backbone: Any = text.backbone
        self.lm_head: Any = text.lm_head
        self.softcap = text.softcap
        self.vocabulary: int = text.backbone.embed_tokens.weight.shape[0]  # an adapter's embedding says no number
        self.dtype, self.device = dtype_and_device(text.backbone)
        self.attention: Any
        if text.model_type.layers is None:
            if ranks.dcp_group is not None:
                raise ValueError(
                    "decoder_for: dcp_mesh needs caches of latents, DeepSeek-V4 has windows and compressed caches"
                )
            self.attention = WindowedAttention(text.backbone, text.config, max_model_len)
        else:
            parts = text.model_type.layers(text.config)
            self.attention = LatentAttention(text.backbone, text.config, parts, max_model_len, ranks)
        self.deterministic = self.attention.deterministic = deterministic
        streams = getattr(text.config, "hc_mult", None)
        self.residual = Residual() if streams is None else HyperStreams(int(streams))
        self.num_heads: int = self.attention.query_heads
        self.index_topk: int = self.attention.index_topk
        self.index_heads: int = self.attention.index_heads
        self.head_dim: int = self.attention.head_dim
        self.with_sink: bool = self.attention.with_sink

    def allocate_cache(self, cache_format: str, num_blocks: int, block_size: int, max_num_requests: int = 1) -> Any:
        """Zeroed caches for every layer.

        Args:
            cache_format: the plain format of the model's dtype, or `fp8_ds_mla` (DeepSeek-V4: `fp8_ds_mla_v4`).
            num_blocks: blocks that all requests share.
            block_size: tokens a block; a multiple of 128 for DeepSeek-V4.
            max_num_requests: rows of the batch, for the state that DeepSeek-V4's compressors keep a row.

        Returns:
            `DecoderCache`, or `WindowedCache` for DeepSeek-V4.

        Raises:
            ValueError: a format or size that the model does not take, weights converted or moved since `decoder_for`.
        """
        check_hooks(self.model, self.backbone)
        found = dtype_and_device(self.backbone)
        if found != (self.dtype, self.device):
            raise ValueError(
                f"the model is in {found[0]} on {found[1]}, it was in {self.dtype} on {self.device} when decoder_for "
                "was called: convert or move the model first, then call decoder_for"
            )
        plain, quantized = PLAIN_FORMATS[self.dtype], self.attention.quantized_format
        if cache_format not in (plain, quantized):
            raise ValueError(
                f"a model in {self.dtype} reads cache_format '{plain}' or '{quantized}', got '{cache_format}': "
                "load the model in the cache's dtype, or choose one of these"
            )
        return self.attention.allocate_cache(cache_format, num_blocks, block_size, max_num_requests)

    def allocate_metadata(self, *, max_num_tokens: int, max_num_requests: int, block_size: int) -> Any:
        """Step metadata with room for requests of `max_model_len` tokens: `StepMetadata`, or `V4StepMetadata`."""
        return self.attention.allocate_metadata(
            max_num_tokens=max_num_tokens, max_num_requests=max_num_requests, block_size=block_size
        )

    def build_step(
        self, metadata: Any, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor
    ) -> None:
        """Refreshes the metadata for a step; arguments as `StepMetadata.build` takes them."""
        self.attention.build_step(metadata, query_start_loc, seq_lens, block_table)

    def step_inputs(
        self,
        input_ids: torch.Tensor,
        metadata: Any,
        request_rows: torch.Tensor,
        max_context_tokens: int | None = None,
    ) -> Any:
        """The inputs of `forward`: `StepInputs`, or `WindowedInputs` for DeepSeek-V4.

        Args:
            input_ids: `[num_tokens]`.
            metadata: built for the step.
            request_rows: `[max_num_requests, 1]` int32, the batch row of each request, for models with state a row.
            max_context_tokens: what `dense_context` gave for the step: not None runs it dense.
        """
        return self.attention.step_inputs(input_ids, metadata, request_rows, max_context_tokens)

    def dense_context(self, start: int, num_tokens: int, *, any_length: bool = False) -> int | None:
        """An upper bound of the cached tokens of a prefill that runs dense; None if it has to run sparse.

        Args:
            start: tokens of the request that are in the cache.
            num_tokens: new tokens.
            any_length: the bound of every such prefill, so that one compiled step serves them all, at the price of
                chunks that are empty.
        """
        return self.attention.dense_context(start, num_tokens, any_length=any_length)

    def forward(
        self,
        inputs: Any,
        layers: list[Any],
        cache_format: str,
        index_format: str,
        logit_rows: torch.Tensor | None = None,
        host_reads: bool = False,
    ) -> torch.Tensor:
        """One step over flat tokens: writes their keys into the caches and attends to all that came before.

        Args:
            inputs: tokens and metadata, of `step_inputs`.
            layers: the caches, written in place.
            cache_format, index_format: formats of the attention caches and of the index keys.
            logit_rows: `[n]` int64, tokens whose logits are wanted; None for all.
            host_reads: the step will not be captured, and may read values on the host: on a GPU, experts in float32 and
                float16 then multiply only the tokens that chose them.

        Returns:
            logits `[num_tokens or n, vocab_size]` in the head's dtype. Rows of padding are finite and mean nothing.
        """
        for tensor in inputs.per_token[1:]:
            torch._check(tensor.shape[0] == inputs.input_ids.shape[0])
        residual = self.residual
        step = self.attention.begin(inputs, layers, cache_format, index_format)
        hidden = residual.enter(self.backbone.embed_tokens(inputs.input_ids))
        for number, layer in enumerate(self.backbone.layers):
            mixing, block_input = residual.read(layer, "attn", hidden)
            out = self.attention.attend(number, layer.self_attn, layer.input_layernorm(block_input), step)
            hidden = residual.write(mixing, self.ranks.sum(out), hidden)
            mixing, block_input = residual.read(layer, "ffn", hidden)
            block_input = layer.post_attention_layernorm(block_input)
            out = feed_forward(layer.mlp, block_input, inputs.input_ids, host_reads)
            hidden = residual.write(mixing, self.ranks.sum(out), hidden)
        hidden = residual.leave(self.backbone, hidden, logit_rows)
        logits = self.lm_head(hidden.to(self.lm_head.weight.dtype))
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap
