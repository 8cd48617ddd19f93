"""Launches of the compressor: programs of one and of many tokens, one compiled graph, captured steps, real sizes."""

from __future__ import annotations

import pytest
import torch
from compressor_oracle import (
    CSA,
    EPS,
    HCA,
    INDEXER,
    LONG_OVERLAP,
    Engine,
    Geometry,
    Weights,
    assert_equals_oracle,
    history,
    oracle,
)

import mla_ops
from mla_ops import dispatch
from mla_ops.testing import tolerances
from mla_ops.testing.checks import assert_same_bits, large_allocations, run_without_recompiling


def test_one_launch_only_where_no_write_meets_a_read() -> None:
    from mla_ops.kernels.triton.compressor import fits_in_one_launch

    for window in range(1, 9):
        for capacity in range(window, 20):
            for num_tokens in range(1, 20):
                reads = {p % capacity: p for p in range(-window + 1, num_tokens)}
                clash = (
                    any(reads.get(p % capacity, p) != p for p in range(num_tokens))
                    or len(reads) < window - 1 + num_tokens
                )
                assert fits_in_one_launch(num_tokens, window, capacity) == (not clash)


@pytest.mark.parametrize("geometry", [Geometry(16, 1, 128), LONG_OVERLAP], ids=["ratio 16", "ratio 6 with overlap"])
def test_programs_of_many_tokens_write_the_bits_of_programs_of_one(
    triton_lowering: None, geometry: Geometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests side by side, padding, a group that a token completes in every place of a program, and states that
    are stored in the same launch."""
    from mla_ops.kernels.triton import compressor

    weights, length = Weights(geometry), 2 * geometry.ratio + 5
    kv, score = history(geometry, 2 * length + 3)
    requests = [0] * length + [-1] * 3 + [1] * length
    positions = [*range(length), 0, 1, 2, *range(length)]
    engines = []
    for many_tokens in (1, 10**6):
        monkeypatch.setattr(compressor, "MANY_TOKENS", many_tokens)
        torch.manual_seed(0)
        engine = Engine(weights, 2, 2, state_blocks=4, state_block_size=geometry.window + length)
        assert compressor.fits_in_one_launch(len(requests), geometry.window, 4 * (geometry.window + length))
        engine.step(kv, score, requests, positions)
        engines.append(engine)
    assert_same_bits(engines[0].states, engines[1].states, "states")
    assert_same_bits(engines[0].cache, engines[1].cache, "cache")
    assert engines[0].entries(1, 2).abs().sum() > 0


def test_a_state_that_a_later_token_replaces_is_not_written(
    triton_lowering: None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs run in any order: those of replaced tokens must write nothing, whatever stands between the two."""
    from mla_ops.kernels.triton import compressor

    weights = Weights(Geometry(2, 1, 128), device)
    kv, score = history(weights.geometry, 9)
    engine = Engine(weights, 1, 5, state_blocks=2, state_block_size=1)  # a ring of two
    launches = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: launches.append((args, kwargs))

    kernel = compressor._store_state_kernel
    monkeypatch.setattr(compressor, "_store_state_kernel", Recorder())
    engine.step(kv, score, [0, 0, -1, -1, 0, 0, -1, 7, 0], [0, 1, 2, 3, 4, 5, 6, 7, 8])
    (args, kwargs), states = launches[0], engine.states.clone()
    kernel[(5,)](*args, **kwargs)  # tokens 0 to 4; 5 and 8 are the last of their places
    assert_same_bits(engine.states, states, "states")
    kernel[(9,)](*args, **kwargs)
    written = engine.states[engine.table[0].long()].flatten(0, 1)
    assert torch.equal(written[:, :128], kv[[8, 5]])


def test_one_graph_serves_every_number_of_tokens() -> None:
    weights = Weights(INDEXER, "cpu")

    def step(kv, score, states, cache, table, requests, positions, slots):
        mla_ops.compress_and_cache(
            kv, score, weights.bias, weights.norm, weights.cos_sin, states, cache, table, requests, positions, slots,
            EPS, "fp32",
        )  # fmt: skip
        return cache.sum()

    def call(num_tokens: int) -> tuple[torch.Tensor, ...]:
        rows = torch.arange(num_tokens)
        return (
            torch.randn(num_tokens, 256),
            torch.randn(num_tokens, 256),
            torch.zeros(3, 8, 512),
            torch.zeros(2, 16, 128),
            torch.tensor([[2]], dtype=torch.int32),
            torch.zeros(num_tokens, dtype=torch.int32),
            rows.to(torch.int32),
            rows // 4,
        )

    calls = [call(count) for count in (5, 1, 64, 2, 0, 33)]
    expected = [step(*(tensor.clone() for tensor in arguments)) for arguments in calls]
    results = run_without_recompiling(
        step, calls, unbacked=lambda *arguments: [(arguments[i], 0) for i in (0, 1, 5, 6, 7)]
    )
    assert [float(r) for r in results] == [float(e) for e in expected]


def test_compiled_code_copies_neither_cache() -> None:
    from torch._inductor.utils import run_and_get_code

    weights, engine = Weights(INDEXER, "cpu"), Engine(Weights(INDEXER, "cpu"), 4, 16)
    kv, score = torch.randn(2, 5, 256).unbind()

    def two_steps(kv, score, states, cache):
        for first in (0, 5):
            requests = torch.zeros(5, dtype=torch.int32)
            positions = torch.arange(first, first + 5, dtype=torch.int32)
            slots = positions.long() // 4
            mla_ops.compress_and_cache(
                kv * 2, score, weights.bias, weights.norm, weights.cos_sin, states, cache, engine.table, requests,
                positions, slots, EPS, "fp32",
            )  # fmt: skip

    states, cache = engine.states.clone(), engine.cache.clone()
    two_steps(kv, score, states, cache)
    compiled = torch.compile(two_steps, fullgraph=True)
    _, codes = run_and_get_code(compiled, kv, score, engine.states, engine.cache)
    assert large_allocations(codes, min(states[0].numel(), cache[0].numel()) * 2) == []
    assert_same_bits(engine.states, states, "states")
    assert_same_bits(engine.cache, cache, "entries")


def _decode_inputs(lengths: list[int], num_rows: int, ratio: int) -> tuple[torch.Tensor, ...]:
    """Requests, positions and slots of one decode step, padded to `num_rows`."""
    padding = num_rows - len(lengths)
    requests = [*range(len(lengths))] + [-1] * padding
    positions = lengths + [0] * padding
    slots = [r * 64 + p // ratio if (p + 1) % ratio == 0 else -1 for r, p in enumerate(lengths)] + [-1] * padding
    int32 = {"dtype": torch.int32, "device": "cuda"}
    return torch.tensor(requests, **int32), torch.tensor(positions, **int32), torch.tensor(slots, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [CSA, HCA], ids=["C4A", "C128A"])
def test_a_captured_step_replayed_with_other_lengths_equals_eager(geometry: Geometry) -> None:
    weights = Weights(geometry, "cuda", max_positions=64 * geometry.ratio)
    captured, eager = (Engine(weights, 8, 64, cache_format="fp8_ds_mla_v4") for _ in range(2))
    eager.table.copy_(captured.table)
    captured.states.zero_()
    eager.states.zero_()
    kv, score = history(geometry, 8, torch.bfloat16)
    buffers = _decode_inputs([0] * 8, 8, geometry.ratio)

    def step(engine: Engine, inputs: tuple[torch.Tensor, ...]) -> None:
        requests, positions, slots = inputs
        mla_ops.compress_and_cache(
            kv, score, weights.bias, weights.norm, weights.cos_sin, engine.states, engine.cache, engine.table,
            requests, positions, slots, EPS, "fp8_ds_mla_v4",
        )  # fmt: skip

    step(captured, buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(captured, buffers)
    captured.states.zero_()
    captured.cache.zero_()
    for trial in range(40):
        live = 1 + trial % 8
        lengths = [(trial * 7 + 13 * r) % (60 * geometry.ratio) for r in range(live)]
        lengths[0] = (trial + 1) * geometry.ratio - 1
        inputs = _decode_inputs(lengths, 8, geometry.ratio)
        fresh = history(geometry, 8, torch.bfloat16)
        kv.copy_(fresh[0])
        score.copy_(fresh[1])
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        graph.replay()
        step(eager, inputs)
        assert_same_bits(captured.cache, eager.cache, f"entries of step {trial}")
        assert_same_bits(captured.states, eager.states, f"states of step {trial}")


@pytest.mark.gpu
@pytest.mark.parametrize("geometry", [CSA, HCA, INDEXER], ids=["C4A", "C128A", "C4A indexer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_prefill_at_real_sizes_equals_the_reference(geometry: Geometry, dtype: torch.dtype) -> None:
    weights = Weights(geometry, "cuda", max_positions=4096)
    kv, score = history(geometry, 4099, dtype)
    engines = []
    for backend in ("reference", "triton"):
        torch.manual_seed(1)
        engine = Engine(weights, 1, 1100)
        with dispatch.override(backend):
            engine.step(kv[:1000], score[:1000], [0] * 1000, list(range(1000)))
            engine.step(kv[1000:], score[1000:], [0] * 3099, list(range(1000, 4099)))
        engines.append(engine)
    assert_same_bits(engines[1].states, engines[0].states, "states")
    _, magnitudes, _ = oracle(weights, kv[:1024], score[:1024])
    magnitudes["smallest_rms"] /= 2
    bound = tolerances.compressed_entry(torch.float32, geometry.window, geometry.head_dim, **magnitudes)
    torch.testing.assert_close(engines[1].cache, engines[0].cache, rtol=2 * bound.rtol, atol=2 * bound.atol)


@pytest.mark.gpu
def test_states_and_entries_beyond_four_gigabytes() -> None:
    weights = Weights(CSA, "cuda")
    states = torch.zeros(2**31 // (8 * 2048) + 9, 8, 2048, device="cuda")  # 8 GiB and a little
    cache = torch.zeros(2**32 // (64 * 512) + 3, 64, 512, dtype=torch.bfloat16, device="cuda")
    kv, score = history(CSA, 8, torch.bfloat16)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    table = torch.tensor([[states.shape[0] - 1]], **int32)
    last = cache.shape[0] * 64 - 1
    mla_ops.compress_and_cache(
        kv, score, weights.bias, weights.norm, weights.cos_sin, states, cache, table, torch.zeros(8, **int32),
        torch.arange(8, **int32), torch.tensor([-1, -1, -1, last - 1, -1, -1, -1, last], device="cuda"), EPS, "bf16",
    )  # fmt: skip
    assert_equals_oracle(cache[-1, -2:], weights, kv, score, torch.bfloat16)
    assert states[-1].any(-1).all()
    assert not states[:9].any()
    assert not cache[:3].any()
