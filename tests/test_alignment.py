"""Tensors that begin anywhere in their storage: kernels that load 16 bytes at a time get a copy, and nothing faults."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mla_ops import dispatch, formats
from mla_ops.kernels import flash_mla
from mla_ops.kernels.alignment import aligned, is_aligned
from mla_ops.kernels.hopper import (
    cache,
    costs,
    dense_attention,
    groups,
    indexer_logits,
    launch,
    merge_parts,
    prefill_attention,
    select_keys,
    sources,
    sparse_attention,
    waves,
)
from mla_ops.kernels.hopper.launch import KERNELS, Clusters
from mla_ops.kernels.hopper.params import Params
from mla_ops.ops import paged_attention as paged_attention_op
from mla_ops.ops import paged_sparse_attention as paged_sparse_attention_op
from mla_ops.ops import prefill_attention as prefill_attention_op
from mla_ops.ops import sparse_attention as sparse_attention_op

OFFSETS = (0, 1, 3)
FORMATS = [pytest.param(*key, id="-".join(map(str, key))) for key in KERNELS]
NUM_TOKENS, NUM_HEADS, NUM_BLOCKS, BLOCK_SIZE, TOPK = 5, 3, 4, 16, 40


def at_offset(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A contiguous copy that begins so many elements behind its storage."""
    room = torch.zeros(offset + tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return room[offset:].view(tensor.shape).copy_(tensor)


def with_odd_rows(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose rows are `offset` elements apart, besides beginning so far behind the storage."""
    *sizes, width = tensor.shape
    room = torch.zeros(*sizes, width + 2 * offset, dtype=tensor.dtype, device=tensor.device)
    return room[..., offset : offset + width].copy_(tensor)


PLACES = pytest.mark.parametrize("place", [at_offset, with_odd_rows])


def random(*size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.randn(*size, dtype=torch.bfloat16, device=device)


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
def test_what_is_not_aligned_is_copied(place: Any, offset: int) -> None:
    tensor = place(random(3, 2, 64), offset)
    assert is_aligned(tensor) == (offset == 0)
    assert (aligned(tensor) is tensor) == (offset == 0)
    assert is_aligned(aligned(tensor))
    assert torch.equal(aligned(tensor), tensor)


def test_the_stride_of_a_single_row_does_not_matter() -> None:
    tensor = random(64)
    assert is_aligned(tensor.as_strided((1, 1, 64), (577, 3, 1)))
    assert not is_aligned(tensor.as_strided((1, 2, 32), (577, 3, 1)))


class Launches:
    """Stands for the driver: checks that what a kernel loads 16 bytes of at a time lies on 16 bytes."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def load(self, source: str, kernel: str, device_index: int) -> Any:
        kind = {"merge_parts.cu": merge_parts.Params, "prefill_attention.cu": prefill_attention.Params}
        kind["prefill_short.cu"] = prefill_attention.Params
        params_kind = kind.get(source, Params)

        class Function:
            @staticmethod
            def launch(grid: Any, block: Any, shared_bytes: int, cluster: Any, params: bytes, **_: Any) -> None:
                self.note(params_kind.from_buffer_copy(params))

            @staticmethod
            def leave_l1(blocks: int) -> None:
                pass

        return Function

    def note(self, params: Any) -> None:
        addresses = [params.out]
        strides = [2 * params.out_token_stride, 2 * params.out_head_stride]
        if isinstance(params, merge_parts.Params):
            addresses += [params.outs, params.lses]
        if isinstance(params, Params):
            addresses += [params.q, params.q_rope, *(cache.rows for cache in params.caches)]
            strides += [2 * params.q_token_stride, 2 * params.q_head_stride]
            strides += [2 * params.q_rope_token_stride, 2 * params.q_rope_head_stride]
            strides += [cache.block_bytes for cache in params.caches]
            size = params.num_tokens * params.q_token_stride
            params.queries = ctypes.string_at(params.q, 2 * size)  # a copy may be gone when the call is over
            if params.q_rope != params.q + 1024:
                params.rope = ctypes.string_at(params.q_rope, 2 * params.num_tokens * params.q_rope_token_stride)
        assert not [address for address in addresses if address % 16]
        assert not [stride for stride in strides if stride % 16]
        self.seen.append(params)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    stand_in = Launches()
    monkeypatch.setattr(sources, "load", stand_in.load)
    monkeypatch.setattr(sparse_attention, "clusters_at_once", lambda *_: (132,) * len(launch.SPLITS))
    monkeypatch.setattr(dense_attention, "clusters_at_once", sparse_attention.clusters_at_once)
    monkeypatch.setattr(launch, "clusters_at_once", sparse_attention.clusters_at_once)
    for module in (sparse_attention, dense_attention):
        monkeypatch.setattr(module, "costs_of", lambda _: costs.read_costs(costs.TABLE.read_text(), "H200"))
    monkeypatch.setattr(groups, "counters", lambda *_: 0)
    monkeypatch.setattr(prefill_attention, "num_sms", lambda *_: 132)
    monkeypatch.setattr(prefill_attention, "_tensor_map", lambda address, *_: address.to_bytes(128, "little"))
    caches = (sparse_attention._waves, dense_attention._waves, merge_parts._loaded, prefill_attention._load_short)
    for cached in caches:
        cached.cache_clear()
    yield stand_in
    for cached in caches:
        cached.cache_clear()


def outputs(place: Any, offset: int, num_heads: int = NUM_HEADS, width: int = 512) -> dict[str, torch.Tensor]:
    out, lse = random(NUM_TOKENS, num_heads, width), torch.zeros(NUM_TOKENS, num_heads)
    return {"out": place(out, offset), "lse": place(lse, offset)}


def check(launches: Launches, q: torch.Tensor, results: dict[str, torch.Tensor], **fields: Any) -> None:
    """The kernel was told of the tensors, or of a copy of the same content; each value is in its own field."""
    (params,) = launches.seen
    copied = torch.frombuffer(bytearray(params.queries), dtype=torch.bfloat16)
    copied = copied.as_strided(q.shape, (params.q_token_stride, params.q_head_stride, 1))
    assert torch.equal(copied, q)
    assert (params.q == q.data_ptr()) == is_aligned(q)
    if q.shape[2] == 576:
        assert params.q_rope == params.q + 2 * 512
        strides = params.q_token_stride, params.q_head_stride
        assert (params.q_rope_token_stride, params.q_rope_head_stride) == strides
    assert (params.out == results["out"].data_ptr()) == is_aligned(results["out"])
    lse = results["lse"]
    assert (params.lse, params.lse_token_stride, params.lse_head_stride) == (lse.data_ptr(), *lse.stride())
    assert (params.num_tokens, params.num_heads) == (NUM_TOKENS, NUM_HEADS)
    assert params.scale_log2 == pytest.approx(0.125 * math.log2(math.e), rel=1e-6)
    for name, value in fields.items():
        found = getattr(params, name)
        assert (list(found) if isinstance(found, ctypes.Array) else found) == value, name


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("cache_format", "width"), FORMATS)
def test_paged_sparse_attention(launches: Launches, cache_format: str, width: int, place: Any, offset: int) -> None:
    cache, extra = (formats.allocate_cache(cache_format, blocks, 16, head_dim=width) for blocks in (4, 6))
    q, results = place(random(NUM_TOKENS, NUM_HEADS, width), offset), outputs(place, offset)
    indices, extra_indices = (
        place(torch.zeros(NUM_TOKENS, topk, dtype=torch.int32), offset) for topk in (TOPK, TOPK + 2)
    )
    lengths, extra_lengths, sink, requests = (
        at_offset(torch.zeros(size, dtype=dtype), offset)
        for size, dtype in (
            (NUM_TOKENS, torch.int32),
            (NUM_TOKENS, torch.int32),
            (NUM_HEADS, torch.float32),
            (NUM_TOKENS, torch.int32),
        )
    )
    table = place(torch.zeros(2, 4, dtype=torch.int32), offset)
    sparse_attention.paged_sparse_attention_extra(
        q,
        cache,
        indices,
        0.125,
        cache_format,
        extra,
        extra_indices,
        cache_format,
        topk_length=lengths,
        extra_topk_length=extra_lengths,
        attn_sink=sink,
        block_table=table,
        req_id_per_token=requests,
        deterministic=True,
        **results,
    )
    check(
        launches,
        q,
        results,
        parts=1,
        topk_length=[lengths.data_ptr(), extra_lengths.data_ptr()],
        indices=[indices.data_ptr(), extra_indices.data_ptr()],
        indices_stride=[indices.stride(0), extra_indices.stride(0)],
        topk=[TOPK, TOPK + 2],
        req_id_per_token=requests.data_ptr(),
        attn_sink=sink.data_ptr(),
    )
    for found, tensor, own_table in zip(launches.seen[0].caches, (cache, extra), (table, None), strict=True):
        geometry = formats.geometry(tensor, cache_format)
        assert (found.rows, found.block_bytes) == (tensor.data_ptr(), geometry.block_stride)
        assert (found.num_blocks, found.block_size) == (len(tensor), BLOCK_SIZE)
        assert found.block_table == (0 if own_table is None else own_table.data_ptr())
        blocks, requests_of_table = (len(tensor), 0) if own_table is None else (4, 2)
        assert (found.num_indices, found.num_requests) == (blocks * BLOCK_SIZE, requests_of_table)
        assert 1000 * found.of_block_size.multiplier >> found.of_block_size.shift == 1000 // BLOCK_SIZE


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("op", ["paged_sparse_attention", "paged_attention"])
def test_halves_of_queries(launches: Launches, op: str, place: Any, offset: int) -> None:
    """Each is passed as it lies, or copied, whatever the other is."""
    cache = formats.allocate_cache("bf16", NUM_BLOCKS, BLOCK_SIZE)
    q, rope = random(NUM_TOKENS, NUM_HEADS, 512), place(random(NUM_TOKENS, NUM_HEADS, 64), offset)
    results, row = outputs(at_offset, 0), torch.zeros(NUM_TOKENS, dtype=torch.int32)
    if op == "paged_attention":
        table = torch.zeros(2, 1, dtype=torch.int32)
        dense_attention.paged_attention(q, cache, table, row, row, 0.125, "bf16", q_rope=rope, **results)
    else:
        indices = torch.zeros(NUM_TOKENS, TOPK, dtype=torch.int32)
        sparse_attention.paged_sparse_attention(q, cache, indices, 0.125, "bf16", q_rope=rope, **results)
    check(launches, q, results)
    (params,) = launches.seen
    copied = torch.frombuffer(bytearray(params.rope), dtype=torch.bfloat16)
    copied = copied.as_strided(rope.shape, (params.q_rope_token_stride, params.q_rope_head_stride, 1))
    assert torch.equal(copied, rope)
    assert (params.q_rope == rope.data_ptr()) == is_aligned(rope)


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("width", [512, 576])
def test_flat_sparse_attention(launches: Launches, width: int, place: Any, offset: int) -> None:
    kv, q = place(random(50, width), offset), place(random(NUM_TOKENS, NUM_HEADS, width), offset)
    indices, results = torch.zeros(NUM_TOKENS, TOPK, dtype=torch.int32), outputs(place, offset)
    sparse_attention.sparse_attention(q, kv, indices, 0.125, **results)
    check(launches, q, results, attn_sink=0, topk=[TOPK, 0])
    cache = launches.seen[0].caches[0]
    assert (cache.rows == kv.data_ptr()) == is_aligned(kv)
    assert cache.block_bytes == 2 * aligned(kv).stride(0)


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize(("cache_format", "width"), FORMATS)
def test_paged_attention_in_parts(launches: Launches, cache_format: str, width: int, place: Any, offset: int) -> None:
    """A kernel that leaves parts, and their merge."""
    cache = formats.allocate_cache(cache_format, NUM_BLOCKS, BLOCK_SIZE, head_dim=width)
    q, results = place(random(NUM_TOKENS, NUM_HEADS, width), offset), outputs(place, offset)
    lens, requests = (at_offset(torch.zeros(NUM_TOKENS, dtype=torch.int32), offset) for _ in range(2))
    table = place(torch.zeros(2, 900, dtype=torch.int32), offset)
    with waves.override(waves.Wave(NUM_TOKENS, Clusters(16, 2, 3))):
        dense_attention.paged_attention(q, cache, table, requests, lens, 0.125, cache_format, **results)
    attention, merge = launches.seen
    assert (merge.outs, merge.lses, merge.parts) == (attention.parts_out, attention.parts_lse, 3)
    assert (merge.out, merge.lse) == (attention.out, attention.lse)
    assert merge.num_rows == NUM_TOKENS * NUM_HEADS
    assert merge.lse == results["lse"].data_ptr()
    assert (merge.lse_token_stride, merge.lse_head_stride) == results["lse"].stride()
    assert (merge.out == results["out"].data_ptr()) == is_aligned(results["out"])
    assert attention.topk_length[0] == lens.data_ptr()


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
def test_prefill_attention(launches: Launches, place: Any, offset: int) -> None:
    q, k = (place(random(NUM_TOKENS, NUM_HEADS, 192), offset) for _ in range(2))
    v, results = place(random(NUM_TOKENS, NUM_HEADS, 128), offset), outputs(place, offset, width=128)
    starts = [at_offset(torch.tensor([0, NUM_TOKENS], dtype=torch.int32), offset) for _ in range(2)]
    prefill_attention.prefill_attention(q, k, v, *starts, 5, 5, 0.125, **results)
    (params,) = launches.seen  # so few tokens make no long tile
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        start = getattr(prefill_attention.Params, name).offset
        address = int.from_bytes(bytes(params)[start : start + 16], "little")
        assert address == getattr(params, f"{name}_rows")
        assert address % 16 == 0
        assert getattr(params, f"{name}_token_stride") % 8 == 0
        assert getattr(params, f"{name}_head_stride") % 8 == 0
        assert (address == tensor.data_ptr()) == is_aligned(tensor)
    assert [params.cu_seqlens_q, params.cu_seqlens_k] == [start.data_ptr() for start in starts]
    assert (params.lse, params.plan, params.causal) == (results["lse"].data_ptr(), 0, 1)
    assert (params.num_tokens, params.num_kv, params.num_requests, params.num_heads) == (5, 5, 1, NUM_HEADS)
    assert (params.heads_per_kv_head, params.heads_together, params.most_tiles) == (1, NUM_HEADS, 1)


def test_a_cache_beside_16_bytes_is_an_error_of_the_call(launches: Launches) -> None:
    """Its rows cannot be copied: a cache may take all of a GPU's memory."""
    memory = torch.zeros(4 * 16 * 576 + 8, dtype=torch.bfloat16)
    cache = memory[1 : 4 * 16 * 576 + 1].view(4, 16, 576)
    q, indices = random(NUM_TOKENS, NUM_HEADS, 576), torch.zeros(NUM_TOKENS, TOPK, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"paged_sparse_attention: kv_cache must begin at a multiple of 16 bytes"):
        sparse_attention.paged_sparse_attention(q, cache, indices, 0.125, "bf16", **outputs(at_offset, 0))
    assert not launches.seen


@pytest.mark.parametrize("op_name", ["concat_and_cache", "write_index_cache", "paged_indexer_logits", "select_keys"])
def test_a_cache_of_keys_beside_16_bytes_is_an_error_of_the_call(op_name: str) -> None:
    """Whoever's memory it is: its first byte need not be where torch would have it."""
    bare = torch.zeros(4 * 64 * 656 + 1, dtype=torch.uint8)[1:]
    int32, (latent, rope, key) = (
        functools.partial(torch.zeros, dtype=torch.int32),
        (random(2, n) for n in (512, 64, 128)),
    )
    q, weights, one = torch.zeros(2, 64, 128, dtype=torch.float8_e4m3fn), torch.zeros(2, 64), int32(2)
    scored = (q, bare[: 4 * 8448].view(4, 8448), weights, one, int32(1, 4), one)
    chosen = {"indices": int32(2, 5), "valid_counts": int32(2)}
    calls = {
        "concat_and_cache": lambda: cache.concat_and_cache(
            latent, rope, bare.view(4, 64, 656), one.long(), "fp8_ds_mla"
        ),
        "write_index_cache": lambda: cache.write_index_cache(key, scored[1], one.long(), "fp8_index"),
        "paged_indexer_logits": lambda: indexer_logits.paged_indexer_logits(
            *scored, 256, "fp8_index", out=torch.zeros(2, 256)
        ),
        "select_keys": lambda: select_keys.select_keys(*scored, 5, "fp8_index", **chosen),
    }
    with pytest.raises(ValueError, match=rf"^{op_name}: (kv|index)_cache must begin at a multiple of 16 bytes, got"):
        calls[op_name]()


@PLACES
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("num_heads", [3, 64])
def test_flash_mla_gets_aligned_inputs(place: Any, offset: int, num_heads: int) -> None:
    q, sink = flash_mla.pad_query(place(random(4, num_heads, 576), offset)), at_offset(torch.zeros(num_heads), offset)
    assert is_aligned(q)
    assert is_aligned(flash_mla.pad_sink(sink))
    for topk in (100, 128):
        indices = place(torch.zeros(4, topk, dtype=torch.int32), offset)
        assert is_aligned(flash_mla._pad_indices(indices, 128))


# ---- on a GPU -------------------------------------------------------------------------------------------------------

LOWERINGS = ("hopper", "triton", "flash_mla", "flash_attn", "torch_sdpa", "flashinfer")


def compare(lowering: str, offset: int, call: Any, inputs: dict[str, torch.Tensor]) -> None:
    """A call's results, to the bit, whatever the offsets of its inputs, all of them and each alone."""
    with dispatch.override(lowering):
        try:
            wanted = call(**inputs)
        except NotImplementedError as error:
            pytest.skip(str(error))
        moved = {name: at_offset(tensor, offset) for name, tensor in inputs.items()}
        odd = {name: with_odd_rows(tensor, offset) for name, tensor in inputs.items() if tensor.dim() > 1}
        for changed in (moved, odd, *({name: tensor} for name, tensor in moved.items())):
            found = call(**{**inputs, **changed})
            torch.cuda.synchronize()
            for got, want in zip(found, wanted, strict=True):
                assert torch.equal(got, want), changed.keys()


def cuda(*size: int) -> torch.Tensor:
    return random(*size, device="cuda")


def some_cache(cache_format: str, width: int) -> torch.Tensor:
    cache = formats.allocate_cache(cache_format, 16, 64, head_dim=width, device="cuda")
    if cache_format == "bf16":
        return cache.normal_()
    return cache  # zeros: the values do not matter for where they are read


@pytest.mark.gpu
@pytest.mark.parametrize("offset", OFFSETS[1:])
@pytest.mark.parametrize("lowering", ["hopper", "triton", "flash_mla"])
@pytest.mark.parametrize(("cache_format", "width"), FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_paged_calls_on_a_gpu(cache_format: str, width: int, num_tokens: int, lowering: str, offset: int) -> None:
    cache = some_cache(cache_format, width)
    inputs = {
        "q": cuda(num_tokens, 20, width),
        "indices": torch.randint(-1, 16 * 64, (num_tokens, 320), dtype=torch.int32, device="cuda"),
        "topk_length": torch.full((num_tokens,), 300, dtype=torch.int32, device="cuda"),
        "attn_sink": torch.randn(20, device="cuda"),
    }

    def call(q: torch.Tensor, indices: torch.Tensor, **options: torch.Tensor) -> Any:
        return paged_sparse_attention_op(q, cache, indices, 0.1, cache_format, **options)

    compare(lowering, offset, call, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", OFFSETS[1:])
@pytest.mark.parametrize("lowering", ["hopper", "triton", "flash_mla", "flashinfer"])
@pytest.mark.parametrize(("cache_format", "width"), FORMATS)
@pytest.mark.parametrize("num_tokens", [1, 70])
def test_dense_paged_calls_on_a_gpu(cache_format: str, width: int, num_tokens: int, lowering: str, offset: int) -> None:
    cache = some_cache(cache_format, width)
    inputs = {
        "q": cuda(num_tokens, 20, width),
        "block_table": torch.randint(0, 16, (2, 12), dtype=torch.int32, device="cuda"),
        "req_id_per_token": torch.randint(0, 2, (num_tokens,), dtype=torch.int32, device="cuda"),
        "key_lens": torch.randint(0, 700, (num_tokens,), dtype=torch.int32, device="cuda"),
    }

    def call(q: torch.Tensor, **others: torch.Tensor) -> Any:
        return paged_attention_op(q, cache, **others, softmax_scale=0.1, cache_format=cache_format)

    compare(lowering, offset, call, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", OFFSETS[1:])
@pytest.mark.parametrize("lowering", ["hopper", "triton", "flash_mla"])
@pytest.mark.parametrize("width", [512, 576])
def test_flat_calls_on_a_gpu(width: int, lowering: str, offset: int) -> None:
    inputs = {
        "q": cuda(70, 20, width),
        "kv": cuda(500, width),
        "indices": torch.randint(-1, 500, (70, 320), dtype=torch.int32, device="cuda"),
    }
    compare(lowering, offset, lambda **given: sparse_attention_op(**given, softmax_scale=0.1), inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("offset", OFFSETS[1:])
@pytest.mark.parametrize("lowering", [name for name in LOWERINGS if name != "flash_mla"])
@pytest.mark.parametrize("dims", [(192, 128), (128, 128)], ids=str)
def test_prefill_on_a_gpu(dims: tuple[int, int], lowering: str, offset: int) -> None:
    starts = torch.tensor([0, 100, 300], dtype=torch.int32, device="cuda")
    inputs = {"q": cuda(300, 4, dims[0]), "k": cuda(300, 4, dims[0]), "v": cuda(300, 4, dims[1])}

    def call(**given: torch.Tensor) -> Any:
        return prefill_attention_op(
            **given, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=200, max_seqlen_k=200, softmax_scale=0.1
        )

    compare(lowering, offset, call, inputs)
