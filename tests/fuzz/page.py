"""The page of results: runs of the fuzzer, added up."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

REFUSED, ABSENT = "refused", "absent"
HEAD = """\
Differential fuzzing against the reference on the CPU: random calls of every op, one in eight malformed
cases that ran, by the lowering asked for (auto: what dispatch chooses); refused: malformed, by both alike
"""
WIDTH, COLUMN = 46, 10


@dataclass
class Page:
    """Runs and what became of their cases.

    Attributes:
        runs: a line each: cases, seconds, findings, seeds, machine, commit.
        counts: cases by (op, column): a lowering, `REFUSED` or `ABSENT`.
        findings: a line each, with their seeds.
    """

    runs: list[str] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Page:
        """Reads what `text` wrote; an empty page if there is none."""
        page = cls()
        columns: list[str] = []
        for line in path.read_text().splitlines() if path.exists() else ():
            if line.startswith("run: "):
                page.runs.append(line.removeprefix("run: "))
            elif line.startswith(("seed ", "a child ")):
                page.findings.append(line)
            elif line.startswith("op "):
                columns = line.split()[1:]
            elif columns and re.match(r"\w", line):
                op, *numbers = line.split()
                for column, number in zip(columns, numbers, strict=True):
                    page.counts[op, column] += int(number.replace(",", ""))
        return page

    def add(self, other: Page) -> None:
        self.runs += other.runs
        self.counts += other.counts
        self.findings += other.findings

    def text(self) -> str:
        lowerings = sorted({column for _, column in self.counts} - {REFUSED, ABSENT})
        columns = (*lowerings, REFUSED, ABSENT)
        total = sum(self.counts.values()) + len(self.findings)
        lines = [f"run: {run}" for run in self.runs]
        lines += [f"all: {total:,} cases, {len(self.findings)} findings", ""]
        lines.append(f"{'op':<{WIDTH}}" + "".join(f"{name:>{COLUMN}}" for name in columns))
        for op in sorted({op for op, _ in self.counts}):
            lines.append(f"{op:<{WIDTH}}" + "".join(f"{self.counts[op, name]:>{COLUMN},}" for name in columns))
        return HEAD + "\n".join([*lines, "", *self.findings]).rstrip() + "\n"
