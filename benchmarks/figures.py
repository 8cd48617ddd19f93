"""Tables of measured times against peers, beside the targets, from the rows that benchmarks wrote with `--json`.

python -m benchmarks.figures docs/results/*-h200.json docs/results/flash_mla-h200.md
python -m benchmarks.figures docs/results/indexer_*-h200.json docs/results/indexer-h200.md

The last path is the page, those before it are files of rows. In the page, what stands between `<!-- figures: NAME -->`
and `<!-- end -->` is replaced by that table. FlashMLA's are the times with its schedule planned before. A table of
several peers has the fastest of each row. Every number stands beside the largest error of our result and the bound that
rounding explains; a row whose check failed is refused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
PEER = "FlashMLA"


class Table(NamedTuple):
    """Rows of one op: what each shape has in common, and its own part with the ratio that was asked for.

    Attributes:
        peers: lowerings, of which the fastest counts.
        ours: lowering.
    """

    op: str
    common: dict[str, Any]
    first_column: str
    targets: dict[tuple[Any, ...], float | None]
    varies: tuple[str, ...]
    peers: tuple[str, ...] = (PEER,)
    ours: str = "hopper"

    @property
    def title(self) -> str:
        """The column of the peers' times."""
        return self.peers[0] if len(self.peers) == 1 else "fastest peer"


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
TOPK_PEERS = ("vLLM cooperative", "vLLM persistent", "SGLang v2")
PAIRS = tuple(f"DeepGEMM, {name}" for name in TOPK_PEERS)
DECODE_CONTEXTS = (4096, 32768, 131072)
TOPK_ROWS = [*itertools.product((1, 4, 16, 64, 128), DECODE_CONTEXTS), (1, 1048576), (4096, 32768), (4096, 131072)]
TOPK_ROWS_ALIKE = [*itertools.product((1, 16, 64, 128, 512), (131072,)), (512, 32768), (4096, 32768)]
SELECTION: dict[tuple[Any, ...], float | None] = {
    **{(1, 1, context): 0.75 for context in DECODE_CONTEXTS},
    **{(4, 1, context): 0.75 for context in DECODE_CONTEXTS},
    **{(16, 1, context): None for context in DECODE_CONTEXTS},
    (64, 1, 4096): None,
    (64, 1, 32768): 0.9,
    (64, 1, 131072): None,
    (64, 2, 32768): None,
    (128, 1, 32768): None,
}
PREFILL: dict[tuple[Any, ...], float | None] = {
    (tokens, heads): {64: 0.9, 32: 0.8}[heads] for heads in (64, 32) for tokens in (1024, 4096)
}


def _paged(heads: int, requests: tuple[int, ...], target: float, peer: str) -> Table:
    return Table(
        "paged_indexer_logits",
        {"H": heads},
        "B, next_n, keys",
        dict.fromkeys(itertools.product(requests, (1, 2), DECODE_CONTEXTS), target),
        ("B", "next_n", "keys"),
        (peer,),
    )


def _topk(scores: str, targets: dict[tuple[Any, ...], float | None], peers: tuple[str, ...]) -> Table:
    return Table("topk_indices", {"scores": scores}, "T, columns", targets, ("T", "columns"), peers)


