"""A captured decode step of vLLM over a small DeepSeek-V3.2 or V3 with random weights, by one attention backend.

    python -m scripts.vllm_decode FLASHMLA_SPARSE --out flash.json
    python -m scripts.vllm_decode MLA_OPS --indexer --out ours.json --against flash.json

MLA_OPS stands for the name under which this version of vLLM knows our backend. `--dense` makes the model a V3, for it
and FLASHMLA. `--indexer` serves the indexer by our operators, too. Prints where tokens differ from those of the other
run, how many requests have the same bits alone as in a batch, and for each batch and context the time of a replayed
step on the device and the kernels of it. `--drafts FILE` decodes speculatively, with drafts from the other run's
tokens, two a step, and `--mtp` with those of a next-token layer; neither measures times. `--graphs FULL --chunk 512`
captures steps that mix prefills, cut to 512 tokens, and decodes. `--fixed-norm` mends an op of vLLM 0.24 that is not
batch-invariant. `--lock FILE` lets several runs start at one time and measure in turn. `table flash.json ours.json`
prints the page of `docs/results`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch

from mla_ops.integrations import vllm as plugin

# one process, models from a folder, no FlashInfer, and nothing that is compiled as vLLM's packages are imported
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TVM_FFI_DISABLE_TORCH_C_DLPACK": "1",
}
VOCABULARY = 4096
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
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 65536,
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
DENSE = {name: value for name, value in CONFIG.items() if not name.startswith("index_")}
DENSE |= {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
DRAFTS = 2
COMPARED = {"batch": 8, "context": 3000, "tokens": 48}
PARTS = ("attention", "query halves", "index translation", "scores", "top-k", "keys", "matrix products")
KINDS = {  # the first kind that has a part of a kernel's name is the kernel's
    "query halves": ("ConcatMLAQ",),
    "attention": ("sparse_attention", "flash_fwd_splitkv_mla", "splitkv_mla", "combine", "sparse_fwd", "merge"),
    "index translation": ("convert_req_index",),
    "scores": ("mqa_logits", "indexer_logits"),
    "top-k": ("topk", "top_k"),
    "keys": ("concat_and_cache", "quant_and_cache", "store_"),
    "fill, copy": ("Fill", "fill", "Cat", "copy", "elementwise"),
    "matrix products": ("gemm", "nvjet", "cutlass", "splitK", "matmul", "bmm"),
}


def fix_norm() -> None:
    """One order of additions, whatever the number of tokens: vLLM 0.24 has another one from 256 of them on."""
    from vllm import _custom_ops
    from vllm.model_executor.layers.batch_invariant import rms_norm_batch_invariant

    def fused_add_rms_norm(values: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
        residual.add_(values)
        values.copy_(rms_norm_batch_invariant(residual, weight, epsilon))

    _custom_ops.fused_add_rms_norm = fused_add_rms_norm


def prompt(number: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(5 + number)
    return torch.randint(2, VOCABULARY, (length,), generator=generator).tolist()


class Drafts:
    """Drafts are the tokens that another run wrote."""

    answers: ClassVar[dict[tuple[int, ...], list[int]]] = {}

    def __init__(self, vllm_config: Any) -> None: ...

    def load_model(self, model: Any) -> None: ...

    @classmethod
    def read(cls, file: Path) -> None:
        while not file.exists():  # the other run may be under way
            time.sleep(0.5)
        runs = json.loads(file.read_text())["tokens"]
        prompts = [prompt(number, COMPARED["context"] - number) for number in range(len(runs))]
        texts = [tokens + [token for token, _ in run] for tokens, run in zip(prompts, runs, strict=True)]
        cls.answers = {tuple(text[:8]): text for text in texts}

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        texts = [self.answers.get(tuple(tokens[row, :8].tolist()), []) for row in range(len(sampled))]
        ends = [int(length) for length in lengths[: len(sampled)]]
        return [text[end : end + DRAFTS] if new else [] for text, end, new in zip(texts, ends, sampled, strict=True)]


def engine(arguments: argparse.Namespace) -> Any:
    """The engine in this process, with weights large enough that logits differ."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if arguments.indexer:
        os.environ[plugin.ENVIRONMENT_VARIABLE] = "indexer"
    plugin.register()
    if arguments.fixed_norm:
        fix_norm()
    from vllm import LLM
    from vllm.model_executor.model_loader import dummy_loader
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    initialize = dummy_loader.initialize_dummy_weights
    dummy_loader.initialize_dummy_weights = lambda model, config: initialize(model, config, low=-0.06, high=0.06)
    ours = "MLA_OPS" if hasattr(AttentionBackendEnum, "register") else "CUSTOM"
    backend = ours if arguments.backend == "MLA_OPS" else arguments.backend
    folder = Path(tempfile.mkdtemp())
    config = {
        **(DENSE if arguments.dense else CONFIG),
        "num_hidden_layers": arguments.layers,
        "first_k_dense_replace": arguments.layers + 1,  # no experts: their kernels are not the subject
        "num_nextn_predict_layers": int(arguments.mtp),
        "num_attention_heads": arguments.heads,
        "num_key_value_heads": arguments.heads,
    }
    (folder / "config.json").write_text(json.dumps(config))
    batches = [batch for batch, _ in arguments.steps]
    mixed = {arguments.chunk // 4, arguments.chunk} if arguments.graphs == "FULL" else set()
    speculation, width = None, 1
    if arguments.drafts is not None:
        width += DRAFTS
        speculation = {"method": "custom_class", "model": f"{__name__}.Drafts", "num_speculative_tokens": DRAFTS}
    if arguments.mtp:
        width += 1
        speculation = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": backend}
    return LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="bfloat16",
        kv_cache_dtype="auto" if arguments.dense else "fp8_ds_mla",
        block_size=64,
        max_model_len=-(-max(context for _, context in arguments.steps) // 1024) * 1024 + 4096,  # whole block tables
        max_num_seqs=max(batches),
        max_num_batched_tokens=arguments.chunk,
        kv_cache_memory_bytes=arguments.cache_gib * 2**30,
        gpu_memory_utilization=0.05,  # so much must be free at the start, beside other runs
        enable_prefix_caching=False,
        attention_config={"backend": backend, "mla_prefill_backend": ours},
        compilation_config={
            "mode": 0,
            "cudagraph_mode": arguments.graphs,
            "cudagraph_capture_sizes": sorted({width * batch for batch in (*batches, COMPARED["batch"])} | mixed),
        },
        speculative_config=speculation,
    )


class Requests:
    """Requests with random prompts, under way. A prompt follows from the number of its request."""

    def __init__(
        self, llm: Any, numbers: Sequence[int], context: int, max_tokens: int, logprobs: int | None = None
    ) -> None:
        from vllm import SamplingParams

        self.engine, self.outputs, self.steps = llm.llm_engine, dict[str, Any](), 0
        self.names = [f"{len(numbers)}-{context}-{max_tokens}-{number}" for number in numbers]
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=logprobs
        )
        for number, name in zip(numbers, self.names, strict=True):
            self.engine.add_request(name, {"prompt_token_ids": prompt(number, context - number)}, sampling)

    def step(self) -> None:
        self.steps += 1
        for output in self.engine.step():
            self.outputs[output.request_id] = output.outputs[0]

    def prefill(self) -> None:
        while len(self.outputs) < len(self.names):
            self.step()
        for _ in range(4):
            self.step()

    def finish(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def abort(self) -> None:
        self.engine.abort_request(self.names, internal=False)
        self.finish()


@contextlib.contextmanager
def replays() -> Iterator[list[tuple[torch.cuda.Event, torch.cuda.Event]]]:
    """Events around each replay of a graph."""
    real, pairs = torch.cuda.CUDAGraph.replay, list[tuple[torch.cuda.Event, torch.cuda.Event]]()

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        pair[0].record()
        real(graph)
        pair[1].record()
        pairs.append(pair)

    torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign, assignment]
    try:
        yield pairs
    finally:
        torch.cuda.CUDAGraph.replay = real  # type: ignore[method-assign]


