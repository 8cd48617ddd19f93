"""Resources of every CUDA C++ kernel, kept in hopper_resources.json so that tests compile only what has changed.

    python tests/hopper_resources.py    # compiles all kernels, some minutes on two cores, and writes the file

A kernel is found by a hash of all its sources, its options and the version of NVRTC. So the file has no answer for a
kernel that has changed, or for another compiler: it is compiled then.
"""

from __future__ import annotations

import dataclasses
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mla_ops.kernels.cuda import compiler
from mla_ops.kernels.cuda.compiler import Resources
from mla_ops.kernels.hopper import sources

FILE = Path(__file__).with_suffix(".json")
MAX_SHARED_BYTES = 227 * 1024  # a block's, dynamic and static together


@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of a compilation.

    Attributes:
        resources: of the machine code.
        shared_bytes: dynamic shared memory of a block.
        log: the compiler's warnings.
    """

    resources: Resources
    shared_bytes: int
    log: str


def key_of(source: str, kernel: str, defines: tuple[str, ...]) -> str:
    return sources.SOURCES.read(source, kernel, defines).digest(*compiler.version())


def compiled_figures(source: str, kernel: str, defines: tuple[str, ...]) -> Figures:
    compiled = sources.compile(source, kernel, defines)
    return Figures(compiled.resources, compiled.shared_bytes, compiled.log)


def known_figures() -> dict[str, Figures]:
    """The figures that are kept, by their keys."""
    return {
        row["key"]: Figures(Resources(*row["resources"]), row["shared_bytes"], "")
        for row in json.loads(FILE.read_text())
    }


def figures_of(known: dict[str, Figures], source: str, kernel: str, defines: tuple[str, ...]) -> Figures:
    """The file's if it has this kernel, else those of a compilation."""
    found = known.get(key_of(source, kernel, defines))
    return found or compiled_figures(source, kernel, defines)


def main() -> None:
    """A row a line, without kernels that have warnings."""
    from test_aot_cuda import KERNELS

    def row(variant: Any) -> str:
        name = variant.source, variant.kernel, variant.defines
        figures = compiled_figures(*name)
        content = {"kernel": str(variant), "resources": dataclasses.astuple(figures.resources)}
        content |= {"shared_bytes": figures.shared_bytes, "key": key_of(*name)}
        return "" if figures.log else json.dumps(content)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        rows = [text for text in pool.map(row, KERNELS) if text]
    FILE.write_text("[\n" + ",\n".join(sorted(rows)) + "\n]\n")


if __name__ == "__main__":
    main()
