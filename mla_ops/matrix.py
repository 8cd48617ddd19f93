"""A table of every lowering on every architecture, its state, and what shows it: `python -m mla_ops doctor --matrix`.

Architectures that are not here are stand-in devices with their compute capability. A lowering's own reasons say what it
refuses; a reason of the kind `Missing` is one that an installation can change, so the lowering counts as there.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

from . import dispatch
from .dispatch import ADAPTERS, BACKENDS, FAMILIES, Call, Missing
from .formats import FORMATS, LATENT_FORMATS, PLAIN

CAPABILITIES: dict[str, tuple[int, int]] = {
    f"SM{major}{minor}": (major, minor)
    for major, minor in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1))
}
COLUMNS = ("CPU", *CAPABILITIES)
INDEX_FORMATS = ("fp8_index", *PLAIN)

# Formats of the caches that an op reads or writes, where it takes any.
CACHES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("concat_and_cache", "gather_cache", "paged_sparse_attention", "paged_attention"), LATENT_FORMATS),
    "paged_sparse_attention.extra": ("fp8_ds_mla_v4", "fp8_ds_mla", "bf16"),
    "compress_and_cache": ("fp8_ds_mla_v4", *INDEX_FORMATS),
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

MEASURED_ON, TESTED, INTERPRETED, COMPILES = "measured", "tested", "interpreter", "compiles"
CONTRACT, REFUSED = "adapter", "refused"

# States: their meaning and their evidence; a lowering of an op has a test of its own besides.
EVIDENCE = {
    MEASURED_ON: "it runs on an H200, and [Benchmarks](benchmarks.md) has its times: "
    "`tests/test_matrix.py::test_what_counts_as_measured_has_a_checked_row_in_the_results`",
    TESTED: "its test passes on an H200, by `pytest -m gpu`",
    INTERPRETED: "its test passes in Triton's interpreter",
    COMPILES: "it compiles and has not run there: "
    "`tests/test_aot_compile.py::test_every_kernel_compiles_within_its_limits`",
    CONTRACT: "it calls a library that has not run there; its test has a stand-in for the package",
    REFUSED: "the lowering does not take the call: "
    "`tests/test_matrix.py::test_what_is_refused_is_refused_for_the_reason_of_its_cell`",
}

# The test of each op's results by each lowering, or of one format's: against float64, Python or the reference.
TESTS: dict[str, dict[str, str]] = {
    "triton": {
        "concat_and_cache": "test_cache.py::test_store_from_slices_to_slices",
        "gather_cache": "test_cache.py::test_gather_equals_python",
        "convert_req_index_to_global_index": "test_index.py::test_convert_equals_python",
        "filter_prefill_indices": "test_index.py::test_filter_equals_python",
        "sliding_window_indices": "test_index_builders.py::test_window_equals_python",
        "compressed_indices": "test_index_builders.py::test_compressed_equals_python",
        "compute_global_topk_indices_and_lens": "test_index_builders.py::test_global_topk_equals_python",
        "combine_topk_swa_indices": "test_index_builders.py::test_combine_equals_python",
        "paged_sparse_attention": "test_sparse_attention.py::test_attention_equals_float64",
        "paged_sparse_attention.extra": "test_sparse_attention_extra.py::test_two_caches_equal_float64",
        "sparse_attention": "test_sparse_attention.py::test_flat_attention_equals_float64",
        "paged_attention": "test_dense_attention_paged.py::test_attention_equals_float64",
        "prefill_attention": "test_dense_attention.py::test_attention_equals_float64",
        "merge_attention_states": "test_merge.py::test_merge_equals_float64",
        "merge_attention_states.stacked": "test_dense_attention_paged.py::test_a_context_in_parts_merges_to_the_whole",
        "build_step_metadata": "test_step_metadata.py::test_step_equals_python",
        "compress_and_cache": "test_compressor.py::test_formats_round_the_float32_entry_once",
        "build_compressed_metadata": "test_step_metadata_v4.py::test_compressed_metadata_equals_python",
        "write_index_cache": "test_indexer.py::test_written_bytes_are_those_of_the_format",
        "gather_index_cache": "test_indexer.py::test_gathered_keys_and_scales_are_the_written_ones",
        "quantize_index_query": "test_indexer.py::test_queries_and_weights_keep_their_products",
        "indexer_logits": "test_indexer.py::test_flat_scores_are_those_of_float64",
        "paged_indexer_logits": "test_indexer.py::test_paged_scores_are_those_of_float64",
        "topk_indices": "test_indexer.py::test_topk_of_an_adversarial_row",
        "select_keys": "test_indexer.py::test_selection_is_scores_then_topk_to_the_bit",
        "select_keys.flat": "test_indexer.py::test_selection_is_scores_then_topk_to_the_bit",
        "merge_topk": "test_indexer.py::test_merged_shards_are_the_selection_over_the_whole",
    },
    "hopper": {
        "concat_and_cache": "test_hopper_cache.py::test_every_byte_on_a_gpu",
        "paged_sparse_attention": "test_sparse_attention.py::test_attention_equals_float64",
        "paged_sparse_attention.extra": "test_sparse_attention_extra.py::test_two_caches_equal_float64",
        "sparse_attention": "test_sparse_attention.py::test_flat_attention_equals_float64",
        "paged_attention": "test_dense_attention_paged_gpu.py::test_attention_at_real_sizes",
        "prefill_attention": "test_dense_attention.py::test_attention_equals_float64",
        "write_index_cache": "test_indexer.py::test_written_bytes_are_those_of_the_format",
        "indexer_logits": "test_hopper_indexer_gpu.py::test_flat_scores_are_those_of_float64",
        "paged_indexer_logits": "test_hopper_indexer_gpu.py::test_paged_scores_are_those_of_float64",
        "topk_indices": "test_hopper_topk_gpu.py::test_the_best_of_hard_rows",
        "select_keys": "test_hopper_select_gpu.py::test_paged_selection_is_scores_then_topk",
        "select_keys.flat": "test_hopper_select_gpu.py::test_flat_selection_is_scores_then_topk",
    },
    "flash_mla": {
        "paged_sparse_attention": "test_sparse_attention_adapters.py::test_paged_sparse_attention_holds_the_contract",
        "sparse_attention": "test_sparse_attention_adapters.py::test_flat_sparse_attention_holds_the_contract",
        "paged_attention": "test_dense_attention_adapters.py"
        "::test_flash_mla_gets_blocks_that_exist_and_gives_the_contract",
    },
    "flashinfer": {
        "paged_sparse_attention": "test_flashinfer_sparse.py::test_sm120_holds_the_contract_but_for_what_it_rounds",
        "paged_sparse_attention, bf16": "test_flashinfer_sparse.py::test_sm100_holds_the_contract",
        "paged_sparse_attention.extra": "test_flashinfer_sparse.py::test_two_caches_share_a_softmax",
        "paged_attention": "test_flashinfer_dense.py::test_paged_attention_holds_the_contract",
        "prefill_attention": "test_flashinfer_dense.py::test_prefill_holds_the_contract",
    },
    "flash_attn": {
        "prefill_attention": "test_dense_attention_adapters.py"
        "::test_flash_attention_gets_what_it_takes_and_gives_the_contract",
    },
    "torch_sdpa": {"prefill_attention": "test_dense_attention_gpu.py::test_attention_at_real_sizes"},
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
    test: str
    cells: dict[str, Cell]


def device_of(architecture: str) -> torch.device:
    """The CPU, or a stand-in."""
    return torch.device("cpu") if architecture == "CPU" else dispatch.stand_in(CAPABILITIES[architecture])


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
        return Cell(REFUSED, re.split(r", (?:this cache is|these (?:tensors )?are) ", reason)[0])
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
            tests = TESTS[backend]
            test = tests.get(f"{op}, {cache_formats[0]}", tests[op])
            yield Line(op, tuple(cache_formats), backend, test, dict(zip(COLUMNS, cells, strict=True)))


def _table(every: list[Line], notes: list[str]) -> list[str]:
    """Lines as a table, with one column for architectures that are alike. Reasons are added to `notes`.

    Ops of the same formats, lowering and cells share a row.
    """
    alike: dict[tuple[Cell, ...], list[str]] = {}
    for name in COLUMNS:
        alike.setdefault(tuple(line.cells[name] for line in every), []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}
    for line in every:
        words = []
        for found in (line.cells[names[0]] for names in alike.values()):
            word = found.state
            if found.reason:
                if found.reason not in notes:
                    notes.append(found.reason)
                number = notes.index(found.reason) + 1
                word = f"({number})" if found.state == REFUSED else f"{word} ({number})"
            words.append(word)
        rows.setdefault((", ".join(line.cache_formats), line.backend, *words), []).append(line.op)
    return [
        f"| op | cache formats | lowering | {' | '.join(', '.join(names) for names in alike.values())} |",
        "|---" * (len(alike) + 3) + "|",
        *(f"| {' | '.join((', '.join(dict.fromkeys(ops)), *row))} |" for row, ops in rows.items()),
    ]


def _refusals(refused: list[Line], every: list[Line]) -> list[str]:
    """Formats that a lowering takes nowhere, and why: by its cells where it takes other formats of the op."""
    ops: dict[tuple[str, str, str], list[str]] = {}
    for line in refused:
        others = [other for other in every if (other.op, other.backend) == (line.op, line.backend)]
        names = [name for name in COLUMNS if any(other.cells[name].state != REFUSED for other in others)]
        reasons = dict.fromkeys(line.cells[name].reason for name in names)
        ops.setdefault((line.backend, ", ".join(line.cache_formats), "; ".join(reasons)), []).append(line.op)
    return [f"- {backend}, {', '.join(of)} over {formats}: {why}" for (backend, formats, why), of in ops.items()]


def markdown() -> str:
    """The matrix as a page."""
    every = [line for line in lines() if any(found.state != REFUSED for found in line.cells.values())]
    refused = [line for line in lines() if all(found.state == REFUSED for found in line.cells.values())]
    notes: list[str] = []
    text = [
        "# What runs where",
        "",
        "Which lowering of an op runs on which GPU, over which cache format. On the CPU the PyTorch reference runs",
        "every op, on Hopper CUDA C++ and Triton do, on other GPUs Triton does.",
        "`python -m mla_ops doctor` says it for your machine.",
        "",
        "| state | meaning, and what shows it |",
        "|---|---|",
        *(f"| {state} | {evidence} |" for state, evidence in EVIDENCE.items()),
        "",
        "A number alone is a refusal, a number behind a state a lowering that runs only where",
        "[asked for](ops/dispatch.md); the reasons are below. Calls are typical ones: decode and prefill of",
        "DeepSeek-V3.2 and V4, 128 heads, bfloat16 queries. `.extra` is the op with two caches, `.flat` over flat",
        "keys, `.stacked` of any number of parts. `TESTS` in `mla_ops/matrix.py` names the test of each lowering;",
        "`python -m mla_ops doctor --matrix` prints this page.",
        "",
        *_table([line for line in every if line.backend not in ADAPTERS], notes),
        "",
        "AMD GPUs are not supported. Triton's kernels compile for gfx942, those of sparse attention for gfx950, too",
        "(`tests/test_aot_amd.py`), and have not run there.",
        "",
        "## Adapters to installed libraries",
        "",
        *_table([line for line in every if line.backend in ADAPTERS], notes),
        "",
        "FlashInfer's dense decode for SM100 (trtllm-gen) is no lowering: it makes NaN of what is not finite behind a",
        "request's length (vLLM's pull request 37442).",
        "",
        "## Reasons",
        "",
        *(f"{number}. {note}" for number, note in enumerate(notes, 1)),
        "",
        "A lowering has no row for a format that it refuses on every GPU:",
        "",
        *_refusals(refused, every),
    ]
    return "\n".join(text) + "\n"
