"""Every CUDA C++ kernel compiles for sm_90a without warnings, within its registers and memory, without a stack.

No GPU is needed. To add a kernel: its variants in `KERNELS`. Kernels that `hopper_resources.json` has are not compiled
again.
"""

from __future__ import annotations

import ctypes
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import hopper_resources
import pytest
from hopper_resources import MAX_SHARED_BYTES, Figures

from mla_ops.kernels.cuda.compiler import PARAMS_OFFSET, RESERVED_SHARED_BYTES, CompileError
from mla_ops.kernels.cuda.params import fields_of
from mla_ops.kernels.cuda.sources import Sources
from mla_ops.kernels.hopper import (
    balance,
    cache,
    indexer_logits,
    launch,
    merge_parts,
    prefill_attention,
    sources,
    topk,
)
from mla_ops.kernels.hopper.catalog import every_kernel
from mla_ops.kernels.hopper.params import Params

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sources.reason() is not None, reason=str(sources.reason())),
]
pytest.importorskip("triton", reason="it brings cuobjdump")

REGISTERS_OF_AN_SM = 64 * 1024


@dataclass(frozen=True)
class Variant:
    """One kernel as it is launched.

    Attributes:
        source: file in mla_ops/kernels/hopper.
        kernel: name expression.
        threads: of a block.
        params: what the launch packs, `struct Params` of the source.
        padding: bytes in front of the params, where those lie at a multiple of 64.
        blocks: of an SM, at least.
    """

    source: str
    kernel: str
    threads: int
    params: type[ctypes.Structure]
    defines: tuple[str, ...] = ()
    blocks: int = 1
    padding: int = 0

    def __str__(self) -> str:
        return " ".join((self.kernel, *self.defines))


KERNELS = [
    Variant(kernel.source, kernel.name, kernel.threads, Params, blocks=kernel.ctas)
    for keys in launch.KERNELS.values()
    for kernel in keys.kernels()
] + [
    Variant(kernel.source, kernel.name, kernel.threads, module.Params, blocks=kernel.ctas, padding=-PARAMS_OFFSET % 64)
    for module in (prefill_attention, indexer_logits)
    for kernel in module.kernels()
]
KERNELS += [Variant(k.source, k.name, k.threads, cache.Params, blocks=8) for k in cache.KERNELS.values()]
KERNELS += [Variant(k.source, k.name, k.threads, topk.Params, blocks=k.ctas) for k in topk.KERNELS]
KERNELS += [
    Variant(kernel.source, kernel.name, kernel.threads, merge_parts.Params, blocks=kernel.ctas)
    for kernel in merge_parts.kernels()
]
KERNELS += [Variant(k.source, k.name, k.threads, Params) for k in map(launch.merge_of_units, (False, True))]
# tests/sanitize.py compiles kernels so for racecheck: the first one of each source, which compiles fastest.
FIRST = {kernel.source: kernel for kernel in reversed(KERNELS)}
KERNELS += [replace(kernel, defines=("EVERY_LANE_ARRIVES",)) for kernel in FIRST.values()]


@pytest.fixture(scope="module")
def known() -> dict[str, Figures]:
    return hopper_resources.known_figures()


@pytest.mark.parametrize("variant", FIRST.values(), ids=str)
def test_the_figures_that_are_kept_are_those_of_a_compilation(variant: Variant, known: dict[str, Figures]) -> None:
    """The kernel of each source that compiles fastest. Figures of other sources, or of another NVRTC, are not asked."""
    name = variant.source, variant.kernel, variant.defines
    kept = known.get(hopper_resources.key_of(*name))
    compiled = hopper_resources.compiled_figures(*name)
    assert kept in (None, compiled)
    assert hopper_resources.key_of(variant.source, variant.kernel, (*variant.defines, "OTHER")) not in known


