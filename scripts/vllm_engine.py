"""`LLM()` of vLLM on a CPU with our backends and indexer, over a small DeepSeek-V3.2 and a V3 that transformers made.

`scripts.vllm_tests VERSION FOLDER --engine` runs it. Requests outnumber the places of a batch, so that prefills and
decodes share steps; prompts are cut into steps, and one begins like another, whose keys are found in the prefix cache;
contexts outgrow the indexer's choice. Each model is served once more by speculative decoding. The logprobs of what
vLLM wrote are compared with those of transformers in float32. Two measures stand beside it: transformers in bfloat16,
the engine's type, says how far rounding goes, and transformers that attends to every key says how far a wrong choice
would.

vLLM's own native forms, and the few ops below, do on a CPU the work of its compiled part.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "MLA_OPS_VLLM": "indexer", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}

import torch
import vllm.platforms
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability

PROMPTS, PLACES, TOKENS, TOPK = (150, 7, 90, 33, 120, 140), 2, 12, 64
CHUNK, SHARED = 24, 128  # tokens of a step at most; tokens that the last prompt has from the first
DRAFTS = 2
NOISE = 3.0  # bfloat16 rounds at other places in the two programs, and the engine's index keys are e4m3


class Cpu(CpuPlatform):
    """VLLM's platform for CPUs, which takes our backend."""

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
        return DeviceCapability(9, 0)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        kept = scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching
        super().check_and_update_config(vllm_config)
        # vLLM turns these off for MLA on CPUs
        scheduler.enable_chunked_prefill, scheduler.max_num_batched_tokens, cache.enable_prefix_caching = kept
        vllm_config.cache_config.block_size = 64  # 0.33 has 16 for its own MLA on CPUs

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *_: Any, **__: Any) -> str:
        return str(selected_backend.get_path())

    @classmethod
    def get_mla_prefill_backend_cls(cls, selector_config: Any) -> type:
        """0.33 asks the platform; its flag is for GPUs."""
        from mla_ops.integrations.vllm.backends import MLAOpsPrefillBackend

        return MLAOpsPrefillBackend


vllm.platforms._current_platform = Cpu()

from vllm.v1.attention.backends.registry import AttentionBackendEnum

import tests.vllm_layer  # noqa: F401  stands in for pinned memory, and for a Triton kernel of 0.33's metadata
from mla_ops.integrations import vllm as plugin

HAS_COMMON = hasattr(AttentionBackendEnum, "register")  # 0.33, where short prefills of sparse models are dense


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


class Drafts:
    """Drafts are the tokens that transformers would write; every third one ends in a wrong token."""

    model: ClassVar[Any]
    accepted: ClassVar[list[int]]

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, model: Any) -> None: ...

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        proposed = []
        for row, new in enumerate(sampled):
            text = tokens[row, : lengths[row]].tolist()
            for _draft in range(DRAFTS):
                text.append(int(self.model(torch.tensor([text])).logits[0, -1].argmax()))
            if len(text) % 3 == 0:
                text[-1] ^= 1
            proposed.append(text[-DRAFTS:] if new else [])  # none: its prompt is not read yet
        return proposed


def accept(
    drafts: torch.Tensor,
    counts: list[int],
    max_count: int,
    ends: torch.Tensor,
    probabilities: torch.Tensor | None,
    logits: torch.Tensor,
    bonus: torch.Tensor,
    *_: Any,
    **__: Any,
) -> torch.Tensor:
    """The likeliest tokens up to the first that was not drafted, and the one behind all drafts; -1 behind them."""
    written = torch.full((len(counts), max_count + 1), -1, dtype=torch.int32)
    for row, (best, drafted) in enumerate(zip(logits.argmax(-1).split(counts), drafts.split(counts), strict=True)):
        right = int((best == drafted).long().cumprod(0).sum())
        behind = torch.cat((best, bonus[row]))
        written[row, : right + 1] = behind[: right + 1]
        Drafts.accepted.append(right)
    return written


def stand_in() -> None:
    """Native forms and the ops that a CPU build of vLLM would have."""
    from vllm.model_executor.layers.rotary_embedding import base
    from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
    from vllm.model_executor.models import deepseek_v2
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.rejection_sample = accept
    rejection_sampler.apply_sampling_constraints = lambda logits, *_: logits  # a run for profiling is not greedy
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


def checkpoint(folder: Path, sparse: bool) -> Any:
    import transformers

    torch.manual_seed(2)
    name = "DeepseekV32" if sparse else "DeepseekV3"
    choice = {"index_topk": TOPK, "index_n_heads": 32} if sparse else {}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        first_k_dense_replace=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        max_position_embeddings=512,
        initializer_range=0.02,
        n_group=1,
        topk_group=1,
        **choice,
    )
    model = getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().eval()
    model.save_pretrained(folder)
    return model


