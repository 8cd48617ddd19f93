"""Every Triton kernel compiles for every architecture, within its shared memory and without spills worth naming.

No GPU is needed: `aot_jobs.py` compiles the table of kernels in `aot_kernels.py` and prints what each takes.
`make test-triton TRITON=3.9.0` runs this with another Triton.
"""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")
from aot_results import kernels_of_the_sources, run_jobs

from mla_ops.kernels.triton import dense_attention, sparse_attention

# dynamic shared memory of one block, bytes
SHARED_LIMITS = {
    **dict.fromkeys((80,), 163 * 1024),
    **dict.fromkeys((86, 89, 120, 121), 99 * 1024),
    **dict.fromkeys((90, 100, 103), 227 * 1024),
}
TENSOR_MEMORY_COLUMNS = 512
# Bytes of stack a thread. 128 bytes are 32 of 255 registers, written and read back once a tile of keys, from L1: some
# percent of a tile's loads. The tiles that were not chosen took 200 to 1,000.
MAX_STACK = 128
TILES_CHOSEN_WITH = "3.6."  # by the stack that this Triton's kernels take

BOLD_TILE = re.compile(r"^\| (\S+) \| \*\*(\d+) x (\d+)\*\* \| (\d) \| (\d) \|", re.MULTILINE)


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, Any]]:
    return run_jobs()


@pytest.mark.slow
def test_every_kernel_compiles_within_its_limits(compiled: list[dict[str, Any]]) -> None:
    assert {result["capability"] for result in compiled} == set(SHARED_LIMITS)
    problems, spills = [], []
    for result in compiled:
        name = f"{result['name']} for sm_{result['capability']}"
        if "error" in result:
            problems.append(f"{name}: {result['error']}")
            continue
        if result["shared"] > SHARED_LIMITS[result["capability"]]:
            problems.append(f"{name}: {result['shared']} bytes of shared memory")
        # Past this limit Triton 3.6 emits an empty kernel without a word: hence the registers, too.
        if result["tensor_memory"] > TENSOR_MEMORY_COLUMNS or result["registers"] < 16:
            problems.append(
                f"{name}: {result['tensor_memory']} columns of tensor memory, {result['registers']} registers"
            )
        if result["stack"] > MAX_STACK:
            spills.append(f"{name}: {result['stack']} bytes of stack")
    assert not problems, "\n".join(problems)
    if triton.__version__.startswith(TILES_CHOSEN_WITH):
        assert not spills, "\n".join(spills)
    elif spills:
        warnings.warn(
            f"tiles were chosen with Triton {TILES_CHOSEN_WITH}x, with {triton.__version__} some spill:\n"
            + "\n".join(spills),
            stacklevel=1,
        )


@pytest.mark.slow
def test_architectures_of_a_family_get_the_same_llvm_ir(compiled: list[dict[str, Any]]) -> None:
    """Triton would make the same LLVM IR for those that got another architecture's."""
    compared = [result for result in compiled if result["compared_with"]]
    assert {result["capability"] for result in compared} == {86, 89, 103, 120, 121}
    shared = {(r["name"], r["capability"]): r.get("llvm_ir") for r in compiled if not r["compared_with"]}
    assert not [r["name"] for r in compared if r.get("llvm_ir") != shared[r["name"], r["compared_with"]]]


@pytest.mark.slow
def test_the_table_has_every_kernel(compiled: list[dict[str, Any]]) -> None:
    assert {result["kernel"] for result in compiled if "kernel" in result} == kernels_of_the_sources()


@pytest.mark.skipif(
    not triton.__version__.startswith(TILES_CHOSEN_WITH), reason=f"tiles are published for Triton {TILES_CHOSEN_WITH}x"
)
def test_the_published_tiles_are_the_chosen_ones() -> None:
    text = (Path(__file__).parent.parent / "docs" / "results" / "tiles.md").read_text(encoding="utf-8")
    published = set()
    for section in text.split("\n## SM")[1:]:
        number = int(section.split()[0])
        for kernel, rows, keys, warps, stages in BOLD_TILE.findall(section):
            published.add((number, kernel, int(rows), int(keys), int(warps), int(stages)))
    chosen = set()
    for number in (80, 120):
        device = (number // 10, number % 10)
        for kernel, mode in (("fp8_ds_mla", "fp8"), ("fp8_ds_mla_v4", "fp8_v4"), ("bf16", "plain")):
            tiles = {sparse_attention.tile(device, heads, mode) for heads in (16, 32, 128)}
            chosen |= {(number, kernel, tile.block_h, tile.block_n, tile.num_warps, tile.ahead + 1) for tile in tiles}
        for dim, dim_v in ((192, 128), (256, 256)):
            chosen.add((number, f"{dim}/{dim_v}", *dense_attention.prefill_tile(device, dim, dim_v, exact=False)))
    assert published == chosen
