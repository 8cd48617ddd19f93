"""vLLM's indexer layer by our operators: keys, scores and an exact choice, three launches a layer.

vLLM cuts a step into decodes and chunks of prefills, gathers the keys of the latter, and plans the former. Here a step
is one call over the paged cache, whatever it consists of; the choice is exact, and has the same bits in every batch.

An attention layer of ours hands over its indexer. The indexer's cache then names `IndexerBackend`, whose metadata has a
row for each token. vLLM calls one function for all indexers, by an op and by name; `choose_keys` takes its place, and
calls it for those that were not handed over.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm import envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import sparse_attn_indexer as theirs
from vllm.platforms import current_platform
from vllm.utils import deep_gemm
from vllm.utils.torch_utils import _resolve_layer_name
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadataBuilder
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend, DeepseekV32IndexerMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from ... import ops
from .shared import step_metadata

FORMAT = "fp8_index"
ROW_BYTES = 132  # 128 values and their scale
CALLERS = ("vllm.models.deepseek_v32.attention",)  # these modules call the function by name

_original: Callable[..., torch.Tensor] = theirs.sparse_attn_indexer
_library = torch.library.Library("vllm", "IMPL")


@dataclass(kw_only=True)
class IndexerMetadata(DeepseekV32IndexerMetadata):
    """The tensors that the indexers of a step read.

    Attributes:
        block_table: `[num_requests, max_blocks]` int32.
        req_id_per_token: `[num_tokens]` int32, -1 for padding.
        key_lens: `[num_tokens]` int32, keys that each token may choose from, 0 for padding.
        valid_counts: `[num_tokens]` int32, scratch: how many it chose.
    """

    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    key_lens: torch.Tensor
    valid_counts: torch.Tensor


class IndexerMetadataBuilder(AttentionMetadataBuilder[IndexerMetadata]):
    """One launch on the device a step. Any batch may be captured."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        parallel = vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                value = getattr(parallel, name)
                raise NotImplementedError(f"mla_ops: its indexer serves no {name} above 1, got {value}")
        speculative = vllm_config.speculative_config
        drafts = 0 if speculative is None else speculative.num_speculative_tokens or 0
        self.decode_threshold = 1 + drafts
        self.step = step_metadata(vllm_config, kv_cache_spec.block_size, device)
        self.valid_counts = torch.empty_like(self.step.key_lens)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> IndexerMetadata:
        common, step, num_tokens = common_attn_metadata, self.step, common_attn_metadata.num_actual_tokens
        step.build(common.query_start_loc, common.seq_lens, common.block_table_tensor[:, :0])
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
            common, decode_threshold=self.decode_threshold
        )
        return IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_decodes=decodes,
            num_decode_tokens=decode_tokens,
            num_prefills=prefills,
            num_prefill_tokens=prefill_tokens,
            block_table=common.block_table_tensor,
            req_id_per_token=step.req_id_per_token[:num_tokens],
            key_lens=step.key_lens[:num_tokens],
            valid_counts=self.valid_counts[:num_tokens],
        )


class IndexerBackend(DeepseekV32IndexerBackend):
    """vLLM's cache of index keys, with our metadata."""

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @staticmethod
    def get_builder_cls() -> type[IndexerMetadataBuilder]:
        return IndexerMetadataBuilder


def is_served(layer: Any) -> bool:
    """Whether an indexer's cache was handed over."""
    return vars(layer).get("get_attn_backend") is _our_backend


def _our_backend() -> type[IndexerBackend]:
    return IndexerBackend


def serve(indexer: Any) -> None:
    """Hands an indexer over, before vLLM asks its cache for a backend.

    Raises:
        NotImplementedError: a cache of another kind or format than V3.2's fp8 keys.
    """
    cache = indexer.k_cache
    if is_served(cache):
        return
    shuffled = getattr(cache, "uses_shuffled_layout", False)
    packed = getattr(deep_gemm, "mqa_logits_use_mx_scales", bool)()
    if cache.get_attn_backend() is not DeepseekV32IndexerBackend or cache.head_dim != ROW_BYTES or shuffled or packed:
        raise NotImplementedError(
            f"mla_ops: its indexer reads caches of {ROW_BYTES} bytes a key with a float32 scale, got "
            f"{type(cache).__name__} of {cache.head_dim} bytes, shuffled: {shuffled}, packed scales: {packed}"
        )
    cache.get_attn_backend = _our_backend
    _take_the_place()