def logprobs(model: Any, tokens: list[int], start: int) -> torch.Tensor:
    """Log-probability of every token from `start` on, given those before it."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    return logits.log_softmax(-1)[torch.arange(start - 1, len(tokens) - 1), torch.tensor(tokens[start:])]


def serve(folder: Path, dense: bool, drafts: bool) -> tuple[list[list[int]], torch.Tensor]:
    """Each prompt with what the engine wrote behind it, and the logprobs of that."""
    from vllm import LLM, SamplingParams

    from mla_ops.integrations.vllm.backends import MLAOpsPrefillBackend

    ours = "MLA_OPS" if HAS_COMMON else "CUSTOM"
    llm = LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        block_size=64,
        max_model_len=256,
        max_num_seqs=PLACES,
        max_num_batched_tokens=CHUNK,
        enforce_eager=True,
        enable_prefix_caching=True,
        attention_config={"backend": ours, "mla_prefill_backend": ours},
        speculative_config={"method": "custom_class", "model": f"{__name__}.Drafts", "num_speculative_tokens": DRAFTS}
        if drafts
        else None,
    )
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    served = {layer.get_attn_backend().__module__ for layer in layers}
    if not served or not all(name.startswith("mla_ops.") for name in served):
        sys.exit(f"attention and indexers must be of mla_ops, got {served}")
    Drafts.accepted = []
    chunks, real = [], MLAOpsPrefillBackend.run_prefill_context_chunk

    def counted(*arguments: Any, **options: Any) -> Any:
        chunks.append(len(options["q"]))
        return real(*arguments, **options)

    MLAOpsPrefillBackend.run_prefill_context_chunk = counted  # type: ignore[method-assign]
    prompts = [torch.randint(2, 256, (length,)).tolist() for length in PROMPTS]
    prompts[-1][:SHARED] = prompts[0][:SHARED]
    sampling = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling)
    MLAOpsPrefillBackend.run_prefill_context_chunk = real  # type: ignore[method-assign]
    hits = sum(output.num_cached_tokens for output in outputs)
    print(
        f"{hits} tokens were found in the prefix cache; {len(chunks)} calls of dense attention to earlier context; of "
        f"{DRAFTS} drafts 0, 1, 2 were accepted {[Drafts.accepted.count(number) for number in range(DRAFTS + 1)]} times"
    )
    if hits < SHARED or (dense and not chunks) or (drafts and set(Drafts.accepted) != {0, 1, 2}):
        sys.exit(f"the last prompt must have {SHARED} tokens from the prefix cache, prefills context, drafts all ends")
    answers = [output.outputs[0] for output in outputs]
    texts = [prompt + list(answer.token_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    steps = [zip(answer.logprobs, answer.token_ids, strict=True) for answer in answers]
    return texts, torch.tensor([[best[token].logprob for best, token in answer] for answer in steps])


def compare(sparse: bool, drafts: bool) -> bool:
    """Prints the differences; whether they are those of rounding, and smaller than those of a wrong choice."""
    with tempfile.TemporaryDirectory() as folder:
        model = checkpoint(Path(folder), sparse)
        Drafts.model = model
        texts, engine = serve(Path(folder), dense=not sparse or HAS_COMMON, drafts=drafts)

    def transformers() -> torch.Tensor:
        return torch.stack([logprobs(model, text, len(text) - TOKENS) for text in texts])

    rounded = transformers()
    model = model.float()
    exact = of_all_keys = transformers()
    if sparse:
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = 512
        of_all_keys = transformers()
    chosen = torch.tensor([[sparse and length + place > TOPK for place in range(TOKENS)] for length in PROMPTS])
    right = True
    for name, which in (("contexts of all keys", ~chosen), ("contexts of chosen keys", chosen)):
        if not which.any():
            continue
        error, noise, control = (
            float((run.double() - exact)[which].abs().max()) for run in (engine, rounded, of_all_keys)
        )
        model_name = ("V3.2" if sparse else "V3") + (", drafts" if drafts else "")
        print(
            f"{model_name}, {name}: largest difference of a logprob from transformers in float32 {error:.4f}; of its "
            f"bfloat16 {noise:.4f}, of attention to every key {control:.4f}",
            flush=True,
        )
        right &= error <= NOISE * noise and (which is not chosen or NOISE * noise < control)
    return right


def main() -> None:
    stand_in()
    plugin.register()
    from vllm.distributed import cleanup_dist_env_and_memory

    right = True
    for sparse in (True, False):
        for drafts in (False, True):
            right &= compare(sparse, drafts)
            cleanup_dist_env_and_memory()
    if not right:
        sys.exit(f"a difference is more than {NOISE} times that of bfloat16, or cannot tell a wrong choice")


if __name__ == "__main__":
    main()
