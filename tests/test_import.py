"""`import mla_ops` costs next to nothing on top of torch and loads no optional package."""

from __future__ import annotations

import json
import os
from pathlib import Path

import fresh
import pytest

import mla_ops

REPOSITORY = str(Path(mla_ops.__file__).parents[1])
OPTIONAL = ("triton", "flashinfer", "flash_mla", "transformers", "vllm", "sglang", "numpy", "safetensors")

# `import torch` alone may load numpy, and triton in some builds
MEASURE = """
import importlib, json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import mla_ops
seconds = time.process_time() - start
if sys.argv[1:] == ["time"]:
    print(json.dumps({"seconds": seconds}))
    sys.exit()
found = {"seconds": seconds, "added": sorted(set(sys.modules) - before), "ops": len(dir(torch.ops.mla))}
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    torch.ops.mla.filter_prefill_indices(torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2).int())
found["kernels_after_fake"] = [name for name in sys.modules if name.startswith("mla_ops.kernels.")]
importlib.reload(mla_ops)
print(json.dumps({**found, "ops_after_reload": len(dir(torch.ops.mla))}))
"""


@pytest.fixture(scope="module")
def imports() -> list[dict]:
    """Two fresh processes: other work on this machine slows one more than the other."""
    results = []
    for arguments in ([], ["time"]):
        environment = {**os.environ, "PYTHONPATH": REPOSITORY}
        results.append(json.loads(fresh.run("-c", MEASURE, *arguments, env=environment, check=True).stdout))
    return results


@pytest.mark.parametrize("package", OPTIONAL)
def test_import_loads_no_optional_package(imports: list[dict], package: str) -> None:
    for name in imports[0]["added"]:
        assert name.partition(".")[0] != package, f"{name} was loaded"


def test_import_loads_no_kernel_model_or_test_helper(imports: list[dict]) -> None:
    for name in imports[0]["added"]:
        assert not name.startswith(("mla_ops.kernels.", "mla_ops.models", "mla_ops.testing", "mla_ops.cli")), name


def test_import_loads_no_compiler_of_torch(imports: list[dict]) -> None:
    # each of them takes about a second; they are for the first torch.compile to load
    for name in imports[0]["added"]:
        assert not name.startswith(("torch._dynamo", "torch._inductor")), name


def test_import_takes_less_than_a_fifth_of_a_second_on_top_of_torch(imports: list[dict]) -> None:
    assert min(result["seconds"] for result in imports) < 0.2


def test_a_fake_call_imports_no_kernel(imports: list[dict]) -> None:
    assert imports[0]["kernels_after_fake"] == []


def test_import_again_after_reload_is_harmless(imports: list[dict]) -> None:
    # a module that is imported from two paths registers its ops once, or says so
    assert imports[0]["ops"] == imports[0]["ops_after_reload"] > 0


@pytest.mark.parametrize("name", mla_ops.__all__)
def test_public_names_exist(name: str) -> None:
    assert getattr(mla_ops, name) is not None
