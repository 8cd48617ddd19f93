"""Triton kernels that children of the fuzzer compile: each by one child, while the others go on with other cases."""

from __future__ import annotations

import fcntl
import hashlib
from pathlib import Path
from typing import Any, BinaryIO


class BusyError(Exception):
    """Another child is compiling a kernel that this case needs."""


class Compilations:
    """Locks of the kernels that children compile, files in a folder of theirs.

    Triton calls a hook before it compiles a kernel or reads one that another process has compiled, and one afterwards.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: list[BinaryIO] = []

    def install(self) -> None:
        """Sets Triton's hooks."""
        import triton

        triton.knobs.runtime.jit_cache_hook = self.take
        triton.knobs.runtime.jit_post_compile_hook = lambda **_: self.release()

    def take(self, *, key: Any, fn: Any, **_: Any) -> None:
        """Takes the lock of a kernel, or raises `BusyError`."""
        name = hashlib.sha256(f"{fn.module}.{fn.name} {key}".encode()).hexdigest()
        file = (self.folder / name).open("wb")
        self.held.append(file)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError from None

    def release(self) -> None:
        for file in self.held:
            file.close()
        self.held.clear()
