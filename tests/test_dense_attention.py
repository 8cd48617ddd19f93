"""Dense prefill, varlen, of different head dims: every lowering against float64, with `dense_oracle`'s bounds."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import attention_oracle
import dense_oracle
import pytest
import torch
from prefill_inputs import check, inputs, operand, poison_behind, starts

from mla_ops import dispatch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["reference", "triton", pytest.param("hopper", marks=pytest.mark.gpu)])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """A call that Hopper's kernel refuses is skipped with its reason."""
    if request.param == "triton" and not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    with dispatch.override(request.param):
        yield request.param


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128), (96, 80), (72, 7), (1, 1)], ids=str)
def test_attention_equals_float64(
    lowering: str, device: torch.device, dims: tuple[int, int], dtype: torch.dtype, causal: bool
) -> None:
    """A request longer than a tile, one with more keys than queries, one with fewer, and tokens behind them."""
    lens_q, lens_k = [35, 3, 9, 1], [35, 40, 5, 1]
    check(lowering, inputs(lens_q, lens_k, (2, 2), dims, dtype, device, padding=3), causal)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (6, 2), (5, 1), (17, 17)])
def test_grouped_heads(lowering: str, device: torch.device, num_heads: int, num_kv_heads: int) -> None:
    heads = (num_heads, num_kv_heads)
    check(lowering, inputs([4, 2], [7, 2], heads, (192, 128), torch.bfloat16, device), True)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("lens_q", "lens_k"),
    [
        ([], []),
        ([0], [0]),
        ([0, 5], [4, 5]),
        ([5, 0], [0, 0]),
        ([3, 0, 0, 4], [0, 2, 0, 4]),
        ([1] * 9, [1] * 9),
        ([16, 16, 1], [16, 32, 1]),
    ],
    ids=str,
)
def test_empty_requests(
    lowering: str, device: torch.device, lens_q: list[int], lens_k: list[int], causal: bool
) -> None:
    """Requests without queries, without keys and without either, in a batch with others and with padding."""
    check(lowering, inputs(lens_q, lens_k, (2, 1), (64, 64), torch.bfloat16, device, padding=2), causal)


def test_more_queries_than_keys(lowering: str, device: torch.device) -> None:
    """Bottom-right aligned: the first queries of such a request see nothing."""
    out, lse = check(lowering, inputs([40], [3], (2, 2), (64, 64), torch.bfloat16, device), True)
    assert not out[:37].any()
    assert (lse[:37] == -math.inf).all()
    assert lse[37:].isfinite().all()


@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (3, 3), (18, 30), (36, 40)])
def test_nothing_of_other_requests_is_seen(
    lowering: str, device: torch.device, num_queries: int, num_keys: int
) -> None:
    """NaN in the tokens around a request, in padding and in what no request covers: the same bits come out."""
    lens_q, lens_k = [5, num_queries, 4], [5, num_keys, 4]
    arguments = inputs(lens_q, lens_k, (2, 2), (192, 128), torch.bfloat16, device, padding=9)
    clean = torch.ops.mla.prefill_attention(*arguments, causal=True)
    q, k, v, *rest = arguments
    rows, keys, behind = slice(5, 5 + num_queries), slice(5, 5 + num_keys), sum(lens_q)
    dirty = [torch.full_like(tensor, math.nan) for tensor in (q, k, v)]
    for poisoned, tensor, own in zip(dirty, (q, k, v), (rows, keys, keys), strict=True):
        poisoned[own] = tensor[own]
    out, lse = torch.ops.mla.prefill_attention(*dirty, *rest, causal=True)
    assert torch.equal(out[rows], clean[0][rows])
    assert torch.equal(lse[rows], clean[1][rows])
    assert not out[behind:].any()
    assert (lse[behind:] == -math.inf).all()


