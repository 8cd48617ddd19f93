"""The rows of quantised formats as a CUDA C++ header: `formats.py` is the only place that counts their bytes.

`python -m mla_ops.kernels.cuda.rows FOLDER...` writes `rows.cuh` into folders of sources.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ...formats import FORMATS, CacheFormat

HEADER = "rows.cuh"
TOP = """// Rows of the quantised cache formats, in bytes: `python -m mla_ops.kernels.cuda.rows` writes them.
// BYTES: from one token's data to the next one's; LATENT: e4m3 from the first byte on; GROUP: of them share a scale;
// SCALE_BYTES: a token's scales, in the row or, if SCALES_APART, behind all rows of the block; ROPE_AT: 64 bfloat16.
#pragma once
"""


def struct_name(cache_format: str) -> str:
    """The struct's name, for instance `RowOfFp8DsMla`."""
    return "RowOf" + cache_format.title().replace("_", "")


def _struct(entry: CacheFormat) -> str:
    constants = f"BYTES = {entry.row_bytes}, LATENT = {entry.latent_dim}, GROUP = {entry.group_size}"
    rope = "" if entry.index_only else f", ROPE_AT = {entry.rope_at}"
    return f"""
struct {struct_name(entry.name)} {{
  static constexpr int {constants}, SCALE_BYTES = {entry.scale_bytes}{rope};
  static constexpr bool SCALES_APART = {str(entry.planar).lower()};
}};
"""


def header() -> str:
    """Text of the header."""
    return TOP + "".join(_struct(entry) for entry in FORMATS.values() if entry.quantized)


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        (Path(folder) / HEADER).write_text(header())
