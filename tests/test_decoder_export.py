"""A whole decoder, exported with any number of tokens and saved, runs in another process that has no model classes."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fresh
import pytest
import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

pytest.importorskip("transformers")

import mla_ops
from mla_ops.demo.model import build_small_model, build_small_v4_model
from mla_ops.models import decoder_for
from mla_ops.testing.checks import assert_all_same

pytestmark = pytest.mark.usefixtures("one_thread")


def build_v32() -> Any:
    return build_small_model(num_layers=1, hidden_size=64, num_heads=2, index_heads=2, index_topk=32)


def build_v4() -> Any:
    return build_small_v4_model(hidden_size=64, num_heads=2, index_topk=16)


CASES: dict[str, tuple[Callable[[], Any], bool]] = {
    "sparse step of V3.2": (build_v32, False),
    "dense prefill of V3.2": (build_v32, True),
    "step of V4": (build_v4, False),
}
LENGTHS = 2, 9, 32

RUN_SAVED_PROGRAM = """
import sys, torch, mla_ops.models
assert "transformers" not in sys.modules
for name in sys.argv[1:]:
    module = torch.export.load(f"{name}.pt2").module()
    calls = torch.load(f"{name}.calls.pt")
    with torch.no_grad():
        results = [module(*call) for call in calls]
    torch.save((calls, results), f"{name}.results.pt")
"""


class Step(torch.nn.Module):
    """Formats are constants of the program; the caches are its caller's."""

    def __init__(self, decoder: Any, cache: Any) -> None:
        super().__init__()
        self.decoder, self.formats = decoder, (cache.cache_format, cache.index_format)

    def forward(self, inputs: Any, layers: Any) -> Any:
        return self.decoder(inputs, layers, *self.formats)


def build(model: Callable[[], Any], dense: bool) -> tuple[Step, list[tuple[Any, Any]]]:
    """A step of three requests, and calls with padding of several lengths, each with caches of its own."""
    decoder = decoder_for(model().bfloat16(), 256)
    cache = decoder.allocate_cache(decoder.attention.quantized_format, 16, 128, 4)
    metadata = decoder.allocate_metadata(max_num_tokens=32, max_num_requests=4, block_size=128)
    int32 = {"dtype": torch.int32}
    starts, lens = torch.tensor([0, 5, 8, 9], **int32), torch.tensor([5, 3, 1], **int32)
    decoder.build_step(metadata, starts, lens, torch.tensor([[1, 2], [3, 4], [5, 6]], **int32))
    rows = torch.arange(4, **int32).unsqueeze(1)
    bound = decoder.dense_context(0, 9, any_length=True) if dense else None
    assert (bound is not None) == dense
    calls = []
    for length in LENGTHS:
        inputs = decoder.step_inputs(torch.arange(length) * 7 % 200, metadata, rows, bound)
        calls.append((inputs, copy.deepcopy(cache.layers)))
    return Step(decoder, cache), calls


def export(step: Step, call: tuple[Any, Any]) -> Any:
    inputs, layers = call
    tokens = Dim("num_tokens", min=2, max=4096)
    per_token = len(inputs.per_token)
    shapes = type(inputs)(
        *({0: tokens} if i < per_token else pytree.tree_map(lambda x: None, value) for i, value in enumerate(inputs))
    )
    with torch.no_grad():
        dynamic_shapes = {"inputs": shapes, "layers": pytree.tree_map(lambda x: None, layers)}
        return torch.export.export(step, call, dynamic_shapes=dynamic_shapes, strict=False)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    for name, case in CASES.items():
        step, calls = build(*case)
        torch.export.save(export(step, calls[1]), folder / f"{name}.pt2")
        torch.save([tuple(call) for call in calls], folder / f"{name}.calls.pt")
    names = [str(folder / name) for name in CASES]
    environment = {**os.environ, "PYTHONPATH": str(Path(mla_ops.__file__).parents[1])}
    fresh.run("-c", RUN_SAVED_PROGRAM, *names, check=True, env=environment)
    return folder


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_saved_decoder_gives_the_bits_of_eager_in_a_fresh_process(name: str, folder: Path) -> None:
    step, calls = build(*CASES[name])
    expected = [step(*call) for call in calls]
    written, results = torch.load(folder / f"{name}.results.pt")
    assert_all_same(results, expected, "saved decoder against eager, logits")
    assert_all_same(tensors(written), tensors(calls), "saved decoder against eager, caches")