def compared(llm: Any, numbers: Sequence[int]) -> dict[str, Any]:
    """Tokens of each request with the logprobs of the best at each place; steps, and how many were replays."""
    requests = Requests(llm, numbers, COMPARED["context"], COMPARED["tokens"], logprobs=4)
    with replays() as pairs:
        requests.finish()
    tokens = [
        [
            (token, {other: entry.logprob for other, entry in best.items()})
            for token, best in zip(requests.outputs[name].token_ids, requests.outputs[name].logprobs, strict=True)
        ]
        for name in requests.names
    ]
    return {"tokens": tokens, "steps_together": requests.steps, "replays": len(pairs)}


class Differences(NamedTuple):
    """A comparison of two runs' tokens.

    Attributes:
        same: requests with the same tokens.
        others: the other requests.
        ties: those of them whose first other token was as likely, within twice the noise.
        noise: the largest difference of a logprob before any first other token.
    """

    same: int
    others: int
    ties: int
    noise: float


def differences(ours: list[Any], theirs: list[Any]) -> Differences:
    noise, gaps = 0.0, []
    for mine, other in zip(ours, theirs, strict=True):
        for one, two in zip(mine, other, strict=True):
            best, other_best = ({int(token): value for token, value in run[1].items()} for run in (one, two))
            if one[0] != two[0]:
                pair = ((best, one[0], two[0]), (other_best, two[0], one[0]))
                gaps.append(max(run[a] - run.get(b, -9e9) for run, a, b in pair))
                break
            noise = max([noise, *(abs(best[token] - other_best[token]) for token in set(best) & set(other_best))])
    return Differences(len(ours) - len(gaps), len(gaps), sum(gap <= 2 * noise for gap in gaps), noise)


