"""Dense prefill, varlen, of different head dims: every lowering against float64, with `dense_oracle`'s bounds."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import attention_oracle
import dense_oracle
import pytest
import torch

import mla_ops
from mla_ops import dispatch

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture(params=["reference", "triton", pytest.param("hopper", marks=pytest.mark.gpu)])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    """A call that Hopper's kernel refuses is skipped with its reason."""
    if request.param == "triton" and not dispatch.is_installed("triton"):
        pytest.skip("Triton is not installed")
    with dispatch.override(request.param):
        yield request.param


def starts(lens: list[int], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *lens], device=device).cumsum(0).to(torch.int32)


def inputs(
    lens_q: list[int],
    lens_k: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    padding: int = 0,
) -> tuple[Any, ...]:
    """Arguments up to the scale, with `padding` rows of each tensor behind the last request."""

    def normal(rows: int, num_heads: int, dim: int) -> torch.Tensor:
        return torch.randn(rows + padding, num_heads, dim, device=device).to(dtype)

    q, k = normal(sum(lens_q), heads[0], dims[0]), normal(sum(lens_k), heads[1], dims[0])
    v = normal(sum(lens_k), heads[1], dims[1])
    lengths = starts(lens_q, device), starts(lens_k, device)
    return q, k, v, *lengths, max([0, *lens_q]), max([0, *lens_k]), dims[0] ** -0.5


def operand(lowering: str, dtype: torch.dtype) -> torch.dtype | None:
    """What probabilities are rounded to: nothing in the reference and in float32."""
    return None if lowering == "reference" or dtype == torch.float32 else dtype


