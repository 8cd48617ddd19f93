"""Layouts over two GPUs, by NCCL and in captured graphs, against one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


def test_captured_decode_over_two_gpus_gives_the_tokens_of_one() -> None:
    """float32 over a plain cache: bfloat16 is rounded in other places, and may choose another token."""
    pytest.importorskip("transformers")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "benchmarks.distributed"]
    done = subprocess.run(
        [*command, "tokens"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[1],
        env={**os.environ, "NCCL_NVLS_ENABLE": "0"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"fp32 +eager captured (.+?) +equal (\d+) of (\d+)", done.stdout)
    assert [layout for layout, _, _ in found] == ["one rank", "tp", "dcp", "tp + dcp"], done.stdout
    assert all(same == total for _, same, total in found), done.stdout
