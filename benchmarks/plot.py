"""Time over the floor, by shape, from the rows that the attention benchmarks wrote with `--json`.

python -m benchmarks.plot docs/results/sparse_attention-{decode,prefill,bf16}-h200.json sparse_attention.svg

The last path is the picture, those before it are files of rows. One line of panels for each op and cache format, one
panel for each head count. The line across a panel is the floor; a dot is the gather of the selected rows alone. Only
rows that passed their check are drawn. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

COLORS = {
    "hopper": "#1b7f5c",
    "triton": "#7a7a7a",
    "flash_mla": "#8e6bb0",
    "FlashMLA": "#c2571a",
    "FlashMLA, with plan": "#e7b08c",
}
LABELS = {
    "hopper": "mla_ops, Hopper",
    "triton": "mla_ops, portable Triton",
    "flash_mla": "mla_ops, adapter to FlashMLA",
}
GATHER = "gather alone"
TITLES = {
    "paged_sparse_attention": "decode over {format}",
    "sparse_attention": "prefill over flat bf16",
    "paged_sparse_attention.extra": "decode over two caches, {format}",
}
FAMILIES = ("sparse_attention", "sparse_attention_extra")
Row = dict[str, Any]


def panel_lines(tables: list[dict[str, Any]]) -> dict[str, list[Row]]:
    """Rows that can be drawn, by the title of their line of panels."""
    lines: dict[str, list[Row]] = {}
    for row in (row for table in tables for row in table["rows"]):
        if row["passed"] and row["reason"] is None and row["op"] in TITLES:
            lines.setdefault(TITLES[row["op"]].format(**row["shape"]), []).append(row)
    return lines


def place(row: Row) -> tuple[int, str]:
    """A row's place in its panel: its tokens, and what else tells it from its neighbours."""
    shape = row["shape"]
    return shape["T"], f"{shape['topk']} keys" + (f", d {shape['d']}" if "d" in shape else "")


def draw_panel(panel: Any, rows: list[Row], names: list[str]) -> None:
    """Bars of each lowering and peer, grouped by shape."""
    places = sorted({place(row) for row in rows})
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        found = {place(row): row for row in rows if row["lowering"] == name}
        at = [i + (number - (len(names) - 1) / 2) * width for i, spot in enumerate(places) if spot in found]
        over = [found[spot]["median_us"] / found[spot]["floor_us"] for spot in places if spot in found]
        bars = panel.bar(at, over, width * 0.94, color=COLORS[name], label=LABELS.get(name, name))
        times = [f"{found[spot]['median_us']:.0f}" for spot in places if spot in found]
        panel.bar_label(bars, times, fontsize=6, padding=1)
    floors = {place(row): row["floor_us"] for row in rows if row["lowering"] != GATHER}
    alone = {place(row): row["median_us"] for row in rows if row["lowering"] == GATHER}
    dots = [i for i, spot in enumerate(places) if spot in alone and spot in floors]
    panel.plot(dots, [alone[places[i]] / floors[places[i]] for i in dots], "k.", markersize=4, label=GATHER)
    varied = len({text for _, text in places}) > 1
    panel.set_yscale("log")
    panel.margins(y=0.15)
    panel.axhline(1, color="black", linewidth=0.8)
    ticks = [f"{tokens}\n{text}".replace(", ", "\n") if varied else str(tokens) for tokens, text in places]
    panel.set_xticks(range(len(places)), ticks, fontsize=7)
    panel.spines[["top", "right"]].set_visible(False)


def draw(contents: list[dict[str, Any]], target: Path) -> None:
    """The whole picture, from the files' contents."""
    import matplotlib.pyplot as plt

    tables = [content[family] for family in FAMILIES for content in contents if family in content]
    lines = panel_lines(tables)
    if not lines:
        raise ValueError("nothing can be drawn: no row of attention passed its check")
    by_line = [
        (title, rows, sorted({row["shape"]["H"] for row in rows}), [name for name in COLORS if _has(rows, name)])
        for title, rows in lines.items()
    ]
    columns = max(len(heads) for _, _, heads, _ in by_line)
    size = (3.4 * columns, 2.7 * len(by_line))
    figure, panels = plt.subplots(len(by_line), columns, figsize=size, squeeze=False)
    for line, (title, rows, heads, names) in zip(panels, by_line, strict=True):
        for panel, count in zip(line, heads, strict=False):
            draw_panel(panel, [row for row in rows if row["shape"]["H"] == count], names)
            panel.set_title(f"{title}, {count} heads", fontsize=8)
            panel.set_xlabel("query tokens", fontsize=8)
        for panel in line[len(heads) :]:
            panel.set_visible(False)
        line[0].set_ylabel("time over floor (labels: µs)", fontsize=8)
    machine = tables[0]["machine"]
    figure.suptitle(f"Sparse attention, {machine['device'].split(',')[0]}, torch {machine['torch']}", fontsize=11)
    figure.tight_layout()
    for line, (_, _, heads, _) in zip(panels, by_line, strict=True):
        line[len(heads) - 1].legend(frameon=False, fontsize=6, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(target, bbox_inches="tight")


def _has(rows: list[Row], name: str) -> bool:
    return any(row["lowering"] == name for row in rows)


def main(argv: list[str] | None = None) -> int:
    """Draws one file; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, nargs="+", help="JSON that the benchmarks wrote")
    parser.add_argument("target", type=Path, help="picture to write: .svg or .png")
    arguments = parser.parse_args(argv)
    draw([json.loads(path.read_text()) for path in arguments.rows], arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
