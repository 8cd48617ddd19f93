"""Portable Triton kernels, one file a family."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

from ...dispatch import logger


def give_triton_a_cache() -> None:
    """Triton cannot compile without a folder to write to, and its own is in the home directory.

    Where that cannot be written and no variable names another, it gets a temporary folder, and the logger says so.
    """
    if os.environ.get("TRITON_CACHE_DIR") or os.environ.get("TRITON_HOME"):
        return
    own = Path(os.path.expanduser("~"), ".triton", "cache")  # noqa: PTH111 (as Triton does, which takes "~" as a name)
    try:
        if not own.is_absolute():
            raise FileNotFoundError("there is no home directory")
        own.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=own):
            return
    except OSError as error:
        why = error.strerror or error
    folder = tempfile.mkdtemp(prefix="mla_ops-triton-")
    os.environ["TRITON_CACHE_DIR"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    logger.warning(
        "Triton's kernels cannot be kept in %s (%s), so this process compiles them again, into %s. "
        "Set TRITON_CACHE_DIR to a folder that can be written",
        own,
        why,
        folder,
    )


give_triton_a_cache()
