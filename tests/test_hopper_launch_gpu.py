"""Every way to launch the sparse attention kernels for Hopper: clusters and groups of every size, two waves."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import attention_oracle
import pytest
import torch
from attention_inputs import SCALE, filled_cache, operand, queries, rows_with_wide_scales, some_indices

from mla_ops.kernels.hopper import groups, launch, sources, sparse_attention, waves
from mla_ops.kernels.hopper.launch import KERNELS, Clusters, Group, Shape

pytestmark = pytest.mark.gpu

QUANTIZED = [key for key, keys in KERNELS.items() if keys.quantized]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")


class Call:
    """Whole tiles and a part of one; empty rows, parts without keys, parts whose keys float16 does not hold."""

    def __init__(
        self, cache_format: str, width: int, num_tokens: int, num_heads: int, deterministic: bool = False
    ) -> None:
        device, self.cache_format, self.deterministic = torch.device("cuda"), cache_format, deterministic
        if cache_format == "bf16":
            self.cache = filled_cache(cache_format, 64, 64, device, head_dim=width)
            self.indices = some_indices(num_tokens, 1100, 64 * 64, device)
        else:
            self.cache, self.indices = rows_with_wide_scales(cache_format, -26, num_tokens, 1100, device)
        self.q = queries(num_tokens, num_heads, torch.bfloat16, device, width)
        lengths = torch.tensor([1100, 1100, 1090, 1024, 0, 1, 300, 700, 1000], dtype=torch.int32, device=device)
        lengths = lengths.repeat(-(-num_tokens // len(lengths)))[:num_tokens]
        self.options = {"topk_length": lengths, "attn_sink": torch.randn(num_heads, device=device)}
        self.out = torch.empty(num_tokens, num_heads, 512, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(num_tokens, num_heads, device=device)

    def attend(self, shape: Shape) -> None:
        self.spoil()
        self.run(shape)

    def spoil(self) -> None:
        self.out.fill_(math.nan)
        self.lse.fill_(math.nan)

    def run(self, shape: Shape) -> None:
        with waves.override(waves.Wave(len(self.q), shape)):
            sparse_attention.paged_sparse_attention(
                self.q,
                self.cache,
                self.indices,
                SCALE,
                self.cache_format,
                **self.options,
                deterministic=self.deterministic,
                out=self.out,
                lse=self.lse,
            )

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.out.clone(), self.lse.clone()

    def check(self, shapes: Iterator[Shape]) -> None:
        expected = attention_oracle.attention(
            self.q,
            self.cache,
            self.indices,
            SCALE,
            operand=operand("hopper", self.cache_format, self.q.dtype),
            cache_format=self.cache_format,
            **self.options,
        )
        for shape in shapes:
            self.attend(shape)
            attention_oracle.assert_close(self.out, self.lse, expected)


@pytest.mark.parametrize(
    ("cache_format", "width", "tile"), [(*key, tile) for key, keys in KERNELS.items() for tile in keys.tiles]
)
def test_clusters_of_every_size(cache_format: str, width: int, tile: int) -> None:
    at_once = launch.clusters_at_once(KERNELS[cache_format, width], tile, 0)
    sizes = (splits for splits, count in zip(launch.SPLITS, at_once, strict=True) if count)
    Call(cache_format, width, 9, 2 * tile - 3).check(Clusters(tile, splits) for splits in sizes)


@pytest.mark.parametrize("num_tokens", [9, 50])
@pytest.mark.parametrize(("cache_format", "width"), QUANTIZED)
def test_groups_of_every_size(cache_format: str, width: int, num_tokens: int) -> None:
    """With 50 tokens more CTAs than the device runs at one time."""
    Call(cache_format, width, num_tokens, 125).check(map(Group, range(2, 17)))


@pytest.mark.parametrize(
    ("cache_format", "width", "tile", "shares"),
    [
        (*key, tile, shares)
        for key in QUANTIZED
        for tile in KERNELS[key].tiles
        for shares in (*(2, 3, 4, 8), *(6, 7, 16) * (tile in launch.MOST_OF_A_CTA))
    ],
)
def test_bits_of_shares_do_not_depend_on_how_many_ctas_take_them(
    cache_format: str, width: int, tile: int, shares: int
) -> None:
    """Nor do those of clusters and groups of as many CTAs differ. With 150 tokens a CTA takes several rows."""
    shapes: list[Shape] = [
        Clusters(tile, splits, shares=shares)
        for splits in launch.SPLITS
        if splits <= shares and (splits == 1 or shares <= launch.MOST_OF_A_CTA.get(tile, shares) * splits)
    ]
    Call(cache_format, width, 9, 2 * tile - 3, deterministic=True).check(iter(shapes))
    if tile == groups.TILE:
        shapes += [Clusters(tile, shares), Group(shares)]
    elif shares > 2 and tile != 32:
        shapes.append(Clusters(tile, shares))
    shapes += sparse_attention.narrow_shapes(tile, shares)
    for num_tokens in (60, 150):
        call = Call(cache_format, width, num_tokens, 2 * tile - 3, deterministic=True)
        call.attend(shapes[0])
        wanted = call.results()
        for shape in shapes * 3:
            if isinstance(shape, Group) and 2 * num_tokens > groups.MAX_ROWS:
                continue
            call.attend(shape)
            assert all(map(torch.equal, call.results(), wanted)), f"{num_tokens} tokens, {shape}"


@pytest.mark.parametrize("patience", [0, 1, 3])
@pytest.mark.parametrize(("cache_format", "width"), QUANTIZED)
def test_groups_whose_ctas_give_up(
    cache_format: str, width: int, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last CTA of a row adds up what others did not wait for: the same bits."""
    call, load, wanted = Call(cache_format, width, 16, 125), sources.load, {}
    for members in (2, 4, 7, 16):
        call.attend(Group(members))
        wanted[members] = call.results()
    monkeypatch.setattr(sources, "load", lambda *arguments: load(*arguments, (f"PATIENCE={patience}",)))
    for members in (2, 4, 7, 16) * 5:
        call.attend(Group(members))
        assert all(map(torch.equal, call.results(), wanted[members]))