def _take_the_place() -> None:
    if theirs.sparse_attn_indexer is not choose_keys:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the op had a kernel
            _library.impl("sparse_attn_indexer", choose_keys, current_platform.dispatch_key, allow_override=True)
        theirs.sparse_attn_indexer = choose_keys
    for name in CALLERS:
        module = sys.modules.get(name)
        if module is not None and module.sparse_attn_indexer is _original:
            module.sparse_attn_indexer = choose_keys  # type: ignore[attr-defined]


@eager_break_during_capture  # type: ignore[untyped-decorator]
def choose_keys(
    hidden_states: torch.Tensor,
    k_cache_prefix: Any,
    kv_cache: torch.Tensor,
    q_quant: torch.Tensor,
    q_scale: torch.Tensor | None,
    k: torch.Tensor | None,
    weights: torch.Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: torch.Tensor,
    skip_k_cache_insert: bool,
    *others: Any,
    **options: Any,
) -> torch.Tensor:
    """Takes the place of vLLM's `sparse_attn_indexer`: writes index keys and each token's choice, -1 behind the last.

    Args:
        hidden_states: of the step; its rows are counted.
        k_cache_prefix: name of the indexer's cache.
        kv_cache: `[num_blocks, block_size, 132]` uint8, written unless `skip_k_cache_insert`.
        q_quant: `[num_tokens, num_heads, 128]` float8_e4m3fn.
        q_scale: None, since it is part of `weights`.
        k: `[num_tokens, 128]` index keys, unless they were written before.
        weights: `[num_tokens, num_heads]` float32.
        topk_tokens: how many a token chooses.
        topk_indices_buffer: written, positions in the token's request; returned.
    """
    context = get_forward_context()
    prefix = _resolve_layer_name(k_cache_prefix)
    if not is_served(context.no_compile_layers[prefix]):
        arguments = (hidden_states, k_cache_prefix, kv_cache, q_quant, q_scale, k, weights, quant_block_size, scale_fmt)
        sizes = (topk_tokens, head_dim, max_model_len, total_seq_lens, topk_indices_buffer, skip_k_cache_insert)
        return _original(*arguments, *sizes, *others, **options)
    budget = envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB * 2**20
    if not isinstance(context.attn_metadata, dict):  # a run that measures memory
        torch.empty(budget, dtype=torch.uint8, device=hidden_states.device)
        return topk_indices_buffer
    metadata = context.attn_metadata[prefix]
    assert isinstance(metadata, IndexerMetadata)
    assert q_scale is None
    num_tokens = metadata.key_lens.shape[0]
    if not skip_k_cache_insert:
        assert k is not None
        num_slots = min(num_tokens, metadata.slot_mapping.shape[0])
        ops.write_index_cache(k[:num_slots], kv_cache, metadata.slot_mapping[:num_slots], FORMAT)
    columns = metadata.block_table.shape[1] * kv_cache.shape[1]
    if not (kv_cache.is_cuda and torch.cuda.is_current_stream_capturing()):  # a replay may have longer requests
        columns = min(columns, -(-metadata.max_seq_len // kv_cache.shape[1]) * kv_cache.shape[1])
    rows_at_once = max(1, budget // max(4 * columns, 1))
    for first in range(0, num_tokens, rows_at_once):
        rows = slice(first, min(first + rows_at_once, num_tokens))
        scores = ops.paged_indexer_logits(
            q_quant[rows],
            kv_cache,
            weights[rows],
            metadata.key_lens[rows],
            metadata.block_table,
            metadata.req_id_per_token[rows],
            columns,
            FORMAT,
        )
        torch.ops.mla.topk_indices.out(
            scores,
            topk_tokens,
            row_ends=metadata.key_lens[rows],
            indices=topk_indices_buffer[rows, :topk_tokens],
            valid_counts=metadata.valid_counts[rows],
        )
    topk_indices_buffer[num_tokens : hidden_states.shape[0]] = -1
    return topk_indices_buffer
