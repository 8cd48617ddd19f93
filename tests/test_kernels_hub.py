"""The repository for Hugging Face `kernels`: it loads under a name of its own, and its ops run."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fresh
import pytest

from mla_ops import dispatch
from scripts import kernels_hub

RUN = """
import torch

q = torch.randn(2, 4, 576)
cache = module.allocate_cache("fp32", 2, 16)
slots = torch.arange(20)
module.concat_and_cache(torch.randn(20, 512), torch.randn(20, 64), cache, slots, "fp32")
indices = torch.tensor([[0, 5, -1], [19, 19, 40]], dtype=torch.int32)
expected = module.paged_sparse_attention(q, cache, indices, 0.1, "fp32")
if TRITON:
    with module.dispatch.override("triton"):
        torch.testing.assert_close(module.paged_sparse_attention(q, cache, indices, 0.1, "fp32"), expected)
import sys
print(module.__name__, "mla_ops" in sys.modules)
"""
# `kernels` imports a package so
BY_PATH = """
import importlib.util, sys

spec = importlib.util.spec_from_file_location(IDENTITY, PATH)
module = importlib.util.module_from_spec(spec)
sys.modules[IDENTITY] = module
spec.loader.exec_module(module)
"""
BY_KERNELS = """
from pathlib import Path
from kernels import get_local_kernel

module = get_local_kernel(Path(PATH).parents[3], backend="cpu")
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    return kernels_hub.build(tmp_path_factory.mktemp("hub"))


@pytest.mark.parametrize("load", [BY_PATH, pytest.param(BY_KERNELS, id="get_local_kernel")])
def test_ops_run(repository: Path, load: str, tmp_path: Path) -> None:
    if load is BY_KERNELS and not dispatch.is_installed("kernels"):
        pytest.skip("kernels is not installed: pip install kernels")
    variant = repository / "build" / "torch-cpu"
    identity = json.loads((variant / "metadata.json").read_text())["id"]
    constants = f"IDENTITY, PATH = {identity!r}, {str(variant / 'mla_ops' / '__init__.py')!r}\n"
    triton = dispatch.is_installed("triton")
    program = tmp_path / "program.py"
    program.write_text(f"TRITON = {triton}\n{constants}{load}{RUN}")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "HF_HUB_OFFLINE": "1"}
    said = fresh.run(str(program), env=environment, cwd=tmp_path, check=True)
    assert said.stdout.split() == [identity, "False"]


def test_both_backends_describe_the_same_sources(repository: Path) -> None:
    described = {
        backend: json.loads((repository / "build" / f"torch-{backend}" / "metadata.json").read_text())
        for backend in ("cuda", "cpu")
    }
    assert {backend: entry["backend"] for backend, entry in described.items()} == {
        "cuda": {"type": "cuda"},
        "cpu": {"type": "cpu"},
    }
    assert len({entry["id"].rsplit("_", 1)[1] for entry in described.values()}) == 1
    sources = repository / "build" / "torch-cuda" / "mla_ops" / "kernels" / "hopper"
    assert list(sources.glob("*.cu"))
    assert not list(sources.glob(kernels_hub.CODE))


def test_identity_follows_the_sources(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("1")
    first = kernels_hub.digest(tmp_path, ())
    (tmp_path / "sm_90a.zip").write_text("2")
    assert kernels_hub.digest(tmp_path, (kernels_hub.CODE,)) == first
    assert kernels_hub.digest(tmp_path, ()) != first