def check(lowering: str, arguments: tuple[Any, ...], causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.ops.mla.prefill_attention(*arguments, causal=causal)
    q, k, v, starts_q, starts_k, _, _, scale = arguments
    rounded = operand(lowering, q.dtype)
    expected = dense_oracle.prefill(q, k, v, starts_q, starts_k, scale, causal=causal, operand=rounded)
    attention_oracle.assert_close(out, lse, expected)
    return out, lse


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
@pytest.mark.parametrize("lens", [[18, 5, 1], [300, 20]], ids=str)
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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("sums", [1, 8])
def test_sums_of_weights_together_and_apart(
    triton_lowering: None, device: torch.device, monkeypatch: pytest.MonkeyPatch, sums: int, causal: bool
) -> None:
    """Devices differ in how many sums a query has until its end; requests with and without keys, more than a tile."""
    from mla_ops.kernels.triton import dense_attention

    monkeypatch.setattr(dense_attention, "weight_sums", lambda capability: sums)
    check("triton", inputs([70, 3, 9], [70, 150, 0], (2, 2), (192, 128), torch.bfloat16, device, padding=3), causal)


# queries and keys, on both sides of what a tile of 16 rows holds of 1 to 16 heads, and of a request's least for tiles
# of one head
SHORT_AND_LONG = [
    *((1, 1), (2, 2), (3, 3), (0, 4), (5, 5), (8, 8), (9, 9), (16, 16), (17, 17), (32, 32), (33, 33), (34, 34)),
    *((1, 2), (1, 3), (1, 100), (2, 17), (7, 40), (20, 3), (33, 2), (4, 0), (40, 0), (6, 1), (3, 70), (70, 90)),
]


@pytest.mark.parametrize(
    ("heads", "dims", "dtype", "causal", "padding"),
    [
        ((5, 5), (192, 128), torch.bfloat16, True, 0),
        ((5, 5), (192, 128), torch.bfloat16, False, 40),
        ((18, 6), (24, 7), torch.float16, True, 40),
        ((6, 2), (40, 24), torch.float32, False, 0),
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
) -> None:
    """Lengths in any order, as many heads as fill no tile, and NaN behind the last request."""
    lens_q, lens_k = zip(*random.Random(padding).sample(SHORT_AND_LONG, len(SHORT_AND_LONG)), strict=True)
    arguments = inputs(lens_q, lens_k, heads, dims, dtype, device, padding)
    for tensor, lens in zip(arguments, (lens_q, lens_k, lens_k), strict=False):
        tensor[sum(lens) :] = math.nan
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
    from mla_ops.kernels.triton import dense_attention

    large = dense_attention.Tile(64, 32, 4, 1)
    monkeypatch.setattr(dense_attention, "prefill_tile", lambda *_, **__: large)
    for padding in (0, 1, 65):
        check("triton", inputs(lens, lens, (1, 1), (16, 16), torch.bfloat16, device, padding), True)


def test_the_bits_of_a_request_depend_on_it_alone(triton_lowering: None, device: torch.device) -> None:
    """By itself, and among many others, with other bounds of the lengths."""
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
    """How many tiles of scores a launch computes, by the interpreter's count."""
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
    from mla_ops.kernels.triton.dense_attention import query_tiles, shares_of_a_request

    assert [shares_of_a_request(count, 128, 132) for count in (1, 64, 2048, 10**6)] == [128, 66, 3, 1]
    # 2,048 of one token: 79 tiles of 128 queries that find nothing to do, not 2,065
    assert query_tiles(2048, 2048, 128) == 79
    assert query_tiles(8192, 1, 128) == 66
    assert query_tiles(0, 0, 128) == 1


def test_tile_table() -> None:
    """Every device and head dim gets a tile whose Q, K and V fit its shared memory."""
    from mla_ops.kernels.triton.dense_attention import prefill_tile, split_dim, value_block

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
    from mla_ops.kernels.triton.dense_attention import heads_together

    assert heads_together(num_heads, num_kv * (192 + 128) * 2) == expected


BACKENDS = ["", "triton", "hopper", "torch_sdpa"]


def skip_unless_it_runs(backend: str, arguments: tuple[Any, ...]) -> None:
    reason = (
        dispatch.unsupported_reason(backend, mla_ops.registry.describe("prefill_attention", *arguments))
        if backend
        else None
    )
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS, ids=["as dispatched", *BACKENDS[1:]])
def test_attention_at_real_sizes(backend: str, dims: tuple[int, int], causal: bool) -> None:
    device = torch.device("cuda")
    lens_q, lens_k = [1000, 1, 0, 2049, 130], [1000, 3000, 7, 2049, 4000]
    arguments = inputs(lens_q, lens_k, (16, 16), dims, torch.bfloat16, device, padding=5)
    skip_unless_it_runs(backend, arguments)
    chosen = {"prefill_attention": backend} if backend else {}
    with dispatch.override(**chosen):
        out, lse = torch.ops.mla.prefill_attention(*arguments, causal=causal)
    q, k, v, starts_q, starts_k, _, _, scale = arguments
    tokens = [0, 1, 127, 128, 999, 1000, 1001, 2047, 3049, 3050, 3179, 3180, 3184]
    expected = dense_oracle.prefill(
        q, k, v, starts_q, starts_k, scale, causal=causal, operand=torch.bfloat16, tokens=tokens
    )
    attention_oracle.assert_close(out, lse, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", [(192, 128), (256, 256), (128, 128), (64, 64)], ids=str)
@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_lengths_beside_a_tile(backend: str, dims: tuple[int, int], dtype: torch.dtype, causal: bool) -> None:
    """Requests that end before, at and behind the end of a tile of 64, 80 or 128, and NaN behind the last of them."""
    lens_q = [1, 0, 63, 64, 65, 127, 128, 129, 300, 2]
    lens_k = [1, 9, 79, 64, 81, 127, 160, 129, 5, 513]
    arguments = inputs(lens_q, lens_k, (6, 2), dims, dtype, torch.device("cuda"), padding=140)
    skip_unless_it_runs(backend, arguments)
    for tensor, lens in zip(arguments, (lens_q, lens_k, lens_k), strict=False):
        tensor[sum(lens) :] = math.nan
    with dispatch.override(prefill_attention=backend):
        check(backend, arguments, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128), (96, 80)], ids=str)