INDEXER_TABLES = {
    "indexer prefill": Table(
        "indexer_logits",
        {},
        "H, T, keys",
        {
            (heads, *shape): target
            for heads, target in ((64, 0.95), (32, 0.85))
            for shape in ((1024, 32768), (4096, 32768), (4096, 131072))
        },
        ("H", "T", "keys"),
        ("DeepGEMM",),
    ),
    **{f"indexer decode {heads}": _paged(heads, (16, 64, 128), 1.0, "DeepGEMM") for heads in (64, 32)},
    **{f"indexer latency {heads}": _paged(heads, (1, 4), 0.85, "DeepGEMM and its schedule") for heads in (64, 32)},
    "topk": _topk("normal", dict.fromkeys(TOPK_ROWS, 1.0), TOPK_PEERS),
    "topk alike": _topk("neighbours alike", dict.fromkeys(TOPK_ROWS_ALIKE, 1.0), TOPK_PEERS),
    "topk torch": _topk("normal", dict.fromkeys(TOPK_ROWS, 0.15), ("torch.topk",)),
    **{
        f"selection {heads}": Table(
            "select_keys", {"H": heads}, "B, next_n, keys", SELECTION, ("B", "next_n", "keys"), PAIRS
        )
        for heads in (64, 32)
    },
    "selection prefill": Table("select_keys.flat", {"keys": 32768}, "T, H", PREFILL, ("T", "H"), PAIRS),
    "selection prefill, own steps": Table(
        "select_keys.flat", {"keys": 32768}, "T, H", dict.fromkeys(PREFILL, 1.0), ("T", "H"), ("two steps",)
    ),
}
TABLES = {
    **INDEXER_TABLES,
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


class Compared(NamedTuple):
    """A row of ours and the fastest peer's of its shape."""

    key: tuple[Any, ...]
    target: float | None
    ours: Row
    peer: Row

    @property
    def ratio(self) -> float:
        return float(self.ours["median_us"] / self.peer["median_us"])

    @property
    def reached(self) -> bool:
        return self.target is not None and self.ratio <= self.target


def compared(table: Table, rows: list[Row]) -> list[Compared]:
    """All rows of a table.

    Raises:
        KeyError: a shape was not measured, or did not pass its check.
    """
    found: dict[tuple[tuple[Any, ...], str], Row] = {}
    for row in rows:
        shape = row["shape"]
        if row["op"] == table.op and all(shape.get(name) == value for name, value in table.common.items()):
            found[tuple(shape[name] for name in table.varies), row["lowering"]] = row
    pairs = []
    for key, target in table.targets.items():
        ours, peers = found[key, table.ours], [found[key, name] for name in table.peers if (key, name) in found]
        if not peers:
            raise KeyError(f"{table.op} {key} has no peer's time")
        peer = min(peers, key=lambda row: row["median_us"])
        if not (ours["passed"] and peer["passed"]):
            raise KeyError(f"{table.op} {key} did not pass its check")
        pairs.append(Compared(key, target, ours, peer))
    return pairs


def table_lines(table: Table, rows: list[Row]) -> list[str]:
    """Markdown of one table; errors as of `compared`."""
    lines = [
        f"| {table.first_column} | {table.title} µs | ours µs | ratio | target | error (bound) |",
        "|---" * 6 + "|",
    ]
    for pair in compared(table, rows):
        check = pair.ours["checks"][0]
        cells = (
            ", ".join(str(part).replace("+", " + ") for part in pair.key),
            f"{pair.peer['median_us']:.4g}",
            f"{pair.ours['median_us']:.4g}",
            f"**{pair.ratio:.3f}**" if pair.reached else f"{pair.ratio:.3f}",
            "" if pair.target is None else f"{pair.target:.2f}",
            f"{check['error']:.1e} ({check['bound']:.1e})",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def target_lines(tables: dict[str, Table], rows: list[Row]) -> list[str]:
    """Markdown of how many rows reach their target, a line for each table and target; errors as of `compared`."""
    lines = ["| table | of | target | ratio | rows that reach it |", "|---" * 5 + "|"]
    for name, table in tables.items():
        pairs = compared(table, rows)
        for target in sorted({pair.target for pair in pairs if pair.target is not None}):
            of_target = [pair for pair in pairs if pair.target == target]
            ratios, reached = [pair.ratio for pair in of_target], sum(pair.reached for pair in of_target)
            cells = f"{min(ratios):.3f} to {max(ratios):.3f}", f"{reached} of {len(of_target)}"
            lines.append(f"| {name} | {table.title} | {target:.2f} | {' | '.join(cells)} |")
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
    makers = {name: partial(table_lines, table) for name, table in TABLES.items()}
    makers["indexer targets"] = partial(target_lines, INDEXER_TABLES)
    for name, make in makers.items():
        pattern = re.compile(rf"(<!-- figures: {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
        if pattern.search(text):
            lines = "\n".join(make(rows))
            text = pattern.sub(rf"\g<1>{lines}\n\g<2>", text)
    page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