def test_groups_of_captures_and_streams() -> None:
    """A capture's first call is a stream's first one; replays of two graphs and eager calls beside one another."""
    calls = [Call("fp8_ds_mla", 576, num_tokens, 128) for num_tokens in (8, 4, 6)]
    wanted = []
    for call in calls:
        call.attend(Group(8))
        wanted.append(call.results())
    streams, graphs = [torch.cuda.Stream() for _ in calls], [torch.cuda.CUDAGraph() for _ in calls[:2]]
    for call, stream, graph in zip(calls, streams, graphs, strict=False):
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(4):
                call.attend(Group(8))
    runs = (graphs[0].replay, graphs[1].replay, lambda: calls[2].attend(Group(8)))
    for _ in range(50):
        for stream, run in zip(streams, runs, strict=True):
            with torch.cuda.stream(stream):
                run()
        torch.cuda.synchronize()
        for call, results in zip(calls, wanted, strict=True):
            assert all(map(torch.equal, call.results(), results))


def cuda(function: str, *arguments: Any) -> Any:
    """Calls a function of the driver; returns its result."""
    status, *returned = getattr(importlib.import_module("cuda.bindings.driver"), function)(*arguments)
    assert status == 0, f"{function}: {status}"
    return returned[0] if returned else None


def beside_itself(graph: torch.cuda.CUDAGraph, times: int) -> Any:
    """A graph, ready to launch, whose nodes are that one, so many times, on branches of their own."""
    parent = cuda("cuGraphCreate", 0)
    for _ in range(times):
        cuda("cuGraphAddChildGraphNode", parent, [], 0, graph.raw_cuda_graph())
    return cuda("cuGraphInstantiate", parent, 0)