@pytest.mark.parametrize("variant", KERNELS, ids=str)
def test_a_kernel_compiles_within_its_limits(variant: Variant, known: dict[str, Figures]) -> None:
    compiled = hopper_resources.figures_of(known, variant.source, variant.kernel, variant.defines)
    used = compiled.resources
    assert compiled.log == ""
    assert used.stack == 0
    assert used.params == variant.padding + ctypes.sizeof(variant.params)
    assert used.registers * variant.threads * variant.blocks <= REGISTERS_OF_AN_SM
    unshared = ("cache.cu", "merge_parts.cu", "merge_units.cu", "indexer_clean.cu", "prefill_short.cu", "topk.cu")
    assert compiled.shared_bytes > 0 or variant.source in unshared
    block = used.shared + compiled.shared_bytes
    assert block <= MAX_SHARED_BYTES
    assert (block + RESERVED_SHARED_BYTES) * variant.blocks <= MAX_SHARED_BYTES + RESERVED_SHARED_BYTES


def test_the_table_has_every_source() -> None:
    """A kernel that no variant compiles would be shipped unseen; one that is not in the catalog, without its code."""
    assert {variant.source for variant in KERNELS} == {path.name for path in sources.SOURCES.folder.glob("*.cu")}
    assert {(variant.source, variant.kernel) for variant in KERNELS} == {(k.source, k.name) for k in every_kernel()}


def compile_lines(source: str, lines: list[str], folder: Path) -> None:
    """Compiles lines behind a source."""
    for file in sources.SOURCES.folder.glob("*.cu*"):
        shutil.copy(file, folder)
    unit = f'#include "{source}"\n{chr(10).join(lines)}\ntemplate <int N> __global__ void nothing() {{}}\n'
    (folder / "lines.cu").write_text(unit)
    Sources(folder, sources.SM90A).compile("lines.cu", "nothing<0>")


def compile_offsets(source: str, params: type[ctypes.Structure], folder: Path) -> None:
    """Compiles that each field of a source's `struct Params` is where the host puts it."""
    lines = [f'static_assert(sizeof(Params) == {ctypes.sizeof(params)}, "size");']
    for name, offset, size, _ in fields_of(params):
        lines.append(f'static_assert(__INTADDR__(&((Params*)0)->{name}) == {offset}, "{name}");')
        lines.append(f'static_assert(sizeof(((Params*)0)->{name}) == {size}, "{name}");')
    compile_lines(source, lines, folder)


# numbers that host and kernels both have: source, its expression, the host's number
SHARED_NUMBERS = [
    ("cache.cu", "WARPS", cache.WARPS),
    ("indexer_logits.cu", "TILE", indexer_logits.TILE),
    ("merge_parts.cu", "THREADS", merge_parts.THREADS),
    ("sparse_attention.cu", "TILE_KEYS", launch.TILE_KEYS),
    ("sparse_attention.cu", "ROW_TURNS", balance.ROW_TURNS),
    ("topk.cu", "BINS", topk.BINS),
    ("topk.cu", "sizeof(Control)", topk.CONTROL_BYTES),
]


@pytest.mark.parametrize(("source", "expression", "number"), SHARED_NUMBERS)
def test_host_and_kernel_have_the_same_number(source: str, expression: str, number: int, tmp_path: Path) -> None:
    compile_lines(source, [f'static_assert({expression} == {number}, "");'], tmp_path)


def test_a_number_that_differs_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match="static assertion failed"):
        compile_lines("cache.cu", [f'static_assert(WARPS == {cache.WARPS + 1}, "");'], tmp_path)


PARAMS = {variant.source: variant.params for variant in KERNELS}


@pytest.mark.parametrize("source", PARAMS)
def test_the_host_packs_each_field_where_the_kernel_reads_it(source: str, tmp_path: Path) -> None:
    compile_offsets(source, PARAMS[source], tmp_path)


def test_two_fields_of_one_width_that_are_swapped_are_noticed(tmp_path: Path) -> None:
    class Swapped(ctypes.Structure):
        _fields_ = [merge_parts.Params._fields_[i] for i in (*range(8), 9, 8, 10)]  # parts before num_rows

    with pytest.raises(CompileError, match=r"static assertion failed.*num_rows"):
        compile_offsets("merge_parts.cu", Swapped, tmp_path)
