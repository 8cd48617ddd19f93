"""The Hopper kernels' own code, compiled for this CPU without what is written in PTX."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mla_ops.kernels.hopper.sources import SOURCES

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")
NO_COMPILER = COMPILER is None
INLINE_PTX = re.compile(r'\basm(?: volatile)?\((?:[^;"]|"(?:[^"\\]|\\.)*")*\);')


def build(source: str, folder: Path, *options: str) -> ctypes.CDLL:
    """A library of `source`, a file beside this one that models the instructions it needs."""
    for path in (*SOURCES.folder.glob("*.cu*"), HERE / source, *HERE.glob("hopper_*.h")):
        shutil.copy(path, folder)
    for header in (
        folder / name for name in ("ptx.cuh", "memory.cuh", "arithmetic.cuh", "topk_ptx.cuh", "wide_ptx.cuh")
    ):
        header.write_text(INLINE_PTX.sub(";", header.read_text()))
    shutil.copy(HERE / "hopper_counters.h", folder / "counters.cuh")
    shutil.copy(HERE / "hopper_wgmma.h", folder / "wgmma.cuh")
    made = folder / f"{Path(source).stem}.so"
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", *options, str(folder / source)]
    finished = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return ctypes.CDLL(str(made))


def pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


class Launch(NamedTuple):
    """A launch that did not happen: its grid, block and clusters, and the bytes of its parameters."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    params: bytes


class Recorder(list[Launch]):
    """A kernel whose launches are kept, in place of every kernel that a test would load."""

    def launch(self, grid: Any, block: Any, shared_bytes: int, cluster: Any, params: bytes, **_: Any) -> None:
        self.append(Launch(grid, block, cluster, params))
