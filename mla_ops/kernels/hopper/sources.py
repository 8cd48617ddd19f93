"""The CUDA C++ of this folder: `load(source, kernel, device_index)` is a kernel on a device."""

from __future__ import annotations

from pathlib import Path

from ..cuda.compiler import Target
from ..cuda.sources import Sources

SM90A = Target("sm_90a", (12, 0))
SOURCES = Sources(Path(__file__).parent, SM90A)

compile = SOURCES.compile  # noqa: A001 (as re.compile)
load = SOURCES.load
reason = SOURCES.reason
