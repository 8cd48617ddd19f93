"""The lightning indexer, every lowering against formulations of its own: Python's sort, float64 sums, single bytes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cache import python_groups
from torch._subclasses.fake_tensor import FakeTensorMode

from mla_ops import dispatch
from mla_ops.formats import allocate_cache, geometry
from mla_ops.kernels import selection
from mla_ops.testing.index_scores import exact_scores

BACKENDS = ("reference", "triton")
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
WRITERS = (*BACKENDS, "hopper") if ON_HOPPER else BACKENDS  # tests/test_hopper_cache.py is for the CPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INF, NAN = math.inf, math.nan


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def python_topk(row: list[float], topk: int, start: int, end: int) -> list[int]:
    """Columns by score, descending; equal scores by column; NaN behind everything. Python has 0.0 == -0.0."""
    columns = range(max(start, 0), min(end, len(row)))
    order = sorted(columns, key=lambda c: (1, 0.0, c) if math.isnan(row[c]) else (0, -row[c], c))
    return order[:topk]


def assert_topk(scores: torch.Tensor, topk: int, starts: list[int], ends: list[int]) -> None:
    rows = {"row_starts": int32(starts), "row_ends": int32(ends)}
    for in_order in (False, True):
        indices, counts = torch.ops.mla.topk_indices(scores.to(DEVICE), topk, **rows, sorted=in_order)
        for token, row in enumerate(scores.tolist()):
            chosen = python_topk(row, topk, starts[token], ends[token])
            chosen = chosen if in_order else sorted(chosen)
            assert indices[token].tolist() == chosen + [-1] * (topk - len(chosen)), f"row {token}, sorted={in_order}"
            assert counts[token] == len(chosen)


SPECIAL = (0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -1e-45, 1.0000001, 3e38)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_topk_is_that_of_a_stable_sort(backend: str, data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 40))
    value = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32))
    rows = data.draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=1, max_size=3))
    bounds = st.lists(st.integers(-5, width + 5), min_size=len(rows), max_size=len(rows))
    starts, ends, topk = data.draw(bounds), data.draw(bounds), data.draw(st.integers(1, 48))
    with dispatch.override(backend):
        assert_topk(torch.tensor(rows, dtype=torch.float32), topk, starts, ends)


def patterns(width: int) -> dict[str, torch.Tensor]:
    """Rows that overflow buffers, bins and gates of kernels in the field."""
    ramp = torch.arange(width, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    low_bits = torch.randint(0, 1024, (width,), generator=generator, dtype=torch.int32) + 0x3F800000
    zeros = torch.zeros(width)
    zeros[width // 3 :: 7] = 1e-3
    nan = torch.full((width,), NAN)
    nan[5::3] = torch.randn(len(nan[5::3]), generator=generator)
    return {
        "normal": torch.randn(width, generator=generator),
        "ascending": ramp,
        "descending": -ramp,
        "all equal": torch.full((width,), 0.5),
        "zeros of both signs": torch.where(ramp % 2 == 0, 0.0, -0.0),
        "ten low bits": low_bits.view(torch.float32),
        "mostly zeros": zeros,
        "mostly NaN": nan,
        "all NaN": torch.full((width,), NAN),
        "infinities": torch.where(ramp % 3 == 0, INF, -INF),
    }


def assert_topk_of_an_adversarial_row(name: str, k: int) -> None:
    row = patterns(2500)[name]
    # lengths of 0, 1, k - 1, k, k + 1, past the row, and starts that are not on 16 bytes
    starts, lengths = [0, 3, 1, 2, 5, 7, 4], [0, 1, k - 1, k, k + 1, 9999, 2300]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    wide = torch.full((len(starts), len(row) + 3), INF)
    wide[:, : len(row)] = row
    assert_topk(wide[:, : len(row)], k, starts, ends)


@pytest.mark.parametrize("name", patterns(8))
def test_topk_of_an_adversarial_row(name: str, lowering: str) -> None:
    assert_topk_of_an_adversarial_row(name, 300)


@pytest.mark.parametrize("name", patterns(8))
def test_topk_of_a_row_of_several_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten pieces of 256 keep 100 numbers each, four of these 100 again, two of these, and the last one chooses."""
    from mla_ops.kernels.triton import indexer_topk_rows

    monkeypatch.setattr(indexer_topk_rows, "piece_size", lambda topk, num_columns: 256)
    with dispatch.override("triton"):
        assert_topk_of_an_adversarial_row(name, 100)


