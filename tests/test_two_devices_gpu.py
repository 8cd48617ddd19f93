"""Two GPUs, of which one is current: tensors on the other run as they would there, in every way to call an op.

Without a second GPU, `test_registry.py` holds the guard by a stand-in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import mla_ops
from mla_ops import dispatch
from mla_ops.formats import allocate_cache
from mla_ops.testing import Sample, functional, op_names, sample_inputs
from mla_ops.testing.checks import named_arguments
from mla_ops.testing.samples import overload

COUNT = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(COUNT < 2, reason=f"needs two CUDA devices, torch.cuda.device_count() is {COUNT}"),
]

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
BASE_OPS = [name for name in op_names() if name == functional(name)]
current_device = pytest.mark.parametrize("current", [0, 1], ids=["first current", "second current"])


@pytest.fixture(autouse=True)
def _first_device_is_current() -> Iterator[None]:
    with torch.cuda.device(0):
        yield


def on_host(values: Any) -> Any:
    return tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, values)


def state(sample: Sample, returned: Any) -> Any:
    """The tensors that a call returned and wrote, on the host."""
    return on_host((returned, named_arguments(sample)))


def same(got: Any, expected: Any) -> None:
    for ours, theirs in zip(tree_leaves(got), tree_leaves(expected), strict=True):
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert ours == theirs


def run(op_name: str, device: torch.device, number: int = 0) -> Any:
    sample = sample_inputs(op_name, device)[number]
    returned = sample.op(*sample.args, **sample.kwargs)
    torch.cuda.synchronize(device)
    return state(sample, returned)


@current_device
@pytest.mark.parametrize("op_name", op_names())
def test_eager_calls_run_on_the_device_of_their_tensors(op_name: str, current: int) -> None:
    with torch.cuda.device(1 - current):
        expected = run(op_name, torch.device("cuda", 1 - current))
    with torch.cuda.device(current):
        same(run(op_name, torch.device("cuda", 1 - current)), expected)
        assert torch.cuda.current_device() == current


class Layer:
    """A layer's calls at real sizes on one device, prefill and decode, under the lowerings that it would get."""

    def __init__(self, device: torch.device, cache_format: str, num_tokens: int = 8) -> None:
        self.cache_format = cache_format
        generator = torch.Generator().manual_seed(7)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).bfloat16().to(device)

        width = 512 if cache_format == "fp8_ds_mla_v4" else 576
        latent_dim = 448 if cache_format == "fp8_ds_mla_v4" else 512
        self.key, self.latent_dim = normal(64 * 20, width), latent_dim
        self.cache = allocate_cache(cache_format, 20, 64, device=device, head_dim=width)
        self.slots = torch.arange(64 * 20, device=device)
        self.q = normal(num_tokens, 64, width)
        indices = torch.randint(0, 64 * 20, (num_tokens, 640), generator=generator)
        self.indices = indices.int().to(device)
        self.table = torch.arange(20, dtype=torch.int32, device=device).view(1, 20)
        self.request = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        self.lens = torch.full((num_tokens,), 1000, dtype=torch.int32, device=device)
        self.prompt = tuple(normal(300, 16, w) for w in (192, 192, 128))
        self.starts = torch.tensor([0, 300], dtype=torch.int32, device=device)

    def __call__(self) -> tuple[torch.Tensor, ...]:
        ops, scale = torch.ops.mla, 192**-0.5
        latent, rope = self.key[:, : self.latent_dim], self.key[:, self.latent_dim :]
        ops.concat_and_cache(latent, rope, self.cache, self.slots, self.cache_format)
        sparse = ops.paged_sparse_attention(self.q, self.cache, self.indices, scale, self.cache_format)
        dense = ops.paged_attention(self.q, self.cache, self.table, self.request, self.lens, scale, self.cache_format)
        flat = ops.sparse_attention(self.q, self.key, self.indices, scale)
        new = ops.prefill_attention(*self.prompt, self.starts, self.starts, 300, 300, scale)
        return (*sparse, *dense, *flat, *ops.merge_attention_states(*sparse, *dense), *new)


FORMATS = ("fp8_ds_mla", "fp8_ds_mla_v4", "bf16")


