"""Bytes of a row are counted in formats.py alone: the lowerings take them from there."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

import pytest

from mla_ops import formats
from mla_ops.formats import FORMATS
from mla_ops.kernels.cuda import rows
from mla_ops.kernels.hopper.sources import SOURCES

KERNELS = Path(formats.__file__).parent / "kernels"
# Widths of keys, 512 and 576, are also other things: 576 is not looked for where a key's width is meant.
COUNTS = {"448", "528", "584", "656"}
INDEX_COUNTS = {"132"}  # also operands and threads in kernels that read no index keys
ALLOWED = {
    "triton/e4m3.py": {"448"},  # the largest e4m3 number
    "cuda/compiler.py": {"528"},  # a kernel's parameters begin there
    "hopper/rows.cuh": COUNTS,  # written from formats.py
}


def numbers(path: Path) -> set[str]:
    """Numbers in code, not in comments and texts."""
    if path.suffix == ".py":
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        return {token.string for token in tokens if token.type == tokenize.NUMBER}
    return set(re.findall(r"\b\d+\b", re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)))


def sources() -> list[Path]:
    return sorted(path for suffix in ("py", "cu", "cuh") for path in KERNELS.rglob(f"*.{suffix}"))


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(KERNELS)))
def test_no_kernel_counts_bytes_of_a_row_itself(path: Path) -> None:
    counts = COUNTS | INDEX_COUNTS if path.name.startswith("indexer") else COUNTS
    assert not (numbers(path) & counts) - ALLOWED.get(str(path.relative_to(KERNELS)), set())


def test_the_header_is_of_the_table() -> None:
    message = "run python -m mla_ops.kernels.cuda.rows mla_ops/kernels/hopper"
    assert (SOURCES.folder / rows.HEADER).read_text() == rows.header(), message


@pytest.mark.parametrize(
    ("cache_format", "row_bytes", "scale_bytes", "rope_at"),
    [("fp8_ds_mla", 656, 16, 528), ("fp8_ds_mla_v4", 576, 8, 448), ("fp8_index", 128, 4, 128)],
)
def test_bytes_of_a_row(cache_format: str, row_bytes: int, scale_bytes: int, rope_at: int) -> None:
    """The bytes are those of docs/formats.md and of the formats' authors."""
    entry = FORMATS[cache_format]
    assert (entry.row_bytes, entry.scale_bytes, entry.rope_at) == (row_bytes, scale_bytes, rope_at)
    assert FORMATS["bf16"].row_bytes == 1152
    assert FORMATS["bf16"].scale_bytes == 0
