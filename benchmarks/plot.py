"""Time over the floor, by shape, from the rows that `sparse_attention --json` wrote.

python -m benchmarks.plot docs/results/benchmarks-h200.json docs/results/sparse_attention-h200.svg

Only rows that passed their check are drawn. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

COLORS = {"hopper": "#1b7f5c", "triton": "#7a7a7a", "FlashMLA": "#c2571a", "FlashMLA, with plan": "#e7b08c"}
LABELS = {"hopper": "mla_ops, Hopper (Gluon)", "triton": "mla_ops, portable Triton"}


def draw(content: dict[str, Any], target: Path) -> None:
    """Bars for each lowering and peer, grouped by shape, one panel a head count."""
    import matplotlib.pyplot as plt

    rows = [row for row in content["rows"] if row["passed"] and row["reason"] is None and "T" in row["shape"]]
    rows = [row for row in rows if row["op"] == "paged_sparse_attention" and row["lowering"] in COLORS]
    heads = sorted({row["shape"]["H"] for row in rows})
    figure, panels = plt.subplots(1, len(heads), figsize=(5.2 * len(heads), 3.6), sharey=True, squeeze=False)
    for panel, count in zip(panels[0], heads, strict=True):
        tokens = sorted({row["shape"]["T"] for row in rows if row["shape"]["H"] == count})
        names = [name for name in COLORS if any(row["lowering"] == name for row in rows)]
        width = 0.8 / len(names)
        for number, name in enumerate(names):
            found = {r["shape"]["T"]: r for r in rows if r["lowering"] == name and r["shape"]["H"] == count}
            at = [i + (number - (len(names) - 1) / 2) * width for i, token in enumerate(tokens) if token in found]
            over = [found[token]["median_us"] / found[token]["floor_us"] for token in tokens if token in found]
            bars = panel.bar(at, over, width * 0.94, color=COLORS[name], label=LABELS.get(name, name))
            times = [f"{found[token]['median_us']:.0f}" for token in tokens if token in found]
            panel.bar_label(bars, times, fontsize=7, padding=1)
        panel.set_yscale("log")
        panel.axhline(1, color="black", linewidth=0.8)
        panel.set_xticks(range(len(tokens)), [str(token) for token in tokens])
        panel.set_xlabel("query tokens")
        panel.set_title(f"{count} heads", fontsize=10)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("time over floor (labels: µs)")
    panels[0][-1].legend(frameon=False, fontsize=8)
    machine = content["machine"]
    title = f"Sparse attention over fp8_ds_mla, top-k 2048: {machine['device'].split(',')[0]}, torch {machine['torch']}"
    figure.suptitle(title, fontsize=11)
    figure.tight_layout()
    figure.savefig(target)


def main(argv: list[str] | None = None) -> int:
    """Draws one file; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.plot", description=__doc__)
    parser.add_argument("rows", type=Path, help="JSON that the benchmark wrote")
    parser.add_argument("target", type=Path, help="picture to write: .svg or .png")
    arguments = parser.parse_args(argv)
    draw(json.loads(arguments.rows.read_text())["sparse_attention"], arguments.target)
    return 0


if __name__ == "__main__":
    sys.exit(main())
