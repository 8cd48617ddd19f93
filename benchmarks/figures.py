"""Tables of measured times against FlashMLA, beside the targets, from the rows that benchmarks wrote with `--json`.

python -m benchmarks.figures docs/results/*-h200.json docs/results/flash_mla-h200.md

The last path is the page, those before it are files of rows. In the page, what stands between `<!-- figures: NAME -->`
and `<!-- end -->` is replaced by that table. FlashMLA's are the times with its schedule planned before. Every number
stands beside the largest error of our result and the bound that rounding explains; a row whose check failed is refused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
PEER = "FlashMLA"


class Table(NamedTuple):
    """Rows of one op: what each shape has in common, and its own part with the ratio that was asked for."""

    op: str
    common: dict[str, Any]
    first_column: str
    targets: dict[tuple[Any, ...], float | None]
    varies: tuple[str, ...]


DECODE: dict[tuple[Any, ...], float | None] = {
    (1, 16): 0.50,
    (1, 128): 0.55,
    (8, 16): 0.55,
    (8, 128): 0.70,
    (32, 16): 0.55,
    (32, 128): 0.75,
    (128, 16): 0.60,
    (128, 32): 0.65,
    (128, 64): 0.70,
    (128, 128): 0.70,
    (256, 128): 0.72,
    (512, 8): 0.52,
}
TABLES = {
    "fp8_ds_mla": Table("paged_sparse_attention", {"format": "fp8_ds_mla"}, "T, H", DECODE, ("T", "H")),
    "between rounds": Table(
        "paged_sparse_attention",
        {},
        "T, H, format",
        {
            (num_tokens, num_heads, cache_format): None
            for cache_format in ("fp8_ds_mla", "bf16")
            for num_tokens, num_heads in [(140, 16), (140, 64), (192, 64), (40, 128), (72, 128), (140, 128)]
        },
        ("T", "H", "format"),
    ),
    "fp8_ds_mla_v4": Table(
        "paged_sparse_attention.extra",
        {"format": "fp8_ds_mla_v4"},
        "T, H, keys",
        {
            (2, 64, "128+512"): 0.65,
            (16, 64, "128+512"): 0.70,
            (256, 64, "128+512"): 0.75,
            (2, 128, "128+1024"): 0.65,
            (16, 128, "128+1024"): 0.70,
            (256, 128, "128+1024"): 0.80,
            (256, 16, "128+512"): 0.60,
        },
        ("T", "H", "topk"),
    ),
    "flat bf16": Table(
        "sparse_attention",
        {},
        "T, H, top-k, d",
        {
            (4096, 128, 2048, 576): 1.0,
            (4096, 64, 2048, 576): 1.0,
            (4096, 16, 2048, 576): 0.40,
            (64, 128, 2048, 576): 0.60,
            (64, 64, 2048, 576): 0.60,
            (4096, 64, 512, 512): 0.90,
            (4096, 128, 1024, 512): 0.90,
        },
        ("T", "H", "topk", "d"),
    ),
    "paged bf16": Table(
        "paged_sparse_attention",
        {"format": "bf16"},
        "T, H",
        dict.fromkeys([(1, 16), (8, 16), (128, 16), (128, 64), (8, 128), (128, 128), (256, 128)]),
        ("T", "H"),
    ),
    "dense bf16": Table(
        "paged_attention",
        {"format": "bf16", "context": 8192},
        "T, H",
        {(1, 16): None, (128, 16): 1.0, (4, 128): 0.60, (32, 128): None, (128, 128): 1.0},
        ("T", "H"),
    ),
}


def table_lines(table: Table, rows: list[Row]) -> list[str]:
    """Markdown of one table.

    Raises:
        KeyError: a shape was not measured, or did not pass its check.
    """
    found: dict[tuple[tuple[Any, ...], str], Row] = {}
    for row in rows:
        shape = row["shape"]
        if row["op"] == table.op and all(shape.get(name) == value for name, value in table.common.items()):
            found[tuple(shape[name] for name in table.varies), row["lowering"]] = row
    lines = [f"| {table.first_column} | FlashMLA µs | ours µs | ratio | target | error (bound) |", "|---" * 6 + "|"]
    for key, target in table.targets.items():
        ours, peer = found[key, "hopper"], found[key, PEER]
        if not (ours["passed"] and peer["passed"]):
            raise KeyError(f"{table.op} {key} did not pass its check")
        ratio = ours["median_us"] / peer["median_us"]
        met = target is not None and ratio <= target
        check = ours["checks"][0]
        cells = (
            ", ".join(str(part).replace("+", " + ") for part in key),
            f"{peer['median_us']:.4g}",
            f"{ours['median_us']:.4g}",
            f"**{ratio:.3f}**" if met else f"{ratio:.3f}",
            "" if target is None else f"{target:.2f}",
            f"{check['error']:.1e} ({check['bound']:.1e})",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Replaces the tables of a page; a table without a marker in it is not looked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files of rows, then the page")
    *sources, page = parser.parse_args(argv).paths
    rows: list[Row] = []
    for source in sources:
        for family in json.loads(source.read_text()).values():
            rows += family["rows"]
    text = page.read_text()
    for name, table in TABLES.items():
        pattern = re.compile(rf"(<!-- figures: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if pattern.search(text):
            lines = "\n".join(table_lines(table, rows))
            text = pattern.sub(rf"\g<1>{lines}\n\g<2>", text)
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