def kind(name: str) -> str:
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other")


def measure(llm: Any, arguments: argparse.Namespace, batch: int, context: int) -> dict[str, Any]:
    requests = Requests(llm, range(batch), context, 4000)
    requests.prefill()
    with replays() as pairs:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(arguments.repeats):
            requests.step()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - start) / arguments.repeats
    replayed = [begin.elapsed_time(end) * 1e3 for begin, end in pairs]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            requests.step()
        torch.cuda.synchronize()
    requests.abort()
    events = [event for event in profiler.events() if "Mem" not in event.name]
    spent, names = Counter[str](), Counter[str]()
    kinds, launched = Counter[str](), Counter[str]()
    for event in events:
        for times, counts, label in ((spent, names, event.name[:90]), (kinds, launched, kind(event.name))):
            times[label] += event.device_time / 4
            counts[label] += 1
    result = {
        "batch": batch,
        "context": context,
        "graphs": len(replayed) / arguments.repeats,
        "replay_us": statistics.median(replayed) if replayed else None,
        "wall_us": 1e6 * wall,
        "kernels": len(events) / 4,
        "kernels_us": sum(spent.values()),
        "kinds": {label: (round(us, 1), launched[label] / 4) for label, us in kinds.most_common()},
        "names": {label: (round(us, 1), names[label] / 4) for label, us in spent.most_common(arguments.names)},
    }
    print(
        f"{arguments.label}: {batch} x {context}: {result['replay_us'] or 0:.0f} us a replayed step, "
        f"{result['kernels_us']:.0f} us in {result['kernels']:.0f} kernels, {1e6 * wall:.0f} us by the wall"
    )
    print(
        "    " + "; ".join(f"{label} {us} us in {count}" for label, (us, count) in result["kinds"].items()), flush=True
    )
    return result


@contextlib.contextmanager
def turn(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def part(step: dict[str, Any], name: str) -> float:
    """Microseconds of a kind; of matrix products, those among the kernels that the file lists."""
    if name == "matrix products":
        return sum(us for label, (us, _) in step["names"].items() if kind(label) == name)
    return float(step["kinds"].get(name, (0.0, 0))[0])


def rows(runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"| batch x context | backend | kernels' time | ratio | kernels | replay | {' | '.join(PARTS)} |",
        "|" + "---|" * (6 + len(PARTS)),
    ]
    measured = [{(step["batch"], step["context"]): step for step in run.get("steps", ())} for run in runs]
    for key, base in measured[0].items():
        for run, steps in zip(runs, measured, strict=True):
            step = steps.get(key)
            if step is None:
                continue
            parts = " | ".join(f"{part(step, name):.0f}" if part(step, name) else "" for name in PARTS)
            ratio = "" if run is runs[0] else f"{step['kernels_us'] / base['kernels_us']:.2f}"
            lines.append(
                f"| {step['batch']} x {step['context']} | {run['label']} | {step['kernels_us']:.0f} | {ratio} | "
                f"{step['kernels']:.0f} | {step['replay_us']:.0f} | {parts} |"
            )
    return [*lines, ""] if measured[0] else []


def tokens(runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| backend | same tokens | others, ties | largest difference | tokens alone | bits alone | steps | replays |",
        "|" + "---|" * 8,
    ]
    for run in runs:
        compared = ["", "", ""]
        if run is not runs[0]:
            found = differences(run["tokens"], runs[0]["tokens"])
            compared = [str(found.same), f"{found.others}, {found.ties}", f"{found.noise:.4f}"]
        counts = (run.get("alone_tokens", ""), run.get("alone", ""), run["steps_together"], run["replays"])
        lines.append("| " + " | ".join([run["label"], *compared, *map(str, counts)]) + " |")
    return lines


def page(runs: list[dict[str, Any]]) -> str:
    """Markdown: tables for each number of heads, whose first run is what the others are compared with."""
    asked = f"{COMPARED['batch']} requests of {COMPARED['context']} tokens write {COMPARED['tokens']} each"
    lines = [
        f"# A decode step of vLLM 0.24 on an {runs[0]['device']}",
        "",
        "`python -m scripts.vllm_decode` ran `LLM()` over DeepSeek models of small width and random weights,",
        f"{runs[0]['layers']} layers, with full CUDA graphs of decode steps and without Inductor. `table FILE ...`",
        "wrote this page. Mixed graphs hold prefills too, cut to so many tokens a step. Batch-invariant is",
        "`VLLM_BATCH_INVARIANT=1`, in which vLLM has matrix products of its own. A fixed norm adds in one order.",
    ]
    if any(run.get("steps") for run in runs):
        lines += [
            "",
            "Times are us of the device. `kernels' time` is the sum over a whole step, metadata and sampling included;",
            "so are `kernels`. `replay` is the median between events around a replay, the host included.",
            "Matrix products are those among the kernels that take longest, 30 unless `--names` says otherwise. Runs",
            "given as `--tokens FILE ...` have no times here, as they shared the GPU.",
        ]
    lines += [
        "",
        f"Tokens: {asked}, and are compared with those of the first backend.",
        "The first other token is a tie where both were as likely, within twice the largest difference of a logprob",
        "before first other tokens, which is in the table. `alone`: requests with the same tokens without the others,",
        "blank where that was not compared, and with the same bits of logprobs. Drafts that are accepted save steps.",
    ]
    models = [(run["heads"], run.get("dense", False)) for run in runs]
    for heads, dense in dict.fromkeys(models):
        group = [run for run, model in zip(runs, models, strict=True) if model == (heads, dense)]
        labels = Counter[str]()
        for run in group:
            labels[run["label"]] += 1
            run["label"] += ", again" * (labels[run["label"]] > 1)
        model = "V3, dense" if dense else "V3.2, sparse"
        lines += ["", f"## {model}, {heads} heads a rank", "", *rows(group), *tokens(group)]
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend")
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--indexer", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--steps", nargs="+", default=["16x3000"], help="batch x context, each measured")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--names", type=int, default=30, help="kernels that the file lists")
    parser.add_argument("--cache-gib", type=int, default=16)
    parser.add_argument("--graphs", choices=["FULL_DECODE_ONLY", "FULL"], default="FULL_DECODE_ONLY")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a step at most")
    parser.add_argument("--fixed-norm", action="store_true")
    parser.add_argument("--drafts", type=Path)
    parser.add_argument("--mtp", action="store_true")
    parser.add_argument("--lock", type=Path)
    arguments = parser.parse_args()
    arguments.steps = [tuple(map(int, step.split("x"))) for step in arguments.steps]
    invariant = " batch-invariant" if os.environ.get("VLLM_BATCH_INVARIANT") == "1" else ""
    mixed = f", mixed graphs of {arguments.chunk}" if arguments.graphs == "FULL" else ""
    fixed = ", fixed norm" if arguments.fixed_norm else ""
    drafts = f", {DRAFTS} drafts" if arguments.drafts is not None else ", MTP" if arguments.mtp else ""
    arguments.label = arguments.backend + (" and indexer" if arguments.indexer else "")
    arguments.label += invariant + mixed + fixed + drafts
    return arguments


