"""The compressor: every lowering against float64 over whole sequences, against transformers' own, and against itself.

The oracle keeps every request's full history and never saw a state cache; the op sees steps, a ring and slots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mla_ops
from mla_ops import dispatch
from mla_ops.formats import allocate_cache
from mla_ops.kernels.reference.cache import read_slots
from mla_ops.testing import tolerances
from mla_ops.testing.checks import assert_same_bits, large_allocations, run_without_recompiling

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("reference", "triton")
EPS = 1e-6
PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Geometry:
    """ratio, series a token has, channels of an entry."""

    ratio: int
    series: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.series * self.head_dim

    @property
    def window(self) -> int:
        return self.ratio * self.series


CSA, HCA, INDEXER = Geometry(4, 2, 512), Geometry(128, 1, 512), Geometry(4, 2, 128)
ODD, LONG_OVERLAP = Geometry(3, 1, 128), Geometry(6, 2, 128)
NAMES = {CSA: "C4A", HCA: "C128A", INDEXER: "C4A indexer", ODD: "ratio 3", LONG_OVERLAP: "ratio 6 with overlap"}
geometries = pytest.mark.parametrize("geometry", NAMES, ids=NAMES.values())


@dataclass
class Weights:
    """What a layer has, and angles that no pair shares."""

    geometry: Geometry
    device: str | torch.device = DEVICE
    max_positions: int = 700
    bias: torch.Tensor = field(init=False)
    norm: torch.Tensor = field(init=False)
    cos_sin: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.geometry.ratio, self.geometry.width
        self.bias = torch.randn(*shape, device=self.device)
        self.norm = 1 + 0.2 * torch.randn(self.geometry.head_dim, device=self.device)
        angles = torch.arange(self.max_positions).unsqueeze(1) * 0.9 ** torch.arange(32)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)


class Engine:
    """Requests with states and entries in caches of their own blocks, as an engine would keep them."""

    def __init__(
        self,
        weights: Weights,
        num_requests: int,
        max_entries: int,
        *,
        cache_format: str = "fp32",
        state_blocks: int = 2,
        state_block_size: int | None = None,
    ) -> None:
        geometry, device = weights.geometry, weights.device
        self.weights, self.cache_format, self.max_entries = weights, cache_format, max_entries
        block_size = state_block_size or -(-geometry.window // state_blocks)
        blocks = torch.randperm(num_requests * state_blocks)
        self.table = blocks.to(torch.int32).view(num_requests, state_blocks).to(device)
        # what nobody wrote must never be read: it is NaN
        self.states = torch.full((len(blocks) + 1, block_size, 2 * geometry.width), math.nan, device=device)
        head_dim = geometry.head_dim
        self.cache = allocate_cache(cache_format, num_requests, max_entries, head_dim=head_dim, device=device)

    def step(self, kv: torch.Tensor, score: torch.Tensor, requests: list[int], positions: list[int]) -> None:
        """One call: rows of `kv` and `score` belong to these requests and positions; request -1 is padding."""
        ratio, device = self.weights.geometry.ratio, self.weights.device
        slots = [
            request * self.max_entries + position // ratio if request >= 0 and (position + 1) % ratio == 0 else -1
            for request, position in zip(requests, positions, strict=True)
        ]
        mla_ops.compress_and_cache(
            kv,
            score,
            self.weights.bias,
            self.weights.norm,
            self.weights.cos_sin,
            self.states,
            self.cache,
            self.table,
            torch.tensor(requests, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.tensor(slots, dtype=torch.int64, device=device),
            EPS,
            self.cache_format,
        )

    def entries(self, request: int, count: int) -> torch.Tensor:
        slots = request * self.max_entries + torch.arange(count, device=self.cache.device)
        return read_slots(self.cache, slots, self.cache_format)


def history(geometry: Geometry, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    kv = torch.randn(length, geometry.width, device=DEVICE).to(dtype)
    return kv, (2 * torch.randn(length, geometry.width, device=DEVICE)).to(dtype)


def oracle(weights: Weights, kv: torch.Tensor, score: torch.Tensor) -> tuple[torch.Tensor, dict[str, float], float]:
    """Entries of one request's whole history, in float64, one group and one state at a time; and their magnitudes.

    The last number is how far, at least, the pooled row would move if a state were left out, in units of its root mean
    square.
    """
    geometry = weights.geometry
    ratio, dim = geometry.ratio, geometry.head_dim
    bias, norm, table = (t.double().cpu() for t in (weights.bias, weights.norm, weights.cos_sin))
    kv, score = kv.double().cpu(), score.double().cpu()
    biased = score + bias.repeat(len(kv) // ratio + 1, 1)[: len(kv)]
    entries, smallest_rms, entry_magnitude, value_magnitude, one_state = [], math.inf, 0.0, 0.0, math.inf
    for group in range(len(kv) // ratio):
        members = []
        for series in range(geometry.series):
            # the last series is the group's own tokens, the one before it the group before's
            first = (group - (geometry.series - 1 - series)) * ratio
            channels = slice(series * dim, (series + 1) * dim)
            members += [(kv[t, channels], biased[t, channels]) for t in range(first, first + ratio) if t >= 0]
        weight = torch.stack([b for _, b in members]).exp()
        weight /= weight.sum(0)
        keys = torch.stack([k for k, _ in members])
        pooled = (keys * weight).sum(0)
        value_magnitude = max(value_magnitude, float((keys.abs() * weight).sum(0).max()))
        rms = pooled.square().mean().sqrt()
        without = (pooled - keys) * weight / (1 - weight)
        one_state = min(one_state, float(without.abs().amax(1).min() / rms))
        row = (pooled / (rms**2 + EPS).sqrt() * norm).tolist()
        entry_magnitude = max(entry_magnitude, *map(abs, row))
        smallest_rms = min(smallest_rms, float(rms))
        for pair in range(32):
            at = dim - 64 + 2 * pair
            turn = complex(table[group * ratio, pair], table[group * ratio, 32 + pair])
            turned = complex(row[at], row[at + 1]) * turn
            row[at], row[at + 1] = turned.real, turned.imag
        entries.append(torch.tensor(row, dtype=torch.float64))
    magnitudes = {
        "score_magnitude": float(biased.abs().max()),
        "value_magnitude": value_magnitude,
        "smallest_rms": smallest_rms,
        "weight_magnitude": float(norm.abs().max()),
        "entry_magnitude": entry_magnitude,
    }
    return torch.stack(entries), magnitudes, one_state


def assert_equals_oracle(
    found: torch.Tensor, weights: Weights, kv: torch.Tensor, score: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    expected, magnitudes, one_state = oracle(weights, kv, score)
    bound = tolerances.compressed_entry(dtype, weights.geometry.window, weights.geometry.head_dim, **magnitudes)
    assert 10 * bound.atol < one_state, "the bound would hardly see a state left out"
    torch.testing.assert_close(found.double().cpu(), expected, rtol=bound.rtol, atol=bound.atol)


@geometries
def test_one_prefill_equals_float64(lowering: str, geometry: Geometry) -> None:
    """Two requests in one call, one of which stops inside a group."""
    weights = Weights(geometry)
    lengths = (3 * geometry.ratio + 1, geometry.ratio * 2)
    pairs = [history(geometry, length) for length in lengths]
    engine = Engine(weights, 2, 4)
    requests = [0] * lengths[0] + [1] * lengths[1]
    positions = [*range(lengths[0]), *range(lengths[1])]
    engine.step(torch.cat([kv for kv, _ in pairs]), torch.cat([score for _, score in pairs]), requests, positions)
    for request, (kv, score) in enumerate(pairs):
        assert_equals_oracle(engine.entries(request, lengths[request] // geometry.ratio), weights, kv, score)


@geometries
@pytest.mark.parametrize("state_blocks", [1, 3], ids=["a ring of one block", "a ring of blocks"])
def test_decode_token_by_token_equals_one_prefill(lowering: str, geometry: Geometry, state_blocks: int) -> None:
    weights, length = Weights(geometry), 2 * geometry.ratio + 3
    kv, score = history(geometry, length, torch.bfloat16)
    whole = Engine(weights, 1, 3, cache_format="bf16")
    whole.step(kv, score, [0] * length, list(range(length)))
    decoded = Engine(weights, 2, 3, cache_format="bf16", state_blocks=state_blocks)
    for position in range(length):
        # request 1 is idle: a padded row
        here = slice(position, position + 1)
        decoded.step(kv[here].repeat(2, 1), score[here].repeat(2, 1), [0, -1], [position, 0])
    assert_same_bits(decoded.entries(0, 2), whole.entries(0, 2), "decode against prefill")
    assert not decoded.cache[1].any()
    # a block takes more than the ring needs where it does not divide
    capacity = decoded.table.shape[1] * decoded.states.shape[1]
    block_size = decoded.states.shape[1]
    for position in range(max(length - capacity, 0), length):
        block = decoded.table[0, position // block_size % state_blocks]
        state = decoded.states[block, position % block_size]
        biased = score[position].float() + weights.bias[position % geometry.ratio]
        assert_same_bits(state, torch.cat((kv[position].float(), biased)), f"state of position {position}")
    assert decoded.states[decoded.table[1].long()].isnan().all(), "the idle request's states"


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_prefill_in_pieces_of_any_size_equals_one_prefill(backend: str, data: st.DataObject) -> None:
    """Requests of any length, cut into steps that mix them in any order with padding, over rings of any size."""
    geometry = data.draw(st.sampled_from((ODD, INDEXER)))
    weights = Weights(geometry)
    lengths = data.draw(st.lists(st.integers(0, 21), min_size=1, max_size=3))
    pairs = [history(geometry, length) for length in lengths]
    state_blocks = data.draw(st.integers(1, 4))
    smallest = -(-geometry.window // state_blocks)
    block_size = smallest + data.draw(st.integers(0, 5))
    options = {"state_blocks": state_blocks, "state_block_size": block_size}
    engine = Engine(weights, len(lengths), 8, **options)
    done = [0] * len(lengths)
    with dispatch.override(backend):
        while done != lengths:
            requests, positions, rows = [], [], []
            for request in data.draw(st.permutations(range(len(lengths)))):
                count = data.draw(st.integers(0, lengths[request] - done[request]))
                part = range(done[request], done[request] + count)
                padding = data.draw(st.integers(0, 2))
                requests += [request] * count + [-1] * padding
                positions += [*part] + [data.draw(st.integers(-1, 20)) for _ in range(padding)]
                rows += [torch.cat([t[p] for t in pairs[request]]) for p in part]
                rows += [torch.full((2 * geometry.width,), math.nan, device=DEVICE)] * padding
                done[request] += count
            if rows:
                engine.step(*torch.stack(rows).split(geometry.width, dim=1), requests, positions)
        for request, (kv, score) in enumerate(pairs):
            count = lengths[request] // geometry.ratio
            whole = Engine(weights, 1, 8)
            whole.step(kv, score, [0] * lengths[request], list(range(lengths[request])))
            assert_same_bits(engine.entries(request, count), whole.entries(0, count), f"request {request}")
            assert not engine.entries(request, 8)[count:].any(), "an entry of a group that is not complete"
            if count:
                assert_equals_oracle(whole.entries(0, count), weights, kv, score)


def caches_of(geometry: Geometry, cache_format: str, kv: torch.Tensor, score: torch.Tensor) -> list[torch.Tensor]:
    """The caches of 20 tokens, in `fp32` and in a format."""
    weights = Weights(geometry)
    engines = [Engine(weights, 1, 6, cache_format=name) for name in ("fp32", cache_format)]
    for engine in engines:
        engine.step(kv, score, [0] * 20, list(range(20)))
    return [engine.cache for engine in engines]


@pytest.mark.parametrize("cache_format", ["bf16", "fp16", "fp8_ds_mla_v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_formats_round_the_float32_entry_once(lowering: str, cache_format: str, dtype: torch.dtype) -> None:
    """The bytes are those that `concat_and_cache` writes for the entry that a `fp32` cache gets."""
    caches = caches_of(CSA, cache_format, *history(CSA, 20, dtype))
    entries = caches[0][0, :5]
    expected = allocate_cache(cache_format, 1, 6, head_dim=512, device=DEVICE)
    slots = torch.arange(5, device=DEVICE)
    mla_ops.concat_and_cache(entries[:, :448], entries[:, 448:], expected, slots, cache_format)
    assert_same_bits(caches[1], expected, cache_format)


def test_index_keys_are_quantised_from_the_float32_entry(lowering: str) -> None:
    """The bytes are those that `write_index_cache` writes for the entry that a `fp32` cache gets."""
    kv, score = history(INDEXER, 20, torch.bfloat16)
    kv[7] = math.nan
    caches = caches_of(INDEXER, "fp8_index", kv, score)
    expected = allocate_cache("fp8_index", 1, 6, device=DEVICE)
    mla_ops.write_index_cache(caches[0][0, :5], expected, torch.arange(5, device=DEVICE), "fp8_index")
    assert_same_bits(caches[1], expected, "fp8_index")


@geometries
def test_lowerings_write_the_same_states_and_close_entries(triton_lowering: None, geometry: Geometry) -> None:
    weights, length = Weights(geometry), 2 * geometry.ratio + 1
    kv, score = history(geometry, length)
    engines = []
    for backend in BACKENDS:
        torch.manual_seed(0)  # the same blocks
        engine = Engine(weights, 1, 2)
        with dispatch.override(backend):
            engine.step(kv[:-5], score[:-5], [0] * (length - 5), list(range(length - 5)))
            engine.step(kv[-5:], score[-5:], [0] * 5, list(range(length - 5, length)))
        engines.append(engine)
    assert_same_bits(engines[1].states, engines[0].states, "states")
    _, magnitudes, _ = oracle(weights, kv, score)
    bound = tolerances.compressed_entry(torch.float32, geometry.window, geometry.head_dim, **magnitudes)
    torch.testing.assert_close(engines[1].cache, engines[0].cache, rtol=2 * bound.rtol, atol=2 * bound.atol)


def test_a_new_request_in_used_blocks_reads_nothing_of_the_old_one(lowering: str) -> None:
    weights = Weights(CSA)
    engine, fresh = Engine(weights, 1, 8), Engine(weights, 1, 8)
    old = torch.full((11, 1024), math.nan, device=DEVICE)
    engine.step(old, old, [0] * 11, list(range(11)))
    kv, score = history(CSA, 9)
    for one in (engine, fresh):
        one.step(kv[:3], score[:3], [0] * 3, [0, 1, 2])
        one.step(kv[3:], score[3:], [0] * 6, list(range(3, 9)))
    assert_same_bits(engine.entries(0, 2), fresh.entries(0, 2), "entries")


@geometries
def test_rejected_drafts_are_replaced_where_the_ring_has_room_for_them(lowering: str, geometry: Geometry) -> None:
    """Three draft tokens a step, of which one is kept: what they overwrote is not needed again."""
    weights, length, drafts = Weights(geometry), 2 * geometry.ratio + 2, 3
    kv, score = history(geometry, length)
    engine = Engine(weights, 1, 4, state_blocks=1, state_block_size=geometry.window + drafts)
    for position in range(length):
        wrong = history(geometry, drafts)
        rows = [
            torch.cat((right[position : position + 1], draft)) for right, draft in zip((kv, score), wrong, strict=True)
        ]
        engine.step(*rows, [0] * (1 + drafts), list(range(position, position + 1 + drafts)))
    # only now, as a later draft may have completed a later group
    whole = Engine(weights, 1, 4)
    whole.step(kv, score, [0] * length, list(range(length)))
    assert_same_bits(engine.entries(0, 2), whole.entries(0, 2), "entries")


def test_nothing_is_written_beside_entries_and_states(lowering: str, device: torch.device) -> None:
    """Slices of pools, padding tokens, slots and blocks out of range."""
    weights = Weights(ODD)
    pool = torch.full((6, 5, 256), 7.0, device=device)
    cache_pool = torch.full((5, 4, 128), 7.0, device=device)
    states, cache = pool[1:5, 1:4], cache_pool[1:4, :3]
    table = torch.tensor([[2], [99], [-1]], dtype=torch.int32, device=device)
    requests = torch.tensor([0, 0, 0, 1, 2, -1, 3, 0], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 1, 2, 2, 2, 2, 2, -1], dtype=torch.int32, device=device)
    slots = torch.tensor([4, 4, 5, 9, -1, 1, 2, 3], device=device)
    kv, score = history(ODD, 8)
    arguments = (weights.bias, weights.norm, weights.cos_sin, states, cache, table, requests, positions, slots)
    mla_ops.compress_and_cache(kv, score, *arguments, EPS, "fp32")
    touched = (pool != 7).any(-1).nonzero().tolist()
    assert touched == [[3, 1], [3, 2], [3, 3]]
    assert (cache_pool != 7).any(-1).nonzero().tolist() == [[2, 2]]
    expected, *_ = oracle(weights, kv[:3], score[:3])
    torch.testing.assert_close(cache_pool[2, 2].double().cpu(), expected[0], rtol=1e-4, atol=1e-4)


def test_shared_blocks_and_positions_in_no_order_write_nothing_else(lowering: str, device: torch.device) -> None:
    """Which states such requests read is unspecified; where they write is not."""
    weights = Weights(ODD)
    pool = torch.full((6, 5, 256), 7.0, device=device)
    cache_pool = torch.full((5, 4, 128), 7.0, device=device)
    states, cache = pool[1:5, 1:4], cache_pool[1:4, :3]
    table = torch.tensor([[2], [2], [0]], dtype=torch.int32, device=device)
    requests = torch.tensor([0, 1, 0, 1, 2, 2, 2, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([2, 2, 2, 5, 1, 1, 0, 2], dtype=torch.int32, device=device)
    slots = torch.tensor([4, 5, 4, 5, 9, -1, 99, 6], device=device)
    kv, score = history(ODD, 8)
    arguments = (weights.bias, weights.norm, weights.cos_sin, states, cache, table, requests, positions, slots)
    mla_ops.compress_and_cache(kv, score, *arguments, EPS, "fp32")
    assert (pool != 7).any(-1).nonzero().tolist() == [[1, 1], [1, 2], [1, 3], [3, 3]]
    assert (cache_pool != 7).any(-1).nonzero().tolist() == [[2, 1], [2, 2], [3, 0]]


def test_a_position_without_angles_writes_no_entry(lowering: str) -> None:
    weights = Weights(ODD, max_positions=4)
    engine = Engine(weights, 1, 3)
    kv, score = history(ODD, 9)
    engine.step(kv, score, [0] * 9, list(range(9)))
    # groups begin at 0, 3 and 6
    assert engine.cache[0].any(-1).tolist() == [True, True, False]


def test_a_token_that_is_not_a_number_stays_in_its_group(lowering: str) -> None:
    weights = Weights(ODD)
    engine = Engine(weights, 2, 3)
    kv, score = history(ODD, 12)
    kv[4, 3], score[10, 5] = math.inf, math.nan
    engine.step(kv, score, [0] * 9 + [1] * 3, [*range(9), *range(3)])
    assert engine.cache.isfinite().all(-1).tolist()[0] == [True, False, True]
    assert not engine.cache[1, 0].isfinite().any()


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


CONFIG = {
    "hidden_size": 64,
    "head_dim": 512,
    "index_head_dim": 128,
    "num_attention_heads": 2,
    "q_lora_rank": 32,
    "num_hidden_layers": 2,
    "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
    "vocab_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_topk": 8,
    "sliding_window": 16,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize("pieces", [(300,), (5, 1, 1, 1, 150, 2, 97, 43), (1,) * 20], ids=["one", "mixed", "decode"])
@pytest.mark.parametrize("name", ["C4A", "C128A", "C4A indexer"])
def test_entries_equal_transformers(lowering: str, name: str, pieces: tuple[int, ...]) -> None:
    """transformers' compressor modules and caches, fed the same hidden states in the same pieces."""
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("this transformers has no DeepSeek-V4")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as stock

    config = transformers.DeepseekV4Config(**CONFIG)
    layer = 1 if name == "C128A" else 0
    module = (stock.DeepseekV4HCACompressor if layer else stock.DeepseekV4CSACompressor)(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    module.kv_norm.weight.data += 1
    module.to(DEVICE)
    past = transformers.DynamicCache(config=config)
    part = module.indexer if "indexer" in name else module
    geometry = {"C4A": CSA, "C128A": HCA, "C4A indexer": INDEXER}[name]
    weights = Weights(geometry)
    weights.bias, weights.norm = part.position_bias.detach(), part.kv_norm.weight.detach()
    positions = torch.arange(512, device=DEVICE).unsqueeze(0)
    angles = part.rotary_emb(weights.bias, position_ids=positions, layer_type="compress")
    weights.cos_sin = torch.cat(angles, dim=-1)[0]

    engine, start, fed = Engine(weights, 1, 80), 0, []
    for count in pieces:
        hidden = torch.randn(1, count, 64, device=DEVICE)
        with torch.no_grad():
            module(hidden, torch.randn(1, count, 32, device=DEVICE), positions[:, start : start + count], past, layer)
            kv, score = part.kv_proj(hidden)[0], part.gate_proj(hidden)[0]
        engine.step(kv, score, [0] * count, list(range(start, start + count)))
        fed.append((kv, score))
        start += count
    expected = past.layers[layer].compressed_kv["indexer" if "indexer" in name else "compressor"][0]
    assert len(expected) == sum(pieces) // geometry.ratio
    if len(expected) == 0:
        return
    kv, score = (torch.cat(parts) for parts in zip(*fed, strict=True))
    _, magnitudes, _ = oracle(weights, kv, score)
    bound = tolerances.compressed_entry(torch.float32, geometry.window, geometry.head_dim, **magnitudes)
    found = engine.entries(0, len(expected))
    torch.testing.assert_close(found, expected, rtol=2 * bound.rtol, atol=2 * bound.atol)


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
    for backend in BACKENDS:
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
