"""The demo itself: stock transformers first, then the same weights through our ops, then what came of it."""

from __future__ import annotations

import io
import sys
import time
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch

from .. import dispatch
from ..models import Decoder, GenerationResult, GenerationSession, decoder_for
from ..models.evaluate import (
    Agreement,
    StockResult,
    compare_logits,
    stock_generate,
    stock_logits,
    teacher_forced_logits,
)
from .model import ARCHITECTURES, TEXT, Architecture, LoadedModel, find_architecture, load_model, load_tokenizer
from .ranks import join_ranks

# torch suggests TF32 for float32 products; agreement to float32 rounding is what the demo is about
warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")

CACHE_DTYPES = {
    "fp8_ds_mla": torch.bfloat16,
    "fp8_ds_mla_v4": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


# tokens at the end of a prompt that the report shows
ECHO_TOKENS = 32


@dataclass(frozen=True)
class DemoOptions:
    """Options of the command line.

    Attributes:
        arch: architecture of the small model, one of `ARCHITECTURES`; a checkpoint names its own.
        model: folder of a checkpoint; None for the small model.
        prompt: text to continue; None for passages of the text that ships with the package.
        prompt_file: file to read the prompt from; not with `prompt`.
        batch: requests that run together.
        max_new_tokens: of each request.
        cache: format of the latent cache, it decides the model's dtype; None for the architecture's own fp8 format.
        compile, graph: whether to compile, and to capture the decode step in a CUDA graph.
        device: where to run; None for CUDA where there is some.
        tp, dcp: ranks that share heads and experts, and contexts; as many as run, or 1.
    """

    arch: str = "v3.2"
    model: str | None = None
    prompt: str | None = None
    prompt_file: str | None = None
    batch: int = 4
    max_new_tokens: int = 12
    cache: str | None = None
    compile: bool = True
    graph: bool = True
    device: str | None = None
    tp: int = 1
    dcp: int = 1


class Console:
    """Progress lines with the time since the start.

    A running count is rewritten in place on a terminal, and is a line every ten seconds elsewhere.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self.stream = stream or sys.stdout
        self.began = time.perf_counter()
        self._last_count = self.began

    def line(self, text: str = "") -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def progress(self, text: str) -> None:
        self.line(f"[{time.perf_counter() - self.began:6.1f} s] {text}")

    def count(self, done: int, total: int) -> None:
        now, in_place = time.perf_counter(), self.stream.isatty()
        if now - self._last_count < (0.2 if in_place else 10) and not (in_place and done >= total):
            return
        self._last_count = now
        if not in_place:
            self.progress(f"  {done} of {total} tokens")
            return
        self.stream.write(f"\r             {done} of {total} tokens " + ("\n" if done >= total else ""))
        self.stream.flush()


@dataclass(frozen=True)
class CompileCounts:
    """Counts of what `torch.compile` has done in this process so far."""

    graphs: int
    breaks: int

    @classmethod
    def now(cls) -> CompileCounts:
        from torch._dynamo.utils import counters

        return cls(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def make_prompts(
    options: DemoOptions, tokenizer: Any, architecture: Architecture = ARCHITECTURES["v3.2"]
) -> list[list[int]]:
    """Token ids of each request: the prompt given, for every request, or passages of the text.

    The passages are of unequal length, except where transformers cannot pad them.
    """
    if options.prompt is not None and options.prompt_file is not None:
        raise ValueError("--prompt and --prompt-file exclude each other")
    text = options.prompt
    if options.prompt_file is not None:
        if not Path(options.prompt_file).is_file():
            raise FileNotFoundError(f"--prompt-file must be a text file, there is none at '{options.prompt_file}'")
        try:
            text = Path(options.prompt_file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--prompt-file must be a text file in UTF-8, '{options.prompt_file}': {error}") from error
    if text is not None:
        tokens = list(tokenizer.encode(text))
        if not tokens:
            raise ValueError("the prompt is empty")
        return [tokens] * options.batch
    book = TEXT.read_text()
    prompts = []
    for row in range(options.batch):
        length = architecture.prompt_lengths[row % len(architecture.prompt_lengths)]
        start = row * 311 % max(len(book) - length, 1)
        prompts.append(list(tokenizer.encode(book[start : start + length])))
    if architecture.pads:
        return prompts
    shortest = min(len(prompt) for prompt in prompts)
    return [prompt[:shortest] for prompt in prompts]


class Requests(NamedTuple):
    """Prompts of a run, and the room that they need.

    Attributes:
        tokenizer: of the model.
        prompts: token ids of each request.
        longest: tokens of the longest request, its continuation included.
        max_length: the most that the model takes.
    """

    tokenizer: Any
    prompts: list[list[int]]
    longest: int
    max_length: int


def run_demo(options: DemoOptions, stream: TextIO | None = None) -> int:
    """Runs the demo and prints its report. Returns the exit status: 0."""
    architecture = find_architecture(options.arch, options.model)
    cache_format = options.cache or architecture.cache_formats[0]
    _check_options(options, architecture, cache_format)
    meshes: dict[str, Any] = {}
    if options.tp == options.dcp == 1:
        device = _choose_device(options.device)
    else:
        device, meshes = join_ranks(options.tp, options.dcp, options.device)
        if torch.distributed.get_rank() > 0:  # one rank tells; all have the same to tell
            stream = io.StringIO()
    console = Console(stream)
    requests = _read_requests(options, architecture)
    prompts = requests.prompts
    dtype = CACHE_DTYPES[cache_format]
    console.progress(f"torch {torch.__version__}, transformers {_version('transformers')}, {_device_name(device)}")
    loaded = load_model(architecture, options.model, dtype, device)
    console.progress(f"{loaded.description}, {str(dtype).removeprefix('torch.')}")
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    console.progress(f"requests: {len(prompts)}, of {lengths} tokens, {options.max_new_tokens} new tokens each")

    stock = _run_stock(options, loaded, prompts, console)
    block_size = architecture.block_size
    max_model_len = min(-(-requests.longest // block_size) * block_size, requests.max_length)
    text = (prompts[0] + stock.tokens[0])[:max_model_len]
    theirs = stock_logits(loaded.model, text)
    reference = theirs if loaded.reference is None else stock_logits(loaded.reference, text)
    decoder = decoder_for(loaded.model, max_model_len, **meshes)  # leaves a rank its share of the weights
    if meshes:
        console.progress(f"over ranks: heads and experts by {options.tp}, contexts by {options.dcp}")
    session = _open_session(options, loaded, decoder, len(prompts), cache_format, block_size)
    before = CompileCounts.now()
    doing = [text for text, on in (("compiling prefill and decode", options.compile),) if on]
    doing += ["capturing the decode step"] * session.cuda_graph
    console.progress("mla_ops: " + (" and ".join(doing) or "first step") + " (once)")
    session.warm_up(progress=lambda what: console.progress(f"mla_ops:   {what}"))
    warm = CompileCounts.now()
    console.progress("mla_ops: reading and continuing")
    session.generate([prompts[0][:8]], min(2, options.max_new_tokens))
    ours = session.generate(
        prompts, options.max_new_tokens, steps_per_check=16 if session.cuda_graph else 1, progress=console.count
    )
    after = CompileCounts.now()

    console.progress("comparing predictions over the first text, position by position")
    mine = teacher_forced_logits(decoder, text, cache_format, block_size=block_size)
    console.progress("done")
    report = _report(
        options,
        architecture,
        loaded,
        requests.tokenizer,
        session,
        prompts,
        ours,
        stock,
        agreement=compare_logits(theirs, mine),
        against_reference=compare_logits(reference, mine),
        stock_against_reference=compare_logits(reference, theirs),
        counts=(after.graphs - before.graphs, after.breaks - before.breaks, after.graphs - warm.graphs),
    )
    console.line()
    for line in report:
        console.line(line)
    return 0


def _read_requests(options: DemoOptions, architecture: Architecture) -> Requests:
    """Raises ValueError for a prompt that the model cannot take."""
    tokenizer, max_length = load_tokenizer(options.model)
    prompts = make_prompts(options, tokenizer, architecture)
    longest = max(len(prompt) for prompt in prompts) + options.max_new_tokens
    if longest > max_length:
        raise ValueError(
            f"prompt and --max-new-tokens make {longest} tokens, the model takes {max_length}: shorten one of them"
        )
    return Requests(tokenizer, prompts, longest, max_length)


def _run_stock(options: DemoOptions, loaded: LoadedModel, prompts: list[list[int]], console: Console) -> StockResult:
    console.progress("stock transformers: reading and continuing")
    stock_generate(loaded.model, [prompts[0][:8]], 2)  # first calls set up libraries
    return stock_generate(
        loaded.model,
        prompts,
        options.max_new_tokens,
        eos_token_ids=loaded.eos_token_ids,
        progress=console.count,
    )


def _open_session(
    options: DemoOptions, loaded: LoadedModel, decoder: Decoder, batch: int, cache_format: str, block_size: int
) -> GenerationSession:
    on_gpu = decoder.device.type == "cuda"
    return GenerationSession(
        decoder,
        max_num_requests=batch,
        cache_format=cache_format,
        block_size=block_size,
        eos_token_ids=loaded.eos_token_ids,
        compiled=options.compile,
        # Inductor's C++ takes longer to compile on a CPU than all else takes to run
        backend="inductor" if on_gpu else "aot_eager",
        cuda_graph=options.graph and on_gpu,
    )


def _report(
    options: DemoOptions,
    architecture: Architecture,
    loaded: LoadedModel,
    tokenizer: Any,
    session: GenerationSession,
    prompts: list[list[int]],
    ours: GenerationResult,
    stock: StockResult,
    *,
    agreement: Agreement,
    against_reference: Agreement,
    stock_against_reference: Agreement,
    counts: tuple[int, int, int],
) -> list[str]:
    graphs, breaks, recompiles = counts
    lines = ["Text"]
    decode = tokenizer.decode
    for number, (prompt, tokens) in enumerate(zip(prompts[:4], ours.tokens[:4], strict=True), 1):
        cut = "..." if len(prompt) > ECHO_TOKENS else ""
        echo = _printable(decode(prompt[-ECHO_TOKENS:]))
        lines.append(f"  {number}: {cut}{echo} >>> {_printable(decode(tokens))}")
    if options.model is None:
        lines.append("  (The weights are random, so this is noise; what counts is that it is transformers' noise.)")

    lines += ["", f"{'':27}{'mla_ops':>14}{'transformers':>16}{'ratio':>9}"]

    def row(name: str, mine: float, theirs: float, digits: int = 0) -> str:
        return f"{name:27}{mine:14,.{digits}f}{theirs:16,.{digits}f}{mine / max(theirs, 1e-9):8.2f}x"

    # tokens of a request that both caches hold at the end, padding included
    held = max(len(prompt) for prompt in prompts) + max(len(tokens) for tokens in stock.tokens) - 1
    by_token, by_request = _cache_parts(session, architecture)
    mine_bytes = sum(by_token.values()) + sum(by_request.values()) / held
    parts = ["  ours: " + " + ".join(f"{size:,.0f} {part}" for part, size in by_token.items())]
    parts += [f"    + {size / held:,.0f} {part}: {size:,.0f} a request" for part, size in by_request.items()]
    parts[-1] += f", {len(session.cache.layers)} layers"
    lines += [
        row("decode, tokens a second", ours.decode_tokens_per_second, stock.decode_tokens_per_second, 1),
        row("prefill, tokens a second", ours.prefill_tokens_per_second, stock.prefill_tokens_per_second, 1),
        row("cache, bytes a token", mine_bytes, stock.cache_bytes_per_token),
        *parts,
        f"  transformers as it comes: eager, {'left-padded' if architecture.pads else 'unpadded'}, dynamic cache",
    ]

    same = [_common_prefix(a, b) for a, b in zip(ours.tokens, stock.tokens, strict=True)]
    total = sum(len(tokens) for tokens in stock.tokens)
    lines += ["", "Agreement"]
    lines.append(f"  greedy tokens equal to stock before the first difference: {sum(same)} of {total} {tuple(same)}")
    lines.append(f"  next-token predictions against stock:           {agreement}")
    if loaded.reference is not None:
        lines.append(f"  against stock in float32:                       {against_reference}")
        lines.append(f"  stock itself against stock in float32:          {stock_against_reference}")

    lines += ["", "Lowerings"]
    for op, names in _lowerings_used(session, architecture).items():
        lines.append(f"  {op:30}{names}")

    lines += ["", "Compilation"]
    if options.compile:
        lines.append(f"  graphs compiled {graphs}, graph breaks {breaks}, recompiles after warm-up {recompiles}")
        if session.decoder.device.type == "cpu":
            lines.append("  by AOT eager, which runs each op of a graph by itself; on a GPU Inductor compiles them")
    else:
        lines.append("  off (--no-compile): every op ran eagerly")
    if session.cuda_graph:
        lines.append(f"  decode replayed from one CUDA graph, {session.num_steps} replays")
    else:
        why = "--no-graph" if session.decoder.device.type == "cuda" else "CUDA graphs need a GPU"
        lines.append(f"  decode not captured ({why})")
    return lines


def _cache_parts(session: GenerationSession, architecture: Architecture) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes a token, and bytes a request, of the session's caches in all layers, by what they hold."""
    cache = session.cache
    by_token: defaultdict[str, float] = defaultdict(float)
    by_request: defaultdict[str, float] = defaultdict(float)
    for layer in cache.layers:
        for field, tensor in layer._asdict().items():
            if tensor is None:
                continue
            if field in architecture.request_parts:
                by_request[architecture.request_parts[field]] += tensor.nbytes / tensor.shape[0]
                continue
            part = architecture.cache_parts[field].format(cache=cache.cache_format, index=cache.index_format)
            by_token[part] += tensor.nbytes / (cache.num_blocks * cache.block_size)
    return by_token, by_request


def _lowerings_used(session: GenerationSession, architecture: Architecture) -> dict[str, str]:
    """The lowering that dispatch chose for each op, for the shapes of prefill and decode."""
    used: dict[str, Counter[str]] = {}
    for num_tokens in (session.prefill_tokens, len(session.slots)):
        for call in architecture.calls(session, num_tokens):
            used.setdefault(call.op, Counter())[dispatch.select_name(call)] += 1
    return {op: ", ".join(names) for op, names in used.items()}


def _check_options(options: DemoOptions, architecture: Architecture, cache_format: str) -> None:
    if cache_format not in architecture.cache_formats:
        formats = list(architecture.cache_formats)
        raise ValueError(f"--cache must be one of {formats} for {architecture.title}, got '{cache_format}'")
    for name in ("batch", "max_new_tokens"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")


def _choose_device(name: str | None) -> torch.device:
    """Raises ValueError for a device that is not here."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got '{name}'") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device must be cpu, cuda or cuda:N, got '{name}'")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not torch.cuda.is_available() or (device.index or 0) >= count:
            raise ValueError(f"--device {name}: torch {torch.__version__} sees {count} CUDA devices here")
    return device


def _common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _printable(text: str, width: int = 100) -> str:
    shown = "".join(char if char.isprintable() and char != "\ufffd" else "·" for char in text)
    return shown if len(shown) <= width else shown[: width - 3] + "..."


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, threads: {torch.get_num_threads()}"