@pytest.mark.parametrize("ways", ["two child nodes", "four child nodes", "two instantiations"])
@pytest.mark.parametrize("members", [2, 8, 16])
@pytest.mark.parametrize(("cache_format", "width"), QUANTIZED)
def test_a_group_runs_beside_itself(cache_format: str, width: int, members: int, ways: str) -> None:
    """1,000 times the bits of eager, then alone: one memory, one set of counters, two or four launches at a time."""
    call, shape = Call(cache_format, width, 4, 128), Group(members)
    call.attend(shape)
    wanted = call.results()
    call.attend(shape)
    for name, first, second in zip(("out", "lse"), wanted, call.results(), strict=True):
        torch.testing.assert_close(second, first, rtol=0, atol=0, msg=lambda text, name=name: f"{name}, eager: {text}")
    graph, streams = torch.cuda.CUDAGraph(keep_graph=True), [torch.cuda.Stream() for _ in range(2)]
    with torch.cuda.graph(graph, stream=streams[0]):
        call.run(shape)
    if ways == "two instantiations":
        programs = [beside_itself(graph, 1) for _ in range(2)]
    else:
        programs = [beside_itself(graph, 2 if ways == "two child nodes" else 4)]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def count_wrong() -> None:
        pairs = zip((call.out.view(torch.int16), call.lse.view(torch.int32)), wanted, strict=True)
        wrong.add_(sum((actual != expected.view(actual.dtype)).sum() for actual, expected in pairs))

    with torch.cuda.stream(streams[0]):
        for _ in range(1000):
            call.spoil()
            streams[1].wait_stream(streams[0])
            for program, stream in zip(programs, streams, strict=False):
                cuda("cuGraphLaunch", program, stream.cuda_stream)
            streams[0].wait_stream(streams[1])
            count_wrong()
        assert int(wrong) == 0, "beside itself"
        graph.instantiate()
        for _ in range(20):
            call.spoil()
            graph.replay()
            count_wrong()
        # on this stream, or the next test would get memory that it still writes
        assert int(wrong) == 0, "alone, afterwards"
    for program in programs:
        cuda("cuGraphExecDestroy", program)


@pytest.mark.parametrize(("first", "rest", "num_heads"), [(132, 8, 16), (132, 8, 64), (66, 6, 128), (33, 8, 128)])
@pytest.mark.parametrize(
    ("cache_format", "width"), [("fp8_ds_mla", 576), ("fp8_ds_mla_v4", 512), ("bf16", 576), ("bf16", 512)]
)
def test_two_waves(cache_format: str, width: int, first: int, rest: int, num_heads: int) -> None:
    """Strided arguments; replays whose next kernel reads the results, of the second wave and of the first.

    The second wave of quantised keys and 128 heads is a group's.
    """
    device, topk, num_tokens = torch.device("cuda"), 2048, first + rest
    tile = 16 if num_heads == 16 else 64
    grouped = num_heads == 128 and cache_format != "bf16"
    forced = waves.Wave(first, Clusters(tile, 1)), waves.Wave(rest, Group(4) if grouped else Clusters(tile, 4))
    cache = filled_cache(cache_format, 64, 64, device, head_dim=width)
    indices = some_indices(num_tokens, topk + 8, 16 * 64, device)[:, :topk]
    q = queries(num_tokens, num_heads + 2, torch.bfloat16, device, width)[:, 1:-1]
    options = {
        "block_table": torch.randint(0, 64, (9, 16), dtype=torch.int32, device=device),
        "req_id_per_token": torch.randint(0, 9, (num_tokens,), dtype=torch.int32, device=device),
        "topk_length": torch.randint(0, topk + 1, (num_tokens,), dtype=torch.int32, device=device),
        "attn_sink": torch.randn(num_heads, device=device),
    }
    out = torch.empty(num_tokens, num_heads + 2, 520, dtype=torch.bfloat16, device=device)[:, 1:-1, :512]
    lse = torch.empty(num_heads, num_tokens + 1, device=device)[:, 1:].T

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        out.fill_(math.nan)
        lse.fill_(math.nan)
        with waves.override(*forced):
            sparse_attention.paged_sparse_attention(q, cache, indices, SCALE, cache_format, **options, out=out, lse=lse)
        return out.clone(), lse.clone()

    eager = step()
    tokens = [0, first - 1, first, num_tokens - 1]
    chosen = {name: value if name in ("block_table", "attn_sink") else value[tokens] for name, value in options.items()}
    expected = attention_oracle.attention(
        q[tokens],
        cache,
        indices[tokens],
        SCALE,
        operand=operand("hopper", cache_format, q.dtype),
        cache_format=cache_format,
        **chosen,
    )
    attention_oracle.assert_close(eager[0][tokens], eager[1][tokens], expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(50):
        graph.replay()
        for found, wanted in zip(captured, eager, strict=True):
            assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