def save(result: dict[str, Any], file: Path) -> None:
    """All of it at once: a run that waits for its drafts reads it."""
    unfinished = file.with_suffix(".part")
    unfinished.write_text(json.dumps(result))
    unfinished.replace(file)


def main() -> None:
    if sys.argv[1:2] == ["table"]:
        parser = argparse.ArgumentParser(prog="vllm_decode table")
        parser.add_argument("files", nargs="*", type=Path)
        parser.add_argument("--tokens", nargs="*", type=Path, default=[])
        files = parser.parse_args(sys.argv[2:])
        runs = [json.loads(file.read_text()) for file in files.files]
        without_times = [json.loads(file.read_text()) | {"steps": []} for file in files.tokens]
        print(page([*runs, *without_times]))
        return
    arguments = parse()
    start = time.perf_counter()
    llm = engine(arguments)
    print(f"{arguments.label}: engine after {time.perf_counter() - start:.0f} s", flush=True)
    if arguments.drafts is not None:
        Drafts.read(arguments.drafts)
    with turn(arguments.lock):
        result = {"label": arguments.label, "device": torch.cuda.get_device_name(), "heads": arguments.heads}
        result |= {"layers": arguments.layers, "dense": arguments.dense, **compared(llm, range(COMPARED["batch"]))}
        save(result, arguments.out)
        alone = [compared(llm, [number])["tokens"][0] for number in range(COMPARED["batch"])]
        result["alone"] = sum(one == together for one, together in zip(alone, result["tokens"], strict=True))
        result["alone_tokens"] = differences(alone, result["tokens"]).same
        print(f"{arguments.label}: {result['alone']} requests have the same bits alone as in the batch", flush=True)
        steps = [] if arguments.drafts is not None or arguments.mtp else arguments.steps
        result["steps"] = [measure(llm, arguments, *step) for step in steps]
    save(result, arguments.out)
    if arguments.against is not None:
        other = json.loads(arguments.against.read_text())
        print(f"{arguments.label} against {other['label']}: {differences(result['tokens'], other['tokens'])}")


if __name__ == "__main__":
    main()
