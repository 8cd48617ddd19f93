"""A captured decode step of vLLM over a small DeepSeek-V3.2 with random weights, by one attention backend.

    python -m scripts.vllm_decode FLASHMLA_SPARSE --out flash.json
    python -m scripts.vllm_decode MLA_OPS --out ours.json --against flash.json

MLA_OPS stands for the name under which this version of vLLM knows our backend. Prints tokens that differ from those of
the other run, the time of a step, and the kernels that it launches.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import torch

from mla_ops.integrations import vllm as plugin

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 256,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 2048,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def engine(backend: str, arguments: argparse.Namespace) -> Any:
    """The engine in this process, with weights large enough that logits differ."""
    plugin.register()
    from vllm import LLM
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    initialize = dummy_loader.initialize_dummy_weights
    dummy_loader.initialize_dummy_weights = lambda model, config: initialize(model, config, low=-0.06, high=0.06)
    ours = "MLA_OPS" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    folder = Path(tempfile.mkdtemp())
    config = {
        **CONFIG,
        "num_hidden_layers": arguments.layers,
        "first_k_dense_replace": arguments.layers,  # no experts: their kernels are not the subject
        "num_attention_heads": arguments.heads,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype="fp8_ds_mla",
        block_size=64,
        max_model_len=8192,
        max_num_seqs=arguments.batch,
        max_num_batched_tokens=8192,
        gpu_memory_utilization=0.4,
        enable_prefix_caching=False,
        attention_config={"backend": ours if backend == "MLA_OPS" else backend, "mla_prefill_backend": ours},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [arguments.batch],
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=3000)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    llm = engine(arguments.backend, arguments)
    from vllm import SamplingParams

    generator = torch.Generator().manual_seed(5)
    sampling = SamplingParams(temperature=0.0, max_tokens=arguments.steps + 24, ignore_eos=True, detokenize=False)
    for request in range(arguments.batch):
        tokens = torch.randint(2, 4096, (arguments.context + request,), generator=generator).tolist()
        llm.llm_engine.add_request(str(request), {"prompt_token_ids": tokens}, sampling)
    answers: dict[str, list[int]] = {}

    def step() -> None:
        for output in llm.llm_engine.step():
            answers[output.request_id] = list(output.outputs[0].token_ids)

    while len(answers) < arguments.batch:  # prefills
        step()
    for _ in range(6):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / arguments.steps
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() if "Mem" not in event.name]
    names = Counter(event.name[:70] for event in events)
    device = sum(event.device_time for event in events) / 4
    while llm.llm_engine.has_unfinished_requests():
        step()
    print(
        f"{arguments.backend}: {1e6 * wall:.0f} us a step by the wall, {device:.0f} us in {len(events) / 4:.0f} kernels"
    )
    spent: Counter[str] = Counter()
    for event in events:
        spent[event.name[:70]] += event.device_time / 4
    for name, microseconds in spent.most_common(12):
        print(f"    {microseconds:8.1f} us in {names[name] / 4:5.1f}  {name}")
    arguments.out.write_text(json.dumps(answers))
    if arguments.against is not None:
        other = json.loads(arguments.against.read_text())
        same = sum(answers[request] == other[request] for request in answers)
        ends = [
            next((i for i, pair in enumerate(zip(answers[r], other[r], strict=True)) if pair[0] != pair[1]), None)
            for r in answers
        ]
        print(f"requests with the same {arguments.steps + 24} tokens: {same} of {len(answers)}; first others at {ends}")


if __name__ == "__main__":
    main()