def test_topk_of_the_largest_k(lowering: str) -> None:
    """Three pieces of 8,192 keep 4,096 each, two of these 4,096 again."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 3 * 8192 - 5, generator=generator).mul(100).round()
    assert_topk(scores, 4096, [0, 3], [scores.shape[1], 20000])


def test_a_row_is_chosen_alike_in_every_batch(lowering: str) -> None:
    scores = torch.randn(7, 900, device=DEVICE).mul(4).round()
    whole, _ = torch.ops.mla.topk_indices(scores, 100, sorted=True)
    for token in range(7):
        alone, _ = torch.ops.mla.topk_indices(scores[token : token + 1].clone(), 100, sorted=True)
        assert torch.equal(alone[0], whole[token])


def test_columns_become_slots_in_place(lowering: str) -> None:
    scores = torch.tensor([[5.0, 4, 3, 2, 1, 0, 9, 8]] * 4, device=DEVICE)
    table, requests = int32([[3, -1, 2**30], [7, 0, 1]]), int32([0, 1, 2, -1])
    given = {"block_table": table, "req_id_per_token": requests, "block_size": 3}
    indices, counts = torch.ops.mla.topk_indices(scores, 5, **given, sorted=True)
    # columns 6, 7, 0, 1, 2; block 2**30 has slots beyond int32
    assert indices.tolist() == [[-1, -1, 9, 10, 11], [3, 4, 21, 22, 23], [-1] * 5, [-1] * 5]
    assert counts.tolist() == [5] * 4
    indices, _ = torch.ops.mla.topk_indices(scores, 5, **given)
    assert indices.tolist()[:2] == [[9, 10, 11, -1, -1], [21, 22, 23, 3, 4]]


@pytest.mark.parametrize("backend", WRITERS)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_written_bytes_are_those_of_the_format(backend: str, data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    numbers = st.floats(width=32, min_value=-(2.0**66), max_value=2.0**66)
    few = data.draw(st.lists(st.one_of(numbers, st.sampled_from((NAN, INF, -INF, 448.0, 0.0))), min_size=1, max_size=9))
    row = (few * 128)[:128]
    slot = data.draw(st.integers(-2, 3 * block_size + 1))
    cache = torch.full_like(allocate_cache("fp8_index", 3, block_size, device=DEVICE), 3)
    expected = cache.cpu().numpy().tobytes()
    if 0 <= slot < 3 * block_size:
        width, block, offset = cache.shape[1], slot // block_size, slot % block_size
        content = bytearray(expected)
        # the numbers as float32, exactly
        values, (exponent,) = python_groups(torch.tensor(row).tolist(), 128, -22)
        start = block * width + 128 * offset
        content[start : start + 128] = values
        start = block * width + 128 * block_size + 4 * offset
        scale = torch.tensor([2.0**exponent], dtype=torch.float32)
        content[start : start + 4] = scale.view(torch.uint8).numpy().tobytes()
        expected = bytes(content)
    with dispatch.override(backend):
        slots = torch.tensor([slot], device=DEVICE)
        torch.ops.mla.write_index_cache(torch.tensor([row], device=DEVICE), cache, slots, "fp8_index")
    assert cache.cpu().numpy().tobytes() == expected


@pytest.mark.parametrize(("cache_format", "bits"), [("bf16", 0x7FC0), ("fp16", 0x7E00), ("fp32", 0x7FC00000)])
def test_a_converted_nan_has_one_bit_pattern(cache_format: str, bits: int, lowering: str) -> None:
    dtype = torch.float16 if cache_format == "fp32" else torch.float32
    integer = torch.int16 if cache_format == "fp32" else torch.int32
    patterns = [0x7C01, -1, 0x7E55] if cache_format == "fp32" else [0x7F800001, -1, 0x7FC12345]
    k = torch.zeros(3, 128, dtype=integer)
    k[:, 5] = torch.tensor(patterns, dtype=torch.int64).to(integer)
    cache = allocate_cache(cache_format, 1, 4, head_dim=128, device=DEVICE)
    torch.ops.mla.write_index_cache(k.view(dtype).to(DEVICE), cache, torch.arange(3, device=DEVICE), cache_format)
    written = cache[0, :3].view(torch.int32 if cache_format == "fp32" else torch.int16)
    assert written[:, 5].tolist() == [bits] * 3
    assert written.sum().item() == 3 * bits


def test_gathered_keys_and_scales_are_the_written_ones(lowering: str) -> None:
    cache = allocate_cache("fp8_index", 4, 3, device=DEVICE)
    torch.ops.mla.write_index_cache(
        torch.randn(12, 128, device=DEVICE), cache, torch.arange(12).to(DEVICE), "fp8_index"
    )
    raw, pages = cache.cpu(), geometry(cache, "fp8_index").block_size
    table, lens, starts = int32([[2, -1], [1, 9]]), int32([5, 99]), int32([0, 5, 10])
    k, k_scale = torch.ops.mla.gather_index_cache(cache, table, lens, starts, 11, "fp8_index")
    slots = [6, 7, 8, -1, -1, 3, 4, 5, -1, -1, -1]
    for row, slot in enumerate(slots):
        values, scale = torch.zeros(128, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        if slot >= 0:
            block, offset = raw[slot // pages], slot % pages
            values = block[128 * offset : 128 * offset + 128]
            scale = block[128 * pages + 4 * offset : 128 * pages + 4 * offset + 4]
        assert torch.equal(k[row].view(torch.uint8).cpu(), values)
        assert k_scale[row].item() == scale.clone().view(torch.float32).item()


def on_e4m3_cores(dtype: torch.dtype) -> bool:
    """Whether tensor cores that lose bits of e4m3 products are what makes scores."""
    return dtype == torch.float8_e4m3fn and DEVICE == "cuda" and (8, 9) <= torch.cuda.get_device_capability() < (10, 0)


@pytest.mark.parametrize("num_heads", [1, 5, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16, torch.float32])
def test_flat_scores_are_those_of_float64(num_heads: int, dtype: torch.dtype, lowering: str) -> None:
    num_kv, starts, ends = 300, [0, 7, 131, 300, -9], [300, 7, 299, 999, 1]
    q, k = (torch.randn(n, 128, device=DEVICE).to(dtype) for n in (5 * num_heads, num_kv))
    q, weights = q.view(5, num_heads, 128), torch.randn(5, num_heads, device=DEVICE)
    k_scale = torch.rand(num_kv, device=DEVICE) + 0.01
    arguments = q, k, weights, int32(starts), int32(ends)
    scores = torch.ops.mla.indexer_logits(*arguments, k_scale=k_scale, clean=True)
    expected, bound = exact_scores(q, k, weights, k_scale, e4m3_cores=on_e4m3_cores(q.dtype))
    for token, (start, end) in enumerate(zip(starts, ends, strict=True)):
        low, high = max(start, 0), min(end, num_kv)
        assert (scores[token, :low] == -INF).all()
        assert (scores[token, max(high, low) :] == -INF).all()
        error = (scores[token, low:high].double() - expected[token, low:high]).abs()
        assert (error <= bound[token, low:high]).all()
    # without `clean`, columns that a row has not are left alone, and rows have any pitch
    wide = torch.full((5, num_kv + 13), 7.0, device=DEVICE)
    torch.ops.mla.indexer_logits.out(*arguments, k_scale=k_scale, out=wide[:, :num_kv])
    within = scores > -INF
    assert torch.equal(wide[:, :num_kv][within], scores[within])
    assert (wide[:, num_kv:] == 7).all()


def paged(
    cache_format: str, num_heads: int, block_size: int = 16, lengths: tuple[int, ...] = (0, 1, 99, 250, 250, 99999)
) -> tuple[tuple[torch.Tensor, ...], torch.Tensor, torch.Tensor]:
    """Arguments of the paged ops up to the requests, float keys by slot, and their scales by slot."""
    num_blocks = 40
    cache = allocate_cache(cache_format, num_blocks, block_size, head_dim=128, device=DEVICE)
    slots = torch.arange(num_blocks * block_size, device=DEVICE)
    keys = torch.randn(len(slots), 128, device=DEVICE) * torch.rand(len(slots), 1, device=DEVICE)
    torch.ops.mla.write_index_cache(keys, cache, slots, cache_format)
    order = torch.randperm(num_blocks)[:34].view(2, 17).to(torch.int32).to(DEVICE)
    starts = int32([0, 17 * block_size, 34 * block_size])
    lens = int32([17 * block_size] * 2)
    k, k_scale = torch.ops.mla.gather_index_cache(cache, order, lens, starts, 34 * block_size, cache_format)
    dtype = torch.float8_e4m3fn if cache_format == "fp8_index" else cache.dtype
    q = torch.randn(len(lengths), num_heads, 128, device=DEVICE).to(dtype)
    requests = int32([i % 2 for i in range(len(lengths))])
    weights = torch.randn(len(lengths), num_heads, device=DEVICE)
    return (q, cache, weights, int32(lengths), order, requests), k, k_scale


@pytest.mark.parametrize("cache_format", ["fp8_index", "bf16", "fp32"])
def test_paged_scores_are_those_of_float64(cache_format: str, lowering: str) -> None:
    arguments, k, k_scale = paged(cache_format, 32)
    q, _, weights, lengths, table, requests = arguments
    max_length = 260
    scores = torch.ops.mla.paged_indexer_logits(*arguments, max_length, cache_format, clean=True)
    capacity = table.shape[1] * 16
    expected, bound = exact_scores(q, k, weights, k_scale, e4m3_cores=on_e4m3_cores(q.dtype))
    for token, length in enumerate(lengths.clamp(max=min(max_length, capacity)).tolist()):
        columns = slice(int(requests[token]) * capacity, int(requests[token]) * capacity + length)
        error = (scores[token, :length].double() - expected[token, columns]).abs()
        assert (error <= bound[token, columns]).all()
        assert (scores[token, length:] == -INF).all()


@pytest.mark.parametrize("op", [torch.ops.mla.paged_indexer_logits, torch.ops.mla.select_keys], ids=str)
def test_a_block_of_more_keys_than_kernels_count_bytes_of_is_refused(op: Any) -> None:
    """Kernels would read keys in front of the block. Fake tensors: such a cache takes 4 GiB."""
    with FakeTensorMode():
        q, weights = torch.empty(1, 4, 128, dtype=torch.bfloat16), torch.empty(1, 4)
        token, table = torch.empty(1, dtype=torch.int32), torch.empty(1, 1, dtype=torch.int32)
        for block_size in (2**24 - 1, 2**24):
            call = q, torch.empty(1, block_size, 128, dtype=torch.bfloat16), weights, token, table, token, 9, "bf16"
            if block_size < 2**24:
                op(*call)
        message = f"{op}: index_cache must have at most 16777215 keys a block, got 16777216"
        with pytest.raises(ValueError, match=f"^{message.removeprefix('mla.')}$"):
            op(*call)


def test_garbage_in_a_table_scores_minus_infinity(lowering: str) -> None:
    (q, cache, weights, lengths, table, requests), _, _ = paged("fp8_index", 5)
    table[0, :4], table[0, 4] = int32([-1, 2**31 - 1, 40, -(2**31)]), 3
    lengths.fill_(100)
    requests[4:] = int32([-1, 2])
    scores = torch.ops.mla.paged_indexer_logits(
        q, cache, weights, lengths, table, requests, 100, "fp8_index", clean=True
    )
    assert (scores[0::2][:2, :64] == -INF).all()
    assert scores[0::2][:2, 64:].isfinite().all()
    assert (scores[4:] == -INF).all(), "tokens of requests that there are not"


class Scored(NamedTuple):
    """Arguments of the paged ops and of the flat one, and the scores of both."""

    arguments: tuple[torch.Tensor, ...]
    scores: torch.Tensor
    flat: tuple[torch.Tensor, ...]
    k_scale: torch.Tensor
    flat_scores: torch.Tensor


@cache
def scored(lowering: str) -> Scored:
    """The expected result of a selection; called where that lowering is forced."""
    torch.manual_seed(0)
    arguments, k, k_scale = paged("fp8_index", 4)
    q, _, weights, _, table, _ = arguments
    # queries of few values, so that many scores are equal
    q[3:] = (q[3:].float() * 0).to(q.dtype)
    scores = torch.ops.mla.paged_indexer_logits(*arguments, table.shape[1] * 16, "fp8_index")
    flat = q, k, weights, int32([0, 5, 300, 250, 130, 544]), int32([544, 4, 520, 251, 400, 999])
    return Scored(arguments, scores, flat, k_scale, torch.ops.mla.indexer_logits(*flat, k_scale=k_scale))


@pytest.mark.parametrize("topk", [1, 7, 200, 271, 400])
@pytest.mark.parametrize("few", [True, False], ids=["two tokens together", "all together"])
def test_selection_is_scores_then_topk_to_the_bit(
    topk: int, few: bool, lowering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if few:
        monkeypatch.setattr(selection, "call_bytes", lambda num_tokens: 2 * 4 * 544)
    arguments, scores, flat, k_scale, flat_scores = scored(lowering)
    *_, lengths, table, requests = arguments
    given = {"block_table": table, "req_id_per_token": requests, "block_size": 16}
    for translate in (False, True):
        expected = torch.ops.mla.topk_indices(scores, topk, row_ends=lengths, **(given if translate else {}))
        actual = torch.ops.mla.select_keys(*arguments, topk, "fp8_index", translate=translate)
        assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))

    expected = torch.ops.mla.topk_indices(flat_scores, topk, row_starts=flat[3], row_ends=flat[4])
    actual = torch.ops.mla.select_keys.flat(*flat, topk, k_scale=k_scale)
    assert all(torch.equal(left, right) for left, right in zip(actual, expected, strict=True))


@pytest.mark.parametrize("topk", [1, 512, 2048, 4095, 4096])
def test_top_k_keeps_no_more_of_a_row_than_it_says(topk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from mla_ops.kernels.triton import indexer_topk_rows

    made: list[int] = []
    monkeypatch.setattr(indexer_topk_rows, "_select_kernel", defaultdict(lambda: lambda *args, **options: None))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, counted(getattr(torch, name), made))
    for num_columns in (0, 1, 4097, 8192, 8193, 20_000, 2**20 + 1):
        scores, indices, counts = torch.zeros(1, num_columns), torch.zeros(1, topk), torch.zeros(1)
        made.clear()
        indexer_topk_rows.select_rows(scores, topk, None, None, None, None, 0, indices, counts)
        kept = indexer_topk_rows.kept_bytes(topk, num_columns)
        assert sum(made) == kept <= 9 * num_columns + 16 * topk
        for num_tokens in (1, 16, 64, 4096, 100_000):
            together = selection.tokens_together(num_tokens, 4 * num_columns + kept)
            assert together * (4 * num_columns + kept) <= max(32 * 2**20, min(64 * 1024 * num_tokens, 256 * 2**20))


def counted(make: Callable[..., torch.Tensor], made: list[int]) -> Callable[..., torch.Tensor]:
    """`make`, whose bytes are noted."""

    def note(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        made.append(tensor.nbytes)
        return tensor

    return note


def test_queries_and_weights_keep_their_products(lowering: str) -> None:
    q, weights = torch.randn(3, 20, 128, device=DEVICE) * 50, torch.randn(3, 20, device=DEVICE)
    q[0, 0], q[1, 1, 5] = 0, NAN
    q_fp8, q_weights = torch.ops.mla.quantize_index_query(q, weights, 0.125)
    for token, head in ((0, 0), (1, 1), (2, 19), (0, 7)):
        values, (exponent,) = python_groups(q[token, head].tolist(), 128, -22)
        assert bytes(q_fp8[token, head].view(torch.uint8).tolist()) == values
        assert q_weights[token, head].item() == weights[token, head].item() * 0.125 * 2.0**exponent


@pytest.mark.parametrize("num_shards", [1, 3])
def test_merged_shards_are_the_selection_over_the_whole(num_shards: int, lowering: str) -> None:
    topk, width = 60, 150
    scores = torch.randn(4, num_shards * width, device=DEVICE).mul(3).round()
    scores[1, ::3], scores[2] = NAN, 0.0
    ends = int32([num_shards * width, num_shards * width, 170, 13])
    expected, counts = torch.ops.mla.topk_indices(scores, topk, row_ends=ends)
    candidates = []
    for shard in range(num_shards):
        part = scores[:, shard * width : (shard + 1) * width]
        indices, _ = torch.ops.mla.topk_indices(part, topk, row_ends=ends - shard * width)
        values = part.gather(1, indices.clamp(min=0).long())
        candidates.append((values, torch.where(indices < 0, -1, indices + shard * width)))
    best_scores, best = torch.ops.mla.merge_topk(*(torch.cat(part, 1) for part in zip(*candidates, strict=True)), topk)
    assert torch.equal(best, expected)
    for token in range(4):
        count = int(counts[token])
        chosen = scores[token, expected[token, :count].long()]
        assert torch.equal(best_scores[token, :count].nan_to_num(99), chosen.nan_to_num(99))
        assert (best_scores[token, count:] == -INF).all()


def test_a_position_that_stands_twice_is_two_candidates(lowering: str) -> None:
    scores = torch.tensor([[2.0, 1.0, 1.0, 1.0, 3.0, 1.0]], device=DEVICE)
    best_scores, best = torch.ops.mla.merge_topk(scores, int32([[7, 4, 4, 4, 9, 8]]), 4)
    assert best.tolist() == [[4, 4, 7, 9]]
    assert best_scores.tolist() == [[1.0, 1.0, 2.0, 3.0]]
