"""examples/attention_layer.py, and what docs/attention-layer.md says of autocast, vmap, DTensor and the others."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist

import mla_ops

PATH = Path(__file__).parents[1] / "examples" / "attention_layer.py"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_layer", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def step(example: ModuleType) -> Any:
    """A layer with its caches, and the metadata of a step of one request, 5 tokens behind 0."""
    torch.manual_seed(0)
    layer = example.SparseMLA(32, 2, topk=8, max_len=64, index_heads=2).to(torch.bfloat16).requires_grad_(False)
    return layer, example.make_caches("cpu"), make_metadata(5)


def make_metadata(num_tokens: int, capacity: int | None = None, device: str = "cpu") -> mla_ops.StepMetadata:
    metadata = mla_ops.StepMetadata.allocate(
        max_num_tokens=capacity or num_tokens,
        max_num_requests=2,
        max_blocks_per_request=4,
        block_size=16,
        index_topk=8,
        device=device,
    )
    build(metadata, (0, num_tokens), (num_tokens,))
    return metadata


def build(metadata: mla_ops.StepMetadata, starts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    ints = {"dtype": torch.int32, "device": metadata.seq_lens.device}
    table = torch.tensor([[3, 1, 5, 2], [7, 6, 8, 4]], **ints)[: len(lengths)]
    metadata.build(torch.tensor(starts, **ints), torch.tensor(lengths, **ints), table)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).bfloat16()


def test_the_layer_equals_the_dense_form(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main() == 0
    assert "relative error" in capsys.readouterr().out


def test_the_layer_as_the_page_shows_it_is_short(example: ModuleType) -> None:
    """The page is for reading."""
    text = PATH.read_text(encoding="utf-8")
    shown = text[text.index("[start:layer]") : text.index("[end:layer]")]
    assert 80 <= sum(bool(line.strip()) for line in shown.splitlines()) <= 115


def test_padding_changes_no_token_and_no_cache(step: Any) -> None:
    layer, caches, metadata = step
    hidden, others = normal(5, 32), [cache.clone() for cache in caches]
    out = layer(hidden, *caches, metadata, 2)
    padded = torch.nn.functional.pad(hidden, (0, 0, 0, 11), value=3.0)
    again = layer(padded, *others, make_metadata(5, capacity=16), 2)
    assert torch.equal(again[:5], out)
    assert all(torch.equal(a, b) for a, b in zip(caches, others, strict=True))


@pytest.mark.parametrize("default_device", [None, "cpu"])
def test_one_graph_serves_any_number_of_tokens(example: ModuleType, step: Any, default_device: str | None) -> None:
    layer, caches, _ = step
    caches = [cache.clone() for cache in caches]
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    plain = example.make_caches("cpu")
    for num_tokens in (5, 2, 33):
        hidden, metadata = normal(num_tokens, 32), make_metadata(num_tokens)
        for tensor in (hidden, *(getattr(metadata, name) for name in PER_TOKEN)):
            torch._dynamo.mark_dynamic(tensor, 0)
        expected = layer(hidden, *plain, metadata, 2)
        with contextlib.nullcontext() if default_device is None else torch.device(default_device):
            torch.testing.assert_close(compiled(hidden, *caches, metadata, 2), expected)
    assert counter.frame_count == 1


PER_TOKEN = ("req_id_per_token", "positions", "slot_mapping", "key_lens", "topk_length")


def test_export_and_reload(step: Any) -> None:
    layer, caches, metadata = step
    hidden = normal(5, 32)
    program = torch.export.export(layer, (hidden, *caches, metadata, 2))
    stream = io.BytesIO()
    torch.export.save(program, stream)
    stream.seek(0)
    loaded = torch.export.load(stream).module()
    assert torch.equal(loaded(hidden, *caches, metadata, 2), layer(hidden, *caches, metadata, 2))


def test_an_exported_layer_takes_any_number_of_tokens(example: ModuleType, step: Any) -> None:
    """The metadata's dynamic shapes are a list, an entry for each buffer and size in the order of its fields."""
    layer, caches, metadata = step
    tokens = {0: torch.export.Dim("num_tokens", min=2, max=64)}
    names = [field.name for field in dataclasses.fields(metadata) if getattr(metadata, field.name) is not None]
    of_metadata = [tokens if name in PER_TOKEN else None for name in names]
    shapes = {"hidden": tokens, "kv_cache": None, "index_cache": None, "metadata": of_metadata, "num_requests": None}
    program = torch.export.export(layer, (normal(5, 32), *caches, metadata, 2), dynamic_shapes=shapes).module()
    for num_tokens in (5, 2, 33):
        hidden, metadata = normal(num_tokens, 32), make_metadata(num_tokens)
        exported, eager = example.make_caches("cpu"), example.make_caches("cpu")
        assert torch.equal(program(hidden, *exported, metadata, 2), layer(hidden, *eager, metadata, 2))
        assert all(torch.equal(a, b) for a, b in zip(exported, eager, strict=True))


