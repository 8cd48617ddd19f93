"""Dense MLA over a paged cache: every lowering against float64, with bounds derived in `attention_oracle`."""

from __future__ import annotations

import math

import attention_oracle
import pytest
import torch
from attention_inputs import (
    INT_MAX,
    INT_MIN,
    QUERIES,
    SCALE,
    filled_cache,
    key_width,
    operand,
    poison_unused,
    queries,
)
from paged_inputs import check, int32

from mla_ops.formats import FORMATS

BLOCK_SIZE = 16


@pytest.mark.parametrize("num_heads", [1, 17, 65])
@pytest.mark.parametrize(("cache_format", "dtype"), QUERIES)
def test_attention_equals_float64(
    lowering: str, device: torch.device, cache_format: str, dtype: torch.dtype, num_heads: int
) -> None:
    """A decode of each of two requests, and three tokens of a speculative decode of a third."""
    exact = operand("triton", cache_format, dtype) is None
    if exact and lowering == "triton" and device.type == "cpu" and num_heads != 17:
        pytest.skip("exact tiles have 16 heads: 17 make a full one and one of one head; on a GPU all run")
    cache = filled_cache(cache_format, 9, BLOCK_SIZE, device)
    table = torch.randperm(9, device=device).to(torch.int32).view(3, 3)
    requests, lens = int32([0, 1, 2, 2, 2], device), int32([33, 1, 40, 41, 42], device)
    q = queries(5, num_heads, dtype, device, key_width(cache_format))
    check(lowering, q, cache, table, requests, lens, cache_format)


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_padding_and_garbage(lowering: str, device: torch.device, cache_format: str) -> None:
    """Requests that there are not, lengths of any size, blocks that there are not: nothing of it is read."""
    cache = filled_cache(cache_format, 7, BLOCK_SIZE, device)
    table = int32([[3, 6, 0], [INT_MIN, 2, 7], [INT_MAX, -1, 1]], device)
    requests = int32([0, 1, 2, 3, -1, INT_MIN, INT_MAX, 0, 0, 1], device)
    lens = int32([48, 40, 40, 5, 5, 5, 5, INT_MAX, INT_MIN, 0], device)
    out, lse = check(lowering, queries(10, 3, torch.bfloat16, device), cache, table, requests, lens, cache_format)
    for empty in (3, 4, 5, 6, 8, 9):
        assert not out[empty].any()
        assert (lse[empty] == -math.inf).all()


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16", "fp32"])
def test_nothing_unused_is_seen(lowering: str, device: torch.device, cache_format: str) -> None:
    """NaN in every slot past a request's length, and in the blocks of no request: the same bits come out."""
    cache = filled_cache(cache_format, 8, 8, device)
    table, requests = int32([[5, 0, 2], [7, 3, 6]], device), int32([0, 1], device)
    lens = int32([11, 17], device)
    q = queries(2, 5, FORMATS[cache_format].value_dtype, device, key_width(cache_format))
    arguments = (table, requests, lens, SCALE, cache_format)
    clean = torch.ops.mla.paged_attention(q, cache, *arguments)
    used = [int(table[r, p // 8]) * 8 + p % 8 for r in (0, 1) for p in range(int(lens[r]))]
    dirty = poison_unused(cache, torch.tensor(used, device=device), cache_format)
    found = torch.ops.mla.paged_attention(q, dirty, *arguments)
    assert torch.equal(clean[0], found[0])
    assert torch.equal(clean[1], found[1])


@pytest.mark.parametrize(("num_tokens", "num_requests", "max_blocks", "num_blocks"), [
    (0, 1, 2, 2),
    (2, 0, 2, 2),
    (2, 1, 0, 2),
    (2, 1, 2, 0),
])  # fmt: skip
def test_nothing_to_do(
    lowering: str, device: torch.device, num_tokens: int, num_requests: int, max_blocks: int, num_blocks: int
) -> None:
    cache = filled_cache("fp8_ds_mla", num_blocks, 4, device)
    table = torch.zeros(num_requests, max_blocks, dtype=torch.int32, device=device)
    tokens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    q = queries(num_tokens, 2, torch.bfloat16, device)
    out, lse = torch.ops.mla.paged_attention(q, cache, table, tokens, tokens + 3, SCALE, "fp8_ds_mla")
    assert not out.any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("num_splits", [1, 2, 5, 64])
def test_splits_merge_exactly(
    device: torch.device, triton_lowering: None, num_splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths from 0 to the capacity, in tiles that the splits do not divide: each result is within the one bound."""
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "paged_splits", lambda *_: num_splits)
    lens = int32([0, 1, 31, 33, 150, 160], device)
    cache, table = filled_cache("bf16", 10, BLOCK_SIZE, device), torch.arange(10, device=device).int().view(1, 10)
    q = queries(6, 3, torch.bfloat16, device)
    # with many splits the interpreter is slow, and most of them are empty anyhow
    rows = slice(0, 6) if num_splits < 10 else slice(3, 5)
    check("triton", q[rows], cache, table, torch.zeros_like(lens[rows]), lens[rows], "bf16")


@pytest.fixture
def small_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of one tile, as a small batch has them, and no slack."""
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(dense_attention, "SLACK_KEYS", 0)


@pytest.mark.parametrize(
    ("owners", "lens", "num_workers"),
    [
        *(([0] * 6, [0, 1, 31, 33, 150, 160], workers) for workers in (1, 5)),
        *(([0, 0, 1, 1, 0, 1], [160, 3, 3, 0, 0, 70], workers) for workers in (2, 5, 32)),
        *(([0, -1, 7, 0, INT_MIN, 1], [3, 160, 160, INT_MAX, INT_MAX, INT_MIN], workers) for workers in (2, 32)),
        *(([0, 0], [0, 0], workers) for workers in (1, 5)),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else f"{value} workers",
)
def test_even_shares_merge_exactly(
    device: torch.device,
    triton_lowering: None,
    small_shares: None,
    owners: list[int],
    lens: list[int],
    num_workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lengths of any size, holes in the table; walks that several workers cut, workers that have nothing."""
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "even_workers", lambda *_: num_workers)
    monkeypatch.setattr(dense_attention, "SLACK_KEYS", -64 * 160)  # whatever the lengths are
    cache, table = filled_cache("bf16", 10, BLOCK_SIZE, device), torch.arange(20, device=device).int().view(2, 10) % 10
    table[1, 1], table[1, 3] = 77, -1
    # more heads than a tile has, so that two blocks of heads share each walk
    q = queries(len(lens), 18, torch.bfloat16, device)
    requests = int32(owners, device)
    check("triton", q, cache, table, requests, int32(lens, device), "bf16", tokens=None if len(lens) < 6 else [0, 3, 5])


@pytest.mark.parametrize(("num_heads", "num_splits"), [(2, 2), (5, 1)])
def test_each_row_is_computed_by_one_of_two_launches(
    device: torch.device,
    triton_lowering: None,
    small_shares: None,
    num_heads: int,
    num_splits: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any lengths: all rows shared evenly and none by shape, or the other way round; either is right."""
    from mla_ops.kernels.triton import dense_attention

    even: list[tuple[torch.Tensor, torch.Tensor, bool]] = []
    original = dense_attention._share_evenly

    def share_apart(*arguments: object) -> torch.Tensor:
        out, lse = (torch.full_like(tensor, math.nan) for tensor in arguments[-2:])
        uneven = original(*arguments[:-2], out, lse)
        even.append((out, lse, bool(uneven)))
        return uneven

    monkeypatch.setattr(dense_attention, "_share_evenly", share_apart)
    monkeypatch.setattr(dense_attention, "even_workers", lambda *_: 4 * num_splits)
    monkeypatch.setattr(dense_attention, "paged_splits", lambda *_: num_splits)
    # five heads of two tokens fit into a tile of rows, two blocks of it are of one token each
    monkeypatch.setattr(dense_attention, "tokens_together", lambda *_: 2 if num_heads == 5 else 1)
    cache, table = filled_cache("bf16", 24, BLOCK_SIZE, device), torch.arange(24, device=device).int().view(2, 12)
    generator = torch.Generator().manual_seed(num_heads + num_splits)
    seen = set()
    mixtures = [[192] * 5, [0] * 5, [192, 0, 0, 0, 0], [0, 0, 0, 5, 192], [1] * 5, [33, 64, 40, 61, 50]]
    mixtures.append(torch.randint(0, 193, (5,), generator=generator).tolist())
    mixtures += [(torch.rand(5, generator=generator) ** 8 * 192).int().tolist() for _ in range(2)]
    for lens in mixtures:
        q, requests = queries(5, num_heads, torch.bfloat16, device), int32([0, 0, 1, 0, 1], device)
        out = torch.full((5, num_heads, 512), math.nan, dtype=q.dtype, device=device)
        lse = torch.full((5, num_heads), math.nan, device=device)
        arguments = (q, cache, table, requests, int32(lens, device), SCALE, "bf16")
        torch.ops.mla.paged_attention.out(*arguments, out=out, lse=lse)
        other_out, other_lse, uneven = even.pop()
        seen.add(uneven)
        if uneven:
            out, lse, other_out, other_lse = other_out, other_lse, out, lse
        assert other_out.isnan().all()
        assert other_lse.isnan().all()
        everything = torch.arange(192, dtype=torch.int32, device=device).expand(5, -1)
        expected = attention_oracle.attention(
            q,
            cache,
            everything,
            SCALE,
            topk_length=int32(lens, device),
            block_table=table,
            req_id_per_token=requests,
            operand=operand("triton", "bf16", q.dtype),
            cache_format="bf16",
        )
        attention_oracle.assert_close(out, lse, expected)
    assert not even
    assert seen == {False, True}


@pytest.mark.parametrize("num_workers", [3, 7])
def test_shares_are_even(
    device: torch.device,
    triton_lowering: None,
    small_shares: None,
    num_workers: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each worker has as many tiles of a long row beside short ones as the others, give or take one."""
    from mla_ops.kernels.triton import dense_attention

    cuts: list[torch.Tensor] = []
    launch = dense_attention._merge_cuts_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **kwargs: (cuts.append(args[2]), launch[grid](*args, **kwargs))

    monkeypatch.setattr(dense_attention, "even_workers", lambda *_: num_workers)
    monkeypatch.setattr(dense_attention, "paged_splits", lambda *_: 1)  # else a GPU's many splits make the lengths even
    monkeypatch.setattr(dense_attention, "_merge_cuts_kernel", Recorded())
    lens = [20, 1200, 20, 20]
    cache, table = filled_cache("bf16", 80, BLOCK_SIZE, device), torch.arange(80, device=device).int().repeat(4, 1)
    q = queries(4, 2, torch.bfloat16, device)
    check("triton", q, cache, table, int32(range(4), device), int32(lens, device), "bf16")
    units = [-(-length // 32) + 2 for length in lens]
    share = -(-sum(units) // num_workers)
    first = [(sum(units[:row]) + 2) // share for row in range(4)]
    last = [(sum(units[: row + 1]) - 1) // share for row in range(4)]
    assert cuts[0].tolist() == [[begin, end - begin + 1] for begin, end in zip(first, last, strict=True)]
    assert cuts[0][1, 1] >= num_workers - 1


def test_a_context_in_parts_merges_to_the_whole(lowering: str, device: torch.device) -> None:
    """Context parallelism: three ranks hold every third block of a request; their results merge to the whole."""
    cache = filled_cache("bf16", 6, BLOCK_SIZE, device)
    table, requests = torch.arange(6, device=device).int().view(1, 6), int32([0, 0], device)
    q = queries(2, 5, torch.bfloat16, device)
    total = int32([70, 71], device)
    parts = []
    for rank in range(3):
        own = table[:, rank::3].contiguous()
        # tokens that this rank holds of the first `total`
        lens = sum((total - (rank + 3 * i) * BLOCK_SIZE).clamp(0, BLOCK_SIZE) for i in range(2)).int()
        parts.append(torch.ops.mla.paged_attention(q, cache, own, requests, lens, SCALE, "bf16"))
    out, lse = torch.ops.mla.merge_attention_states.stacked(
        torch.stack([part[0] for part in parts]), torch.stack([part[1] for part in parts])
    )
    everything = torch.arange(71, dtype=torch.int32, device=device).expand(2, -1)
    expected = attention_oracle.attention(
        q,
        cache,
        everything,
        SCALE,
        topk_length=total,
        block_table=table,
        req_id_per_token=requests,
        operand=operand(lowering, "bf16", q.dtype),
    )
    # each part was rounded to bfloat16 once, and so is the merged row; the weights of the merge are good to float32
    largest = max(float(part[0].float().abs().max()) for part in parts)
    expected.out_tolerance += 2 * 2.0**-8 * largest
    expected.lse_tolerance += 2.0**-20 * (1 + expected.lse.abs())
    attention_oracle.assert_close(out, lse, expected)


def test_pool_slices_and_strided_outputs(lowering: str, device: torch.device) -> None:
    """Blocks that are slices of a pool, queries of a wider buffer, outputs into slices of buffers."""
    pool = filled_cache("fp8_ds_mla", 5, 48, device)
    cache = pool[:, 16:32]
    q = queries(4, 9, torch.bfloat16, device, 640)[1:, 2:7, 32:608]
    table, requests = int32([[4, 1, -1, 9], [0, 3, -1, 9]], device)[:, :2], int32([0, 1, 1], device)
    lens = int32([30, 16, 3], device)
    out = torch.full((3, 7, 512), 77.0, dtype=torch.bfloat16, device=device)
    lse = torch.full((3, 9), 77.0, device=device)
    torch.ops.mla.paged_attention.out(
        q, cache, table, requests, lens, SCALE, "fp8_ds_mla", out=out[:, 1:6], lse=lse[:, 2:7]
    )
    expected = torch.ops.mla.paged_attention(q, cache, table, requests, lens, SCALE, "fp8_ds_mla")
    assert torch.equal(out[:, 1:6], expected[0])
    assert torch.equal(lse[:, 2:7], expected[1])
    assert (out[:, [0, 6]] == 77).all()
    assert (lse[:, [0, 1, 7, 8]] == 77).all()


def test_split_table() -> None:
    from mla_ops.kernels.triton.dense_attention_tiles import paged_splits

    assert paged_splits(0, 1, 8192, 132, 16) == 1
    assert paged_splits(1, 1, 8192, 132, 16) == 64
    assert paged_splits(1, 1, 1024, 132, 16) == 8
    assert paged_splits(128, 1, 8192, 132, 16) == 2
    assert paged_splits(32, 1, 8192, 132, 32) == 8
    assert paged_splits(4, 2, 8192, 132, 64) == 16
    assert paged_splits(128, 2, 8192, 132, 64) == 1
    assert paged_splits(1, 1, 0, 132, 16) == 1


def test_where_lengths_are_looked_at() -> None:
    from mla_ops.kernels.triton.dense_attention_tiles import even_workers, paged_splits

    def workers(num_tokens: int, head_blocks: int, capacity: int, block_h: int) -> int:
        splits = paged_splits(num_tokens, head_blocks, capacity, 132, block_h)
        return even_workers(num_tokens, head_blocks, capacity, splits, 132, block_h)

    assert workers(128, 1, 8192, 16) == 264
    assert workers(32, 1, 8192, 16) == 0  # eight programs a token, of 1,024 keys
    assert workers(32, 1, 8256, 16) == 264
    assert workers(32, 2, 8192, 64) == 66
    assert workers(4, 2, 8192, 64) == 0
    assert workers(128, 2, 8192, 64) == 66
    assert workers(1, 1, 131072, 16) == 0  # one row is even
    assert workers(2, 1, 131072, 16) == 264
    assert workers(256, 1, 1024, 16) == 0
    assert workers(1024, 1, 8192, 16) == 264
    assert workers(1025, 1, 8192, 16) == 0  # many rows are about even, and many lengths take long to look at
    assert workers(2, 200, 131072, 64) == 1


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("num_heads", "owners", "block_size"),
    [
        (5, [0, 0, 0, 1, 1, 1, 2], 16),
        (5, [0, 1, 0, 2, 0, -1, 0, 7], 24),
        (3, [2, 2, 2, 2, 2, 2, 2, 2, 1, 1], 16),
        (16, [1, 1, 1, 1, 0, 0], 24),
        (9, [1, 1, 0, 0, 0, 2, 2, 2, 2], 24),
    ],
    ids=["three a request", "mixed", "eight", "sixteen heads", "straddling"],
)
def test_tokens_of_one_request_share_a_walk(
    device: torch.device,
    triton_lowering: None,
    monkeypatch: pytest.MonkeyPatch,
    num_heads: int,
    owners: list[int],
    num_splits: int,
    block_size: int,
) -> None:
    """Whoever the neighbours are; with lengths that differ, nothing to see, holes in the table."""
    from mla_ops.kernels.triton import dense_attention

    packed: list[int] = []
    original = dense_attention._packed_kernel

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **constants: (packed.append(args[12]), original[grid](*args, **constants))

    monkeypatch.setattr(dense_attention, "_packed_kernel", Recorded())
    monkeypatch.setattr(dense_attention, "tokens_together", lambda *_: min(4, 32 // num_heads))
    monkeypatch.setattr(dense_attention, "paged_splits", lambda *_: num_splits)
    if num_splits == 3:  # by shape, and shared evenly whatever the lengths are
        monkeypatch.setattr(dense_attention, "even_workers", lambda *_: 3)
        monkeypatch.setattr(dense_attention, "MIN_SPLIT_KEYS", 16)
        monkeypatch.setattr(dense_attention, "SLACK_KEYS", -64 * 160)
    cache = filled_cache("bf16", 12, block_size, device)
    table = torch.randperm(12, device=device).int().view(3, 4)
    table[1, 1], table[0, 3] = 77, -1
    generator = torch.Generator().manual_seed(len(owners))
    lens = torch.randint(0, 4 * block_size + 3, (len(owners),), generator=generator).int().to(device)
    lens[-1] = 0
    q = queries(len(owners), num_heads, torch.bfloat16, device)
    check("triton", q, cache, table, int32(owners, device), lens, "bf16")
    assert packed == [min(4, 32 // num_heads)]


def test_packed_results_equal_those_of_single_tokens(
    device: torch.device, triton_lowering: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over every format; exact arithmetic and rows that are not flat take one token at a time."""
    from mla_ops.kernels.triton import dense_attention

    table, owners = int32([[2, 0, 4], [3, 1, 5]], device), int32([0, 0, 0, 0, 1, 1, 1, 1], device)
    lens = int32([40, 41, 42, 43, 3, 4, 5, 6], device)
    for cache_format, dtype in (("fp8_ds_mla", torch.bfloat16), ("fp8_ds_mla_v4", torch.bfloat16), ("fp32", None)):
        cache = filled_cache(cache_format, 6, BLOCK_SIZE, device)
        q = queries(8, 4, dtype or torch.float32, device, key_width(cache_format))
        arguments = (q, cache, table, owners, lens, SCALE, cache_format)
        out, lse = torch.ops.mla.paged_attention(*arguments)
        with monkeypatch.context() as patch:
            patch.setattr(dense_attention, "tokens_together", lambda *_: 1)
            alone = torch.ops.mla.paged_attention(*arguments)
        torch.testing.assert_close(out, alone[0], rtol=2**-7, atol=2**-9)
        torch.testing.assert_close(lse, alone[1], rtol=1e-5, atol=1e-5)
    strided = torch.full((8, 5, 512), math.nan, device=device)[:, :4]
    torch.ops.mla.paged_attention.out(*arguments, out=strided, lse=lse)
    torch.testing.assert_close(strided, out, rtol=1e-5, atol=1e-5)


def test_how_many_tokens_share_a_walk() -> None:
    from mla_ops.kernels.triton.dense_attention_tiles import tokens_together

    assert tokens_together(32, 32, 16) == 1
    assert tokens_together(32, 0, 16) == 1
    assert tokens_together(128, 32, 16) == 2
    assert tokens_together(128, 32, 8) == 4
    assert tokens_together(96, 32, 10) == 3
    assert tokens_together(100, 1, 4) == 8
    assert tokens_together(128, 32, 32) == 1
    assert tokens_together(128, 32, 128) == 1