@pytest.mark.parametrize(
    ("lens_q", "lens_k", "causal"),
    [
        ([300], None, True),
        ([200, 100], None, True),
        ([0, 5], [4, 5], False),
        ([5, 0, 9], [0, 0, 70], True),
        ([], [], True),
    ],
    ids=["one request with itself", "two with themselves", "no queries", "no keys", "no requests"],
)
def test_torch_kernels_hold_the_contract(
    lens_q: list[int], lens_k: list[int] | None, causal: bool, dims: tuple[int, int], num_kv_heads: int
) -> None:
    """Padding behind the requests, views with odd strides, empty requests, into fresh tensors and into buffers."""
    heads, device = (4, num_kv_heads), torch.device("cuda")
    arguments = inputs(lens_q, lens_q if lens_k is None else lens_k, heads, dims, torch.bfloat16, device, padding=9)
    q, k, v, starts_q, starts_k, *rest = arguments
    if lens_k is None:
        starts_k = starts_q
    v = torch.nn.functional.pad(v, (3, 0))[..., 3:]
    arguments = (q, k, v, starts_q, starts_k, *rest)
    with dispatch.override("torch_sdpa"):
        out, lse = check("torch_sdpa", arguments, causal)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        buffers = torch.full_like(out, math.nan), torch.full_like(lse, math.nan)
        torch.ops.mla.prefill_attention.out(*arguments, causal=causal, out=buffers[0], lse=buffers[1])
    assert torch.equal(buffers[0], out)
    assert torch.equal(buffers[1], lse)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [8, 32], ids=["fewer tiles than SMs", "more"])
