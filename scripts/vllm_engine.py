"""`LLM()` of vLLM on a CPU with our backend and indexer, over a small DeepSeek-V3.2 that transformers made.

`scripts.vllm_tests VERSION FOLDER --engine` runs it. Requests outnumber the places of a batch, so that prefills and
decodes share steps; contexts outgrow the indexer's choice. The logprobs of what vLLM wrote are compared with those of
transformers in float32. Two measures stand beside it: transformers in bfloat16, the engine's type, says how far
rounding goes, and transformers that attends to every key says how far a wrong choice would.

What vLLM's compiled part would do on a CPU is done by its own native forms, and by the few ops below.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MLA_OPS_VLLM": "indexer", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

PROMPTS, PLACES, TOKENS, TOPK = (150, 7, 90, 33, 120), 2, 12, 64
NOISE = 3.0  # bfloat16 rounds at other places in the two programs, and the engine's index keys are e4m3


class Cpu(CpuPlatform):
    """VLLM's platform for CPUs, which takes our backend."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        super().check_and_update_config(vllm_config)
        vllm_config.cache_config.block_size = 64  # 0.33 has 16 for its own MLA on CPUs

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *_: Any, **__: Any) -> str:
        return str(selected_backend.get_path())


vllm.platforms._current_platform = Cpu()

import tests.vllm_layer  # noqa: F401  stands in for pinned memory, and for a Triton kernel of 0.33's metadata
from mla_ops.integrations import vllm as plugin


def compute_slot_mapping(
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    slot_mapping: torch.Tensor,
    block_size: int,
) -> None:
    lens = query_start_loc.diff()
    requests = torch.arange(len(lens)).repeat_interleave(lens)
    where = positions[: len(requests)]
    blocks = block_table[requests, where // block_size].long()
    slot_mapping[: len(requests)] = blocks * block_size + where % block_size
    slot_mapping[len(requests) :] = -1


def quantize(x: torch.Tensor, group_size: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().view(*x.shape[:-1], -1, group_size)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448)))
    return (groups / scale).to(torch.float8_e4m3fn).view_as(x), scale.squeeze(-1)


def stand_in() -> None:
    """Native forms and the ops that a CPU build of vLLM would have."""
    from vllm.model_executor.layers.rotary_embedding import base
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2

    base.RotaryEmbedding.forward_cpu = base.RotaryEmbedding.forward_native
    SparseAttnIndexer.forward_cpu = SparseAttnIndexer.forward_cuda
    deepseek_v2.per_token_group_quant_fp8 = quantize
    library = torch.library.Library("_C", "FRAGMENT")
    library.define("init_cpu_memory_env(SymInt[] nodes) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    library.define(
        "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
        "Tensor(a!) slot_mapping, SymInt block_size) -> ()"
    )
    library.impl("compute_slot_mapping_kernel_impl", compute_slot_mapping, "CPU")
    library.define("greedy_argmax(Tensor logits) -> Tensor")
    library.impl("greedy_argmax", lambda logits: logits.argmax(-1), "CPU")
    stand_in.library = library  # type: ignore[attr-defined]  # ops live as long as it does


def checkpoint(folder: Path) -> Any:
    from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

    torch.manual_seed(2)
    config = DeepseekV32Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        index_topk=TOPK,
        index_n_heads=32,
        max_position_embeddings=512,
        initializer_range=0.02,
        n_group=1,
        topk_group=1,
    )
    model = DeepseekV32ForCausalLM(config).bfloat16().eval()
    model.save_pretrained(folder)
    return model


def logprobs(model: Any, tokens: list[int], start: int) -> torch.Tensor:
    """Of every token from `start` on, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    return logits.log_softmax(-1)[torch.arange(start - 1, len(tokens) - 1), torch.tensor(tokens[start:])]


def main() -> None:
    stand_in()
    plugin.register()
    from vllm import LLM, SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    ours = "MLA_OPS" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    folder = Path(tempfile.mkdtemp())
    model = checkpoint(folder)
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=64,
        max_model_len=256,
        max_num_seqs=PLACES,
        enforce_eager=True,
        enable_prefix_caching=False,
        attention_config={"backend": ours, "mla_prefill_backend": ours},
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    served = {layer.get_attn_backend().__module__ for layer in layers}
    if not served or not all(name.startswith("mla_ops.") for name in served):
        sys.exit(f"attention and indexers must be of mla_ops, got {served}")
    prompts = [torch.randint(2, 256, (length,)).tolist() for length in PROMPTS]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    answers = [o.outputs[0] for o in llm.generate([{"prompt_token_ids": p} for p in prompts], sampling)]
    texts = [prompt + list(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]

    def transformers() -> torch.Tensor:
        return torch.stack([logprobs(model, text, len(text) - TOKENS) for text in texts])

    rounded = transformers()
    model = model.float()
    exact = transformers()
    for layer in model.model.layers:
        layer.self_attn.indexer.index_topk = 512
    of_all_keys = transformers()
    engine = torch.tensor(
        [[p[t].logprob for p, t in zip(answer.logprobs, answer.token_ids, strict=True)] for answer in answers]
    )
    chosen = torch.tensor([[length + place > TOPK for place in range(TOKENS)] for length in PROMPTS])
    wrong = False
    for name, which in (("contexts of all keys", ~chosen), ("contexts of chosen keys", chosen)):
        error, noise, control = (
            float((run.double() - exact)[which].abs().max()) for run in (engine, rounded, of_all_keys)
        )
        print(
            f"{name}: largest difference of a logprob from transformers in float32 {error:.4f}; of its bfloat16 "
            f"{noise:.4f}, of attention to every key {control:.4f}"
        )
        wrong |= not error <= NOISE * noise or (which is chosen and not NOISE * noise < control)
    if wrong:
        sys.exit(f"a difference is more than {NOISE} times that of bfloat16, or cannot tell a wrong choice")


if __name__ == "__main__":
    main()
