"""A table of every lowering on every architecture, its state, and what shows it: `python -m mla_ops doctor --matrix`.

Architectures that are not here are stand-in devices with their compute capability. A lowering's own reasons say what it
refuses; a reason of the kind `Missing` is one that an installation can change, so the lowering counts as there.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import dispatch
from .dispatch import ADAPTERS, BACKENDS, FAMILIES, Call, Missing
from .formats import FORMATS, LATENT_FORMATS

ARCHITECTURES: dict[str, tuple[int, int]] = {
    f"SM{major}{minor}": (major, minor)
    for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
}
COLUMNS = ("CPU", *ARCHITECTURES)
INDEX_FORMATS = ("fp8_index", "bf16", "fp16", "fp32")
PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Formats of the caches that an op reads or writes, where it takes any.
CACHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("concat_and_cache", "gather_cache", "paged_sparse_attention", "paged_attention"), LATENT_FORMATS),
    "paged_sparse_attention.extra": ("fp8_ds_mla_v4", "fp8_ds_mla", "bf16"),
    "compress_and_cache": ("fp8_ds_mla_v4", "fp8_index", "bf16", "fp16", "fp32"),
    **dict.fromkeys(("write_index_cache", "gather_index_cache", "paged_indexer_logits", "select_keys"), INDEX_FORMATS),
}

FP8_AND_BF16 = ("bf16", "fp8_ds_mla", "fp8_ds_mla_v4")
# Lowering, op and formats of the cache of which docs/results/ has a checked time on an H200.
MEASURED: dict[tuple[str, str], tuple[str, ...]] = {
    ("hopper", "paged_attention"): ("bf16", "fp8_ds_mla"),
    ("hopper", "paged_sparse_attention"): ("bf16", "fp8_ds_mla"),
    ("hopper", "paged_sparse_attention.extra"): ("fp8_ds_mla_v4",),
    ("hopper", "prefill_attention"): ("",),
    ("hopper", "sparse_attention"): ("",),
    ("hopper", "indexer_logits"): ("",),
    ("hopper", "paged_indexer_logits"): ("fp8_index",),
    ("hopper", "select_keys"): ("fp8_index",),
    ("hopper", "select_keys.flat"): ("",),
    ("hopper", "topk_indices"): ("",),
    ("flash_mla", "sparse_attention"): ("",),
    ("torch_sdpa", "prefill_attention"): ("",),
    ("triton", "build_compressed_metadata"): ("",),
    ("triton", "build_step_metadata"): ("",),
    ("triton", "combine_topk_swa_indices"): ("",),
    ("triton", "compress_and_cache"): ("bf16", "fp8_ds_mla_v4"),
    ("triton", "compressed_indices"): ("",),
    ("triton", "concat_and_cache"): FP8_AND_BF16,
    ("triton", "convert_req_index_to_global_index"): ("",),
    ("triton", "filter_prefill_indices"): ("",),
    ("triton", "gather_cache"): FP8_AND_BF16,
    ("triton", "merge_attention_states"): ("",),
    ("triton", "merge_attention_states.stacked"): ("",),
    ("triton", "paged_attention"): ("bf16", "fp8_ds_mla"),
    ("triton", "paged_sparse_attention"): ("bf16", "fp8_ds_mla"),
    ("triton", "paged_sparse_attention.extra"): ("fp8_ds_mla_v4",),
    ("triton", "prefill_attention"): ("",),
    ("triton", "sliding_window_indices"): ("",),
}

MEASURED_ON, TESTED, INTERPRETED, COMPILES = "measured", "tested", "tested in the interpreter", "compiles"
CONTRACT, REFUSED = "adapter, contract-tested", "refused"

# The proof of each state. `{family}` is the op's.
EVIDENCE = {
    MEASURED_ON: "a checked row in `docs/results/`",
    TESTED: "`pytest -m gpu` on an H200; on the CPU `tests/`",
    INTERPRETED: "the tests of the op's family in `tests/`, with Triton's interpreter",
    COMPILES: "`tests/test_aot_compile.py`",
    CONTRACT: "`tests/test_flashinfer.py`, `tests/test_flashinfer_sparse.py`, "
    "`tests/test_dense_attention_adapters.py`, `tests/test_sparse_attention_adapters.py`",
    REFUSED: "`tests/test_dispatch.py`; the reason is the lowering's own",
}


class Cell(NamedTuple):
    """The state of a lowering of one op over one format on one architecture, and why it is refused or on request."""

    state: str
    reason: str = ""


class Line(NamedTuple):
    """A lowering of an op over formats that are alike; a cell for the CPU and each architecture."""

    op: str
    cache_formats: tuple[str, ...]
    backend: str
    cells: dict[str, Cell]


def device_of(architecture: str) -> torch.device:
    """The CPU, or a stand-in."""
    return torch.device("cpu") if architecture == "CPU" else dispatch.stand_in(ARCHITECTURES[architecture])


def call_of(op: str, cache_format: str, device: torch.device) -> Call:
    """A typical call of an op over a format."""
    call = dispatch.typical_call(op, device)
    if not cache_format:
        return call
    entry = FORMATS[cache_format]
    head_dim = call.head_dim and entry.head_dims[0]
    if op == "paged_sparse_attention.extra" and cache_format == "bf16":
        head_dim = entry.head_dims[1]
    dtype = PLAIN.get(cache_format, torch.bfloat16)
    if op in ("paged_indexer_logits", "select_keys"):
        dtype = PLAIN.get(cache_format, torch.float8_e4m3fn)
    extra = cache_format if call.extra_cache_format else ""
    return call._replace(cache_format=cache_format, head_dim=head_dim, dtype=dtype, extra_cache_format=extra)


def cell(backend: str, call: Call, architecture: str) -> Cell:
    """The state of one lowering for one call."""
    if backend == "triton" and architecture == "CPU":
        return Cell(INTERPRETED)
    reason = dispatch.unsupported_reason(backend, call)
    if reason is not None and not isinstance(reason, Missing):
        return Cell(REFUSED, reason.partition(", these tensors are on")[0])
    on_request = dispatch.ON_REQUEST.get((backend, call.op), "")
    if architecture == "SM90" and call.cache_format in MEASURED.get((backend, call.op), ()):
        return Cell(MEASURED_ON, on_request)
    if backend in ADAPTERS:
        return Cell(CONTRACT, on_request)
    return Cell(TESTED if architecture == "SM90" else COMPILES)


def lines() -> Iterator[Line]:
    """Every lowering of every op but the reference, formats with the same cells together."""
    for op, backend in itertools.product(FAMILIES, BACKENDS):
        if backend == "reference" or not dispatch.has_lowering(backend, op):
            continue
        alike: dict[tuple[Cell, ...], list[str]] = {}
        for cache_format in CACHES.get(op, ("",)):
            cells = tuple(
                cell(backend, call_of(op, cache_format, device_of(architecture)), architecture)
                for architecture in COLUMNS
            )
            alike.setdefault(cells, []).append(cache_format)
        for cells, cache_formats in alike.items():
            yield Line(op, tuple(cache_formats), backend, dict(zip(COLUMNS, cells, strict=True)))


def markdown() -> str:
    """The matrix as a page, with one column for neighbours that are alike."""
    every = list(lines())
    alike: list[list[str]] = []
    for name in COLUMNS:
        if alike and all(line.cells[name] == line.cells[alike[-1][0]] for line in every):
            alike[-1].append(name)
        else:
            alike.append([name])
    text = [
        "# What runs where",
        "",
        "`python -m mla_ops doctor --matrix` prints this page; a test holds the two equal. Calls are typical ones:",
        "decode and prefill of DeepSeek-V3.2 and V4, 128 heads, bfloat16 queries.",
        "",
        "| state | what shows it |",
        "|---|---|",
        *(f"| {state} | {evidence} |" for state, evidence in EVIDENCE.items()),
        "",
        "The reference runs every op on the CPU. An AMD GPU gets no CUDA C++ and no adapter, whatever capability it",
        "reports; Triton's kernels compile for gfx942, sparse attention for gfx950, too",
        "(`tests/test_aot_amd.py`), and have not run there.",
        "Dispatch never chooses what is on request: `dispatch.override` or `MLA_OPS_LOWERING` names it.",
        "",
        "FlashInfer's dense decode for SM100 (trtllm-gen) is no lowering. It multiplies what a page holds behind a",
        "length by zero (vLLM's pull request 37442), which makes NaN of what is not finite there. Its sources are not",
        "public.",
        "",
        f"| op | cache formats | lowering | {' | '.join(', '.join(names) for names in alike)} |",
        "|---" * (len(alike) + 3) + "|",
    ]
    notes: list[str] = []
    for line in every:
        words = []
        for found in (line.cells[names[0]] for names in alike):
            word = found.state
            if found.reason:
                if found.reason not in notes:
                    notes.append(found.reason)
                number = notes.index(found.reason) + 1
                word += f" ({number})" if found.state == REFUSED else f", on request ({number})"
            words.append(word)
        text.append(f"| {' | '.join((line.op, ', '.join(line.cache_formats), line.backend, *words))} |")
    text += ["", "Refused, or on request, because:", "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    return "\n".join(text) + "\n"
