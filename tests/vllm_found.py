"""Whether the tests of the vLLM plugin can run."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def importable() -> bool:
    """Whether vLLM itself can be imported. A part of it (a folder that holds its kernels alone) does not count."""
    found = importlib.util.find_spec("vllm")
    return found is not None and any(
        (Path(root) / "plugins").is_dir() for root in found.submodule_search_locations or ()
    )


needs_vllm = pytest.mark.skipif(
    not importable(), reason="vLLM is not installed: python -m scripts.vllm_tests fetches it"
)