@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_a_replay_follows_the_lengths_of_the_step(backend: str, num_heads: int) -> None:
    """Captured with one batch, replayed with other lengths, fewer live tokens and an empty request."""
    device = torch.device("cuda")
    q, k, v, *_, scale = inputs([512], [1024], (num_heads, num_heads), (192, 128), torch.bfloat16, device)
    starts_q, starts_k = starts([256, 256, 0], device), starts([512, 512, 0], device)
    out, lse = (
        torch.empty(512, num_heads, 128, dtype=q.dtype, device=device),
        torch.empty(512, num_heads, device=device),
    )
    arguments = (q, k, v, starts_q, starts_k, 512, 1024, scale)
    skip_unless_it_runs(backend, arguments)
    with dispatch.override(prefill_attention=backend):
        torch.ops.mla.prefill_attention.out(*arguments, out=out, lse=lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ops.mla.prefill_attention.out(*arguments, out=out, lse=lse)
        for lens_q, lens_k in (([512, 0, 0], [1024, 0, 0]), ([1, 0, 300], [700, 9, 300]), ([0, 0, 0], [0, 0, 0])):
            starts_q.copy_(starts(lens_q, device))
            starts_k.copy_(starts(lens_k, device))
            out.fill_(math.nan)
            graph.replay()
            eager = torch.ops.mla.prefill_attention(*arguments)
            assert torch.equal(out, eager[0])
            assert torch.equal(lse, eager[1])


def mixture(seed: int) -> tuple[list[int], list[int]]:
    """Queries and keys of requests: most are short, some empty, some have more keys than queries, or fewer."""
    drawn = random.Random(seed)
    lens_q = [min(1500, int(drawn.lognormvariate(3, 1.6))) for _ in range(drawn.randrange(30, 120))]
    lens_k = [min(4000, int(drawn.lognormvariate(4, 2))) if drawn.random() < 0.3 else length for length in lens_q]
    return lens_q, lens_k


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("backend", "cells"),
    [("triton", None), ("hopper", None), ("hopper", 0), ("hopper", 2**20)],
    ids=["triton", "hopper", "hopper, all tiles long", "hopper, all tiles short"],
)
@pytest.mark.parametrize("dims", [(192, 128), (64, 64), (256, 256)], ids=str)
def test_mixtures_of_lengths(
    backend: str, cells: int | None, dims: tuple[int, int], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN behind the last request, rows of every request held against float64."""
    from mla_ops.kernels.hopper import prefill_attention

    if cells is not None:
        monkeypatch.setattr(prefill_attention, "SHORT_CELLS", cells)
    lens_q, lens_k = mixture(len(str(dims)) + causal)
    arguments = inputs(lens_q, lens_k, (8, 4), dims, torch.bfloat16, torch.device("cuda"), padding=140)
    skip_unless_it_runs(backend, arguments)
    for tensor, lens in zip(arguments, (lens_q, lens_k, lens_k), strict=False):
        tensor[sum(lens) :] = math.nan
    with dispatch.override(prefill_attention=backend):
        out, lse = torch.ops.mla.prefill_attention(*arguments, causal=causal)
    q, k, v, starts_q, starts_k, _, _, scale = arguments
    ends = starts_q.tolist()
    edges = {token for begin, end in itertools.pairwise(ends) for token in (begin, end - 1, begin + (end - begin) // 2)}
    tokens = sorted({*(token for token in edges if token >= 0), ends[-1], ends[-1] + 139})
    expected = dense_oracle.prefill(
        q, k, v, starts_q, starts_k, scale, causal=causal, operand=torch.bfloat16, tokens=tokens
    )
    attention_oracle.assert_close(out, lse, expected)


@pytest.mark.gpu
def test_the_bits_of_a_request_do_not_depend_on_the_batch() -> None:
    """Hopper: a request by itself, and anywhere among others that hold NaN, with other bounds of the lengths."""
    device, heads = torch.device("cuda"), (16, 16)
    for length, keys in ((1, 1), (2, 2), (7, 7), (16, 16), (50, 50), (128, 128), (129, 129), (400, 400), (3, 700)):
        arguments = inputs([length], [keys], heads, (192, 128), torch.bfloat16, device)
        skip_unless_it_runs("hopper", arguments)
        q, k, v, *_, scale = arguments
        with dispatch.override(prefill_attention="hopper"):
            alone = torch.ops.mla.prefill_attention(*arguments)
            for before, behind in (([], [1]), ([1] * 63, [500]), ([127], []), ([300, 0, 5], [1] * 511)):
                lens_q, lens_k = [*before, length, *behind], [*before, keys, *behind]
                first = sum(before)
                around = []
                for tensor, own, lens in ((q, length, lens_q), (k, keys, lens_k), (v, keys, lens_k)):
                    around.append(torch.full((sum(lens), *tensor.shape[1:]), math.nan, device=device).bfloat16())
                    around[-1][first : first + own] = tensor
                bounds = starts(lens_q, device), starts(lens_k, device), max(lens_q), max(lens_k)
                found = torch.ops.mla.prefill_attention(*around, *bounds, scale)
                for one, other in zip(alone, found, strict=True):
                    assert torch.equal(one, other[first : first + length])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS[1:3])
def test_a_replay_follows_lengths_from_one_token_to_all(backend: str) -> None:
    """A graph of 64 requests and 600 tokens, captured with long ones."""
    device, count, num_tokens = torch.device("cuda"), 64, 600
    q, k, v, *_, scale = inputs([num_tokens], [num_tokens], (16, 16), (192, 128), torch.bfloat16, device)
    cu_seqlens = starts([num_tokens // 2] * 2 + [0] * (count - 2), device)
    out = torch.empty(num_tokens, 16, 128, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, 16, device=device)
    arguments = (q, k, v, cu_seqlens, cu_seqlens, num_tokens, num_tokens, scale)
    skip_unless_it_runs(backend, arguments)
    with dispatch.override(prefill_attention=backend):
        torch.ops.mla.prefill_attention.out(*arguments, out=out, lse=lse)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            torch.ops.mla.prefill_attention.out(*arguments, out=out, lse=lse)
        for lens in ([1] * count, [num_tokens], [9] * 60, [400, 1, 0, 130, 2], [0], [3] * 20 + [200]):
            cu_seqlens.copy_(starts(lens + [0] * (count - len(lens)), device))
            out.fill_(math.nan)
            lse.fill_(math.nan)
            graph.replay()
            tokens = sorted({0, 1, 8, sum(lens) // 2, max(sum(lens) - 1, 0), num_tokens - 1})
            expected = dense_oracle.prefill(
                q, k, v, cu_seqlens, cu_seqlens, scale, causal=True, operand=torch.bfloat16, tokens=tokens
            )
            attention_oracle.assert_close(out, lse, expected)
            eager = torch.ops.mla.prefill_attention(*arguments)
            assert torch.equal(out, eager[0])
            assert torch.equal(lse, eager[1])
