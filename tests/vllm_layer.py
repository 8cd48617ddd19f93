"""A vLLM attention layer over a tiny DeepSeek-V3.2 or V3, on a CPU and without vLLM's compiled part."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vllm.utils import torch_utils

torch_utils.PIN_MEMORY = False  # torch for CPUs pins nothing; read by other modules as they are imported

from vllm import _custom_ops
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed import parallel_state
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MLAAttentionSpec

import mla_ops

with contextlib.suppress(ImportError):  # 0.24 has no such kernel, which is Triton's
    from vllm.v1.attention.ops import metadata as metadata_kernels

    def compute_token_to_req_indices(
        query_start_loc: torch.Tensor, buffer: torch.Tensor, num_mapped: int, num_out: int
    ) -> torch.Tensor:
        buffer[:num_out] = 0
        tokens = torch.arange(num_mapped, dtype=query_start_loc.dtype, device=buffer.device)
        buffer[:num_mapped] = torch.searchsorted(query_start_loc[1:], tokens, right=True)
        return buffer[:num_out]

    metadata_kernels.compute_token_to_req_indices = compute_token_to_req_indices


def gather_context(
    src_cache: torch.Tensor,
    dst: torch.Tensor,
    block_table: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    token_to_seq: torch.Tensor,
    num_tokens: int,
    kv_cache_dtype: str,
    scale: torch.Tensor,
    seq_starts: torch.Tensor,
) -> None:
    """Does what vLLM's kernel does for a bfloat16 cache."""
    requests = token_to_seq[:num_tokens].long()
    positions = torch.arange(num_tokens) - cu_seq_lens[requests] + seq_starts[requests]
    blocks = block_table[requests, positions // src_cache.shape[1]].long()
    dst[:num_tokens] = src_cache[blocks, positions % src_cache.shape[1]]


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    """Does what vLLM's kernels do; those of 0.24 read no strides of lse."""
    if PINS:
        assert all(lse is None or lse.is_contiguous() for lse in (prefix_lse, suffix_lse, output_lse))
    merged, lse = mla_ops.merge_attention_states(prefix_output, prefix_lse.T, suffix_output, suffix_lse.T)
    output.copy_(merged)
    if prefill_tokens_with_context is not None:
        output[prefill_tokens_with_context:] = suffix_output[prefill_tokens_with_context:]
    if output_lse is not None:
        output_lse.copy_(lse.T)


def unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
        return make(*arguments, **options)

    return made


_custom_ops.gather_and_maybe_dequant_cache = gather_context
mla_attention.merge_attn_states = merge_attn_states
PINS = not hasattr(mla_attention, "PIN_MEMORY")  # 0.24 pins memory of its metadata whatever is asked
if PINS:
    mla_attention.torch = ModuleType("torch")
    made = {name: unpinned(getattr(torch, name)) for name in ("empty", "zeros")}
    vars(mla_attention.torch).update(vars(torch) | made)

NOPE, ROPE, LATENT, VALUE, HEADS, TOPK, BLOCK = 128, 64, 512, 128, 8, 64, 64
SCALE = (NOPE + ROPE) ** -0.5
LAYER = "model.layers.0.self_attn.attn"


def model_config(folder: Path, sparse: bool) -> ModelConfig:
    config = {
        "architectures": ["DeepseekV32ForCausalLM" if sparse else "DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v32" if sparse else "deepseek_v3",
        "hidden_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 64,
        "kv_lora_rank": LATENT,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": VALUE,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "first_k_dense_replace": 2,
        "torch_dtype": "bfloat16",
    }
    if sparse:
        config |= {"index_topk": TOPK, "index_n_heads": 32, "index_head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024)


def vllm_config(folder: Path, kv_cache_dtype: str, sparse: bool) -> VllmConfig:
    model = model_config(folder, sparse)
    cache = CacheConfig(block_size=BLOCK, cache_dtype=kv_cache_dtype)
    scheduler = SchedulerConfig(
        max_num_batched_tokens=256, max_num_seqs=16, max_model_len=1024, is_encoder_decoder=False
    )
    config = VllmConfig(
        model_config=model, cache_config=cache, scheduler_config=scheduler, device_config=DeviceConfig("cpu")
    )
    config.cache_config.num_gpu_blocks = 64
    return config


@contextlib.contextmanager
def hopper() -> Iterator[type]:
    """vLLM's CUDA platform, as if on Hopper."""
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    class Hopper(NonNvmlCudaPlatform):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

    yield Hopper


@contextlib.contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    parallel_state.init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
    parallel_state.initialize_model_parallel(1, 1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        parallel_state.destroy_distributed_environment()


class Layer:
    """The layer, its cache, and what a test needs to work a step out by itself."""

    def __init__(self, config: VllmConfig, backend: type, prefill_backend: type, kv_cache_dtype: str, sparse: bool):
        self.config, self.backend = config, backend
        self.indexer = SimpleNamespace(topk_indices_buffer=torch.full((256, TOPK), -1, dtype=torch.int32))
        projection = ColumnParallelLinear(LATENT, HEADS * (NOPE + VALUE), bias=False, params_dtype=torch.bfloat16)
        torch.nn.init.normal_(projection.weight, std=LATENT**-0.5)
        mla_attention.get_mla_prefill_backend = lambda config: prefill_backend
        self.attention = MLAAttention(
            num_heads=HEADS,
            scale=SCALE,
            qk_nope_head_dim=NOPE,
            qk_rope_head_dim=ROPE,
            v_head_dim=VALUE,
            q_lora_rank=64,
            kv_lora_rank=LATENT,
            kv_b_proj=projection,
            cache_config=config.cache_config,
            prefix=LAYER,
            attn_backend=backend,
            use_sparse=sparse,
            indexer=self.indexer if sparse else None,
        )
        self.attention.process_weights_after_loading(torch.bfloat16)
        dtype = torch.uint8 if kv_cache_dtype == "fp8_ds_mla" else torch.bfloat16
        width = 656 if kv_cache_dtype == "fp8_ds_mla" else LATENT + ROPE
        self.attention.kv_cache = torch.zeros(64, BLOCK, width, dtype=dtype)
        self.spec = MLAAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=LATENT + ROPE, dtype=dtype)
        self.builder = self.make_builder(torch.device("cpu"))
        self.projection = projection.weight.detach().T.view(LATENT, HEADS, NOPE + VALUE).float()

    def make_builder(self, device: torch.device) -> Any:
        return self.backend.get_builder_cls()(self.spec, [LAYER], self.config, device)

    def step(self, q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, common: CommonAttentionMetadata) -> Any:
        metadata = self.builder.build(common_prefix_len=0, common_attn_metadata=common)
        out = torch.empty(q.shape[0], HEADS * VALUE, dtype=q.dtype)
        slots = {LAYER: common.slot_mapping}
        with set_forward_context({LAYER: metadata}, self.config, num_tokens=q.shape[0], slot_mapping=slots):
            impl, cache = self.attention.impl, self.attention.kv_cache
            impl.do_kv_cache_update(
                kv_c, k_pe, cache, common.slot_mapping, self.attention.kv_cache_dtype, torch.ones(())
            )
            self.attention.forward_impl(q, kv_c, k_pe, cache, metadata, output=out)
        return out


def common_metadata(
    query_lens: list[int], seq_lens: list[int], tables: torch.Tensor, padded: int = 0
) -> CommonAttentionMetadata:
    """The metadata that vLLM's runner hands over; `padded` tokens of padding belong to requests of length 0."""
    lens = torch.tensor(query_lens + [0] * padded)
    starts = torch.zeros(len(lens) + 1, dtype=torch.int32)
    starts[1:] = lens.cumsum(0)
    seq = torch.tensor(seq_lens + [0] * padded, dtype=torch.int32)
    slots = [
        int(tables[request, position // BLOCK]) * BLOCK + position % BLOCK
        for request, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True))
        for position in range(total - new, total)
    ]
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=seq,
        num_reqs=len(lens),
        num_actual_tokens=sum(query_lens) + padded,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        block_table_tensor=torch.cat((tables, tables.new_zeros(padded, tables.shape[1]))),
        slot_mapping=torch.tensor(slots + [-1] * padded),
        seq_lens_cpu_upper_bound=seq,
    )


def on_device(common: CommonAttentionMetadata, device: str) -> CommonAttentionMetadata:
    """Moves the tensors that vLLM has on the GPU to `device`."""
    names = ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping")
    return replace(common, **{name: getattr(common, name).to(device) for name in names})


def expected(layer: Layer, q: torch.Tensor, keys: list[torch.Tensor], chosen: list[torch.Tensor]) -> torch.Tensor:
    """Each token over the keys at its chosen positions, expanded; float32."""
    rows = []
    for query, cached, positions in zip(q.float(), keys, chosen, strict=True):
        mine = cached[positions].float()
        expanded = torch.einsum("nl,lhd->nhd", mine[:, :LATENT], layer.projection)
        nope = torch.einsum("hd,nhd->hn", query[:, :NOPE], expanded[..., :NOPE])
        scores = (nope + query[:, NOPE:] @ mine[:, LATENT:].T) * SCALE
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), expanded[..., NOPE:]).flatten())
    return torch.stack(rows) if rows else torch.empty(0, HEADS * VALUE)