@pytest.mark.parametrize("cache_format", FORMATS)
def test_a_layer_on_the_second_device(cache_format: str) -> None:
    expected = on_host(Layer(FIRST, cache_format)())
    same(on_host(Layer(SECOND, cache_format)()), expected)
    with torch.cuda.device(1):
        same(on_host(Layer(FIRST, cache_format)()), expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_calls_run_on_the_device_of_their_tensors(backend: str) -> None:
    layer = Layer(SECOND, "fp8_ds_mla")
    expected = on_host(layer())
    torch._dynamo.reset()
    same(on_host(torch.compile(layer.__call__, backend=backend, fullgraph=True)()), expected)
    assert torch.cuda.current_device() == 0


def captured_by_stream(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(SECOND)):
        results = call()
    return graph, results


def captured_by_device(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(1), torch.cuda.graph(graph):
        results = call()
    return graph, results


@pytest.mark.parametrize("capture", [captured_by_stream, captured_by_device])
@pytest.mark.parametrize("cache_format", FORMATS)
def test_captured_calls_run_on_the_device_of_their_tensors(
    cache_format: str, capture: Callable[[Callable[[], Any]], tuple[torch.cuda.CUDAGraph, Any]]
) -> None:
    """Captured on the second device, replayed with other keys while the first is current."""
    layer = Layer(SECOND, cache_format)
    layer()
    torch.cuda.synchronize(1)
    graph, results = capture(layer)
    layer.key.neg_()
    layer.q.mul_(0.5)
    torch.cuda.synchronize(1)
    graph.replay()
    torch.cuda.synchronize(1)
    replayed = on_host(results)
    same(replayed, on_host(layer()))
    assert torch.cuda.current_device() == 0


def test_a_warm_up_of_a_device_that_is_not_current_compiles_all_that_a_capture_needs() -> None:
    triton = pytest.importorskip("triton")
    for device in (FIRST, SECOND):
        mla_ops.warmup(
            cache_format="fp8_ds_mla", num_heads=64, topk=640, num_tokens=(8, 1280), device=device,
            prefill_head_dims=(192, 128),
        )  # fmt: skip
    layer = Layer(SECOND, "fp8_ds_mla")
    names: list[str] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **what: names.append(what["repr"])
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(1), torch.cuda.graph(graph):
            torch.ops.mla.paged_sparse_attention(layer.q, layer.cache, layer.indices, 0.1, "fp8_ds_mla")
            torch.ops.mla.concat_and_cache(
                layer.key[:, :512], layer.key[:, 512:], layer.cache, layer.slots, "fp8_ds_mla"
            )
        graph.replay()
        torch.cuda.synchronize(1)
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
    assert not names


def test_a_new_thread_runs_on_the_device_of_its_tensors() -> None:
    """A thread that has not used CUDA: the first device is current there, whatever is in others."""
    expected = on_host(Layer(FIRST, "fp8_ds_mla")())
    layer = Layer(SECOND, "fp8_ds_mla")
    torch.cuda.synchronize(1)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(on_host(layer())))
    thread.start()
    thread.join(timeout=120)
    same(results[0], expected)


@pytest.mark.parametrize("op_name", BASE_OPS)
def test_tensors_on_two_devices_are_refused(op_name: str) -> None:
    samples = map(named_arguments, sample_inputs(op_name, SECOND))
    arguments = max(samples, key=lambda given: sum(isinstance(value, torch.Tensor) for value in given.values()))
    op, tensors = overload(op_name), [n for n, value in arguments.items() if isinstance(value, torch.Tensor)]
    for name in tensors[1:]:
        with pytest.raises(ValueError, match=rf"{op_name}: .*must be on cuda:1.*, got cuda:0"):
            op(**{**arguments, name: arguments[name].to(FIRST)})
    with pytest.raises(ValueError, match=rf"{op_name}: .*must be on cuda:0.*, got cuda:1"):
        op(**{**arguments, tensors[0]: arguments[tensors[0]].to(FIRST)})


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_each_lowering_takes_the_second_device(backend: str) -> None:
    layer = Layer(SECOND, "fp8_ds_mla")
    try:
        with dispatch.override(paged_sparse_attention=backend, paged_attention=backend):
            got = on_host(layer()[:4])
    except NotImplementedError as error:
        pytest.skip(str(error))
    with dispatch.override(paged_sparse_attention=backend, paged_attention=backend):
        same(got, on_host(Layer(FIRST, "fp8_ds_mla")()[:4]))