@pytest.mark.parametrize("length", [6, 80])
def test_lengths_past_the_tensors_are_cut_off(lowering: str, device: torch.device, length: int) -> None:
    q, k, v, *_, scale = inputs([length], [length], (2, 2), (64, 64), torch.bfloat16, device)
    wild = torch.tensor([0, length // 2, 999], dtype=torch.int32, device=device)
    kept = torch.tensor([0, length // 2, length], dtype=torch.int32, device=device)
    found = torch.ops.mla.prefill_attention(q, k, v, wild, wild, length, length, scale)
    expected = torch.ops.mla.prefill_attention(q, k, v, kept, kept, length, length, scale)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


DESCENDING = ([0, 3, -(2**31)], [0, 5, 2, 4], [3, 5, 5], [-4, 2, 5], [0, 2**31 - 1, -1, 5], [5, 4, 3, 2, 1, 0])


@pytest.mark.parametrize("unit", [1, 12], ids=["few tokens", "many"])
@pytest.mark.parametrize("ends", DESCENDING, ids=str)
@pytest.mark.parametrize("which", ["cu_seqlens_q", "cu_seqlens_k"])
def test_starts_that_do_not_ascend_from_0(
    lowering: str, device: torch.device, which: str, ends: list[int], unit: int
) -> None:
    """The reference refuses them before it writes; kernels of a GPU read and write nothing outside of the tensors."""
    size = 5 * unit
    q, k, v = (torch.full((460, 2, width), math.nan, device=device, dtype=torch.bfloat16) for width in (192, 192, 128))
    within = slice(200, 200 + size)
    for tensor in (q, k, v):
        tensor[within] = 1
    wild = torch.tensor(ends, device=device).mul(unit).clamp(-(2**31), 2**31 - 1).int()
    even = torch.linspace(0, size, len(ends), device=device).int()
    room = torch.full((460, 2, 128), 7.0, device=device, dtype=torch.bfloat16)
    lse = torch.full((460, 2), 7.0, device=device)
    starts = (wild, even) if which == "cu_seqlens_q" else (even, wild)
    arguments = (q[within], k[within], v[within], *starts, size, size, 0.1)
    written = {"out": room[within], "lse": lse[within]}
    with dispatch.override(prefill_attention=lowering):
        if lowering == "reference":
            with pytest.raises(ValueError, match=rf"prefill_attention: {which} must (ascend|begin with 0), got -?\d+"):
                torch.ops.mla.prefill_attention.out(*arguments, **written)
            assert bool((room == 7).all())
        else:
            torch.ops.mla.prefill_attention.out(*arguments, **written)
    for tensor in (room, lse):
        assert bool((tensor[:200] == 7).all())
        assert bool((tensor[within.stop :] == 7).all())
    assert not room.isnan().any()  # values are 1 or not written
    assert not lse.isnan().any()


def test_strided_tensors(lowering: str, device: torch.device) -> None:
    """Keys and values as halves of one projection, odd strides, outputs into slices, nothing beside them touched."""
    both = torch.randn(54, 2, 320, device=device).bfloat16()
    k, v = both.split((192, 128), dim=-1)
    q = torch.randn(54, 5, 203, device=device).bfloat16()[:, 1:3, 5:197]
    lengths = starts([19, 34], device)
    out = torch.full((54, 4, 128), 77.0, dtype=torch.bfloat16, device=device)
    lse = torch.full((54, 7), 77.0, device=device)
    arguments = (q, k, v, lengths, lengths, 34, 34, 192**-0.5)
    torch.ops.mla.prefill_attention.out(*arguments, out=out[:, 1:3], lse=lse[:, 2:4])
    expected = dense_oracle.prefill(
        *arguments[:5], 192**-0.5, causal=True, operand=operand(lowering, torch.bfloat16), tokens=[0, 7, 18, 19, 52, 53]
    )
    attention_oracle.assert_close(out[:, 1:3], lse[:, 2:4], expected)
    assert (out[:, [0, 3]] == 77).all()
    assert (lse[:, [0, 1, 4, 5, 6]] == 77).all()


def test_scores_far_apart_do_not_overflow(lowering: str, device: torch.device) -> None:
    q, k, v, *rest = inputs([18, 40], [18, 40], (2, 2), (64, 64), torch.float32, device)
    check(lowering, (q * 1e4, k * 1e4, v, *rest), True)


@pytest.fixture
def multiply_add(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds a product minus a number once, as Triton's compiler makes one instruction of both."""
    if torch.cuda.is_available() or not dispatch.is_installed("triton"):
        return
    from triton.runtime.interpreter import InterpreterBuilder

    multiply, subtract = InterpreterBuilder.create_fmul, InterpreterBuilder.create_fsub

    def create_fmul(builder: Any, a: Any, b: Any) -> Any:
        product = multiply(builder, a, b)
        product.factors = a.data, b.data
        return product

    def create_fsub(builder: Any, a: Any, b: Any) -> Any:
        difference = subtract(builder, a, b)
        if hasattr(a, "factors"):
            exact = math.prod(factor.astype("float64") for factor in a.factors)
            difference.data[...] = exact - b.data
        return difference

    monkeypatch.setattr(InterpreterBuilder, "create_fmul", create_fmul)
    monkeypatch.setattr(InterpreterBuilder, "create_fsub", create_fsub)


@pytest.mark.parametrize("scale", [2.0**20, 2.0**31, 2.0**40, 2.0**62])
@pytest.mark.parametrize("lens", [[18, 5, 1], [100, 20]], ids=str)
def test_large_scores_act_as_argmax(
    lowering: str, multiply_add: None, device: torch.device, lens: list[int], scale: float
) -> None:
    """Rounding of a score of 2^40 is more than exp2 takes; the same keys come twice, so that ties are met."""
    q, k, v, *rest, _ = inputs(lens, lens, (2, 2), (192, 128), torch.bfloat16, device)
    k[1 : lens[0] : 2] = k[0 : lens[0] - 1 : 2]
    check(lowering, (q, k, v, *rest, scale), True)


def test_a_lowering_takes_any_upper_bound_of_the_lengths(lowering: str, device: torch.device) -> None:
    arguments = inputs([5, 7], [5, 7], (2, 2), (64, 64), torch.bfloat16, device)
    exact = torch.ops.mla.prefill_attention(*arguments)
    loose = torch.ops.mla.prefill_attention(*arguments[:5], 1000, 4096, arguments[-1])
    assert torch.equal(exact[0], loose[0])
    assert torch.equal(exact[1], loose[1])


@pytest.mark.parametrize(("which", "bounds"), [("q", (6, 7)), ("k", (7, 6))])
def test_a_bound_that_is_too_small_is_refused_on_a_cpu(which: str, bounds: tuple[int, int]) -> None:
    """On a GPU the rows past it would hold what the memory held."""
    arguments = inputs([5, 7], [5, 7], (2, 2), (64, 64), torch.bfloat16, torch.device("cpu"))
    message = f"max_seqlen_{which} must be at least 7, the longest of cu_seqlens_{which}, got 6"
    with dispatch.override("reference"), pytest.raises(ValueError, match=f"prefill_attention: {message}"):
        torch.ops.mla.prefill_attention(*arguments[:5], *bounds, arguments[-1])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sums", [1, 8])
def test_sums_of_weights_together_and_apart(
    triton_lowering: None, device: torch.device, monkeypatch: pytest.MonkeyPatch, sums: int, causal: bool
) -> None:
    """Devices differ in how many sums a query has until its end; requests with and without keys, more than a tile."""
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "weight_sums", lambda capability: sums)
    check("triton", inputs([70, 3, 9], [70, 150, 0], (2, 2), (192, 128), torch.bfloat16, device, padding=3), causal)


# Queries and keys, on both sides of two limits: a tile of 16 rows with 1 to 16 heads, and the shortest request that
# has tiles of one head
SHORT_AND_LONG = [
    *((1, 1), (2, 2), (3, 3), (0, 4), (5, 5), (8, 8), (9, 9), (16, 16), (17, 17), (32, 32), (33, 33), (34, 34)),
    *((1, 2), (1, 3), (1, 100), (2, 17), (7, 40), (20, 3), (33, 2), (4, 0), (40, 0), (6, 1), (3, 70), (70, 90)),
]


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "causal", "padding", "longest"),
    [
        ((5, 5), (192, 128), torch.bfloat16, True, 40, 70),
        ((18, 6), (24, 7), torch.float16, True, 40, 17),
        ((6, 2), (40, 24), torch.float32, False, 0, 70),
    ],
    ids=str,
)
def test_requests_of_few_tokens_among_others(
    triton_lowering: None,
    device: torch.device,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    causal: bool,
    padding: int,
    longest: int,
) -> None:
    """Lengths in any order, as many heads as fill no tile, and NaN behind the last request."""
    chosen = [(q, k) for q, k in SHORT_AND_LONG if q <= longest] + [(33, 33)]
    lens_q, lens_k = zip(*random.Random(padding).sample(chosen, len(chosen)), strict=True)
    arguments = inputs(lens_q, lens_k, heads, dims, dtype, device, padding)
    poison_behind(arguments, lens_q, lens_k)
    check("triton", arguments, causal)


@pytest.mark.parametrize(
    "lens",
    [[33] * 5, [32] * 9 + [33], [1] * 70 + [64, 65, 1, 128], [1, 200] * 2],
    ids=["just enough", "one after others", "one by one", "in turn"],
)
def test_every_request_has_its_tiles(
    triton_lowering: None, device: torch.device, monkeypatch: pytest.MonkeyPatch, lens: list[int]
) -> None:
    """Tiles as large as a GPU's, where requests of fewer than SHORTEST queries have none."""
    from mla_ops.kernels.triton import dense_attention, dense_attention_tiles

    large = dense_attention_tiles.Tile(64, 32, 4, 1)
    monkeypatch.setattr(dense_attention, "prefill_tile", lambda *_, **__: large)
    for padding in (0, 1, 65):
        check("triton", inputs(lens, lens, (1, 1), (16, 16), torch.bfloat16, device, padding), True)


def test_the_bits_of_a_request_depend_on_it_alone(triton_lowering: None, device: torch.device) -> None:
    """The request stands by itself and among many others, with other bounds of the lengths."""
    for length, keys in ((1, 1), (16, 16), (33, 33), (3, 70)):
        arguments = inputs([length], [keys], (3, 3), (64, 64), torch.bfloat16, device)
        alone = torch.ops.mla.prefill_attention(*arguments)
        for before, behind in (([], [1]), ([1] * 21, [50]), ([30, 0, 5], [1] * 9)):
            lens_q, lens_k = [*before, length, *behind], [*before, keys, *behind]
            first = sum(before)
            others = list(inputs(lens_q, lens_k, (3, 3), (64, 64), torch.bfloat16, device))
            for tensor, own, size in zip(others[:3], arguments[:3], (length, keys, keys), strict=True):
                tensor[first : first + size] = own
            found = torch.ops.mla.prefill_attention(*others)
            for one, other in zip(alone, found, strict=True):
                assert torch.equal(one, other[first : first + length])


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts what the interpreter does")
@pytest.mark.parametrize(
    ("lens", "num_heads", "products"),
    [
        # one tile of 16 rows and 32 columns for 16 requests' heads of one token, 8 of 2 tokens, and so on
        ([1] * 20, 16, 20),
        ([2] * 10, 16, 10 * 2),
        ([8] * 5, 16, 5 * 8),
        ([16] * 3, 16, 3 * 16),
        ([32] * 2, 4, 2 * 4 * 2),
        ([1] * 20, 17, 20 * 2),
    ],
    ids=str,
)
def test_products_of_requests_of_few_tokens(
    triton_lowering: None, monkeypatch: pytest.MonkeyPatch, lens: list[int], num_heads: int, products: int
) -> None:
    """A launch computes so many tiles of scores, by the interpreter's count."""
    from triton.runtime.interpreter import InterpreterBuilder

    shapes: list[tuple[int, ...]] = []
    create = InterpreterBuilder.create_dot

    def count(self: InterpreterBuilder, a: Any, b: Any, *rest: Any) -> Any:
        shapes.append((*a.data.shape, b.data.shape[1]))
        return create(self, a, b, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", count)
    # loose bounds: the kernel of the other requests runs, too
    q, k, v, *starts, _, _, scale = inputs(lens, lens, (num_heads, num_heads), (64, 16), torch.bfloat16, "cpu", 40)
    torch.ops.mla.prefill_attention(q, k, v, *starts, 1000, 1000, scale)
    assert shapes.count((16, 64, 32)) == products
    assert shapes.count((16, 32, 16)) == products
    assert len(shapes) == 2 * products


def test_programs_of_requests_of_few_tokens() -> None:
    """Enough to fill the GPU if all requests are such, no more than there are heads, at least one."""
    from mla_ops.kernels.triton.dense_attention_tiles import query_tiles, shares_of_a_request

    assert [shares_of_a_request(count, 128, 132) for count in (1, 64, 2048, 10**6)] == [128, 66, 3, 1]
    # 2,048 of one token: 79 tiles of 128 queries that find nothing to do, not 2,065
    assert query_tiles(2048, 2048, 128) == 79
    assert query_tiles(8192, 1, 128) == 66
    assert query_tiles(0, 0, 128) == 1


def test_tile_table() -> None:
    """Every device and head dim gets a tile whose Q, K and V fit its shared memory."""
    from mla_ops.kernels.triton.dense_attention_tiles import prefill_tile, split_dim, value_block

    limits = {(8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99, (12, 1): 99}
    for capability, limit in limits.items():
        for head_dim in range(1, 257):
            for head_dim_v in (1, 64, 128, 129, 256):
                chosen = prefill_tile(capability, head_dim, head_dim_v, exact=False)
                width = sum(split_dim(head_dim))
                # the older instructions read their operands into registers, and free a buffer by it
                stages = chosen.num_stages if capability[0] in (9, 10) else chosen.num_stages - 1
                tiles = stages * chosen.block_n * (width + value_block(head_dim_v))
                assert (chosen.block_m * width + tiles) * 2 <= limit * 1024
                assert width >= head_dim
                assert value_block(head_dim_v) >= head_dim_v


@pytest.mark.parametrize(
    ("num_heads", "num_kv", "expected"), [(16, 8192, 2), (128, 4096, 4), (16, 131072, 1), (3, 10, 2), (128, 0, 128)]
)
def test_heads_that_run_together_fit_the_cache(num_heads: int, num_kv: int, expected: int) -> None:
    from mla_ops.kernels.triton.dense_attention_tiles import heads_together

    assert heads_together(num_heads, num_kv * (192 + 128) * 2) == expected