@pytest.mark.gpu
def test_captured_steps_equal_eager_ones_on_gpu(example: ModuleType) -> None:
    torch.manual_seed(0)
    layer = example.SparseMLA(32, 2, topk=8, max_len=64, index_heads=2).cuda().bfloat16().requires_grad_(False)
    metadata, hidden = make_metadata(2, capacity=2, device="cuda"), normal(2, 32).cuda()
    caches, plain = example.make_caches("cuda"), example.make_caches("cuda")
    for written in (caches, plain):
        layer(hidden, *written, metadata, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(hidden, *caches, metadata, 2)
    for starts, lengths in (((0, 1, 2), (3, 9)), ((0, 1), (30,))):
        build(metadata, starts, lengths)
        graph.replay()
        assert torch.equal(out[: starts[-1]], layer(hidden, *plain, metadata, 2)[: starts[-1]])


def attend(q: torch.Tensor, kv_cache: torch.Tensor) -> torch.Tensor:
    indices = torch.zeros(q.shape[0], 3, dtype=torch.int32)
    return mla_ops.paged_sparse_attention(q, kv_cache, indices, 0.1, "bf16")[0]


@pytest.fixture
def call() -> tuple[torch.Tensor, torch.Tensor]:
    cache = mla_ops.allocate_cache("bf16", 2, 16)
    mla_ops.concat_and_cache(normal(4, 512), normal(4, 64), cache, torch.arange(4), "bf16")
    return normal(4, 2, 576), cache


def test_autograd_is_refused_and_no_grad_is_not(call: Any) -> None:
    q, cache = call
    with pytest.raises(NotImplementedError, match=r"no backward: call it under torch.no_grad"):
        attend(q.clone().requires_grad_(), cache)
    with torch.no_grad():
        assert torch.equal(attend(q.clone().requires_grad_(), cache), attend(q, cache))


def test_inference_mode_takes_and_makes_caches(call: Any) -> None:
    q, cache = call
    with torch.inference_mode():
        inside = mla_ops.allocate_cache("bf16", 2, 16)
        inside.copy_(cache)
        out = attend(q, cache)
    assert torch.equal(attend(q, inside), out)


def test_autocast_casts_nothing_for_the_ops(call: Any) -> None:
    q, cache = call
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match=r"q must be torch.bfloat16, got .*32"):
        attend(q.float(), cache)


def test_vmap_is_refused(call: Any) -> None:
    q, cache = call
    with pytest.raises(NotImplementedError, match=r"no batching rule: .* pass those of the whole batch in one call"):
        torch.vmap(attend, in_dims=(0, None))(torch.stack((q, q)), cache)


def test_a_cast_of_the_module_casts_a_plain_cache_but_no_quantized_one() -> None:
    module = torch.nn.Module()
    module.register_buffer("plain", mla_ops.allocate_cache("bf16", 2, 16), persistent=False)
    module.register_buffer("quantized", mla_ops.allocate_cache("fp8_ds_mla", 2, 16), persistent=False)
    module.half()
    assert module.plain.dtype == torch.float16
    assert module.quantized.dtype == torch.uint8
    assert not module.state_dict()
    with pytest.raises(TypeError, match="bfloat16"):
        attend(normal(4, 2, 576), module.plain)


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no torch.distributed")
def test_dtensor_is_not_mixed_with_tensors_and_local_map_unwraps_it(call: Any, mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import local_map

    q, cache = call
    heads = [Shard(1)]
    sharded = distribute_tensor(q, mesh, heads)
    with pytest.raises(RuntimeError, match=r"mixed torch.Tensor and DTensor"):
        attend(sharded, cache)
    mapped = local_map(attend, out_placements=heads, in_placements=(heads, None), device_mesh=mesh)
    out = mapped(sharded, cache)
    assert isinstance(out, DTensor)
    assert torch.equal(out.full_tensor(), attend(q, cache))
