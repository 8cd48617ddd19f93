"""The folder of compiled code: `$MLA_OPS_CACHE_DIR`, else `mla_ops` in the user's cache folder.

A file's name is a hash of all that its code comes from. Processes that need the same kernel compile it once: each takes
the lock of its file first.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ...dispatch import logger
from . import compiler
from .compiler import Compiled, Unit

CACHE_VARIABLE = "MLA_OPS_CACHE_DIR"
# the longest wait for a process that compiles the same kernel, which takes a second or two: it may be stopped
PATIENCE_SECONDS = 60.0


def cache_directory() -> Path | None:
    """The folder of compiled code; None if no variable names one and the user has no home directory."""
    if os.environ.get(CACHE_VARIABLE):
        return Path(os.environ[CACHE_VARIABLE])
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "mla_ops"
    try:
        return Path.home() / ".cache/mla_ops"
    except RuntimeError:
        return None


def compile_once(unit: Unit) -> Compiled:
    """The code of a unit, from the cache, where another process that compiles it now is waited for.

    Raises:
        CompileError: the source does not compile; the compiler's log.
    """
    folder = cache_directory()
    if folder is None:
        _cannot_keep("there is no home directory")
        return compiler.compile(unit)
    path = folder / f"{unit.digest(compiler.version())}.cubin"
    found = read(path, unit.kernel)
    if found is None:
        with _locked(path):
            found = read(path, unit.kernel)
            if found is None:
                found = compiler.compile(unit)
                _write(path, found)
    return found


@functools.cache  # once for a process and reason
def _cannot_keep(why: str) -> None:
    logger.warning(
        "Compiled kernels cannot be kept: %s. Each process compiles them again, which takes seconds for each kernel. "
        "Set %s to a folder that can be written",
        why,
        CACHE_VARIABLE,
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time is inside, as far as the file system knows locks. They end with their process.

    Files are replaced whole, so work that is done without a lock is done twice, and nothing is damaged.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(path.with_suffix(".lock").open("wb"))
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not _takes_lock(file) and time.monotonic() < deadline:
                time.sleep(0.02)
        yield


def _takes_lock(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def read(path: Path, kernel: str) -> Compiled | None:
    """Reads what `_write` wrote; None if the file is not there or not complete."""
    try:
        digest, _, content = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if digest.decode(errors="replace") != hashlib.sha256(content).hexdigest():
        return None
    head, _, cubin = content.partition(b"\n")
    return Compiled(kernel, **json.loads(head), cubin=cubin)


def _write(path: Path, compiled: Compiled) -> None:
    head = json.dumps({"symbol": compiled.symbol, "log": compiled.log})
    content = head.encode() + b"\n" + compiled.cubin
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
        Path(file.name).replace(path)
    except OSError as error:
        _cannot_keep(f"{path.parent}: {error.strerror or error}")
