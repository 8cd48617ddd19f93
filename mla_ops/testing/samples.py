"""Sample inputs for every op: what an opcheck suite runs over.

    from mla_ops.testing import op_names, sample_inputs

    @pytest.mark.parametrize("name", op_names())
    def test_ops(name):
        for sample in sample_inputs(name, "cuda"):
            torch.library.opcheck(sample.op, sample.args, sample.kwargs)

Small (opcheck clones them several times), reproducible, and without NaN or uninitialised memory in any output, which
opcheck would compare and find different. Every sample is legal: what an op refuses is in `tests/test_errors.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ..formats import FORMATS, LATENT_DIM, ROPE_DIM, allocate_cache
from ..kernels.reference.cache import concat_and_cache as write_reference

NUM_BLOCKS = 5
BLOCK_SIZE = 4
NUM_HEADS = 3
TOPK = 6
SCALE = 0.0625

# what an `.out` buffer holds before the call, so that a row that must be left alone can be told from a written one
FILL = 7

_PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Sample:
    """Arguments of one call.

    Attributes:
        name: what is special about it, in words.
        args, kwargs: as the op takes them.
        op: the overload that takes them.
    """

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    op: Any = None

    def __repr__(self) -> str:
        return self.name


class _Maker:
    """Tensors on one device, from one seed, made on the CPU so that every device gets the same numbers."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def indices(self, low: int, high: int, *shape: int) -> torch.Tensor:
        values = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)
        return values.to(self.device)

    def int32(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def int64(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def cache(self, cache_format: str, head_dim: int = LATENT_DIM + ROPE_DIM) -> torch.Tensor:
        """Every slot written, through the reference, so that quantised rows hold sensible bytes."""
        cache = allocate_cache(cache_format, NUM_BLOCKS, BLOCK_SIZE, head_dim=head_dim)
        slots = torch.arange(NUM_BLOCKS * BLOCK_SIZE)
        kv_c = torch.randn(len(slots), min(LATENT_DIM, head_dim), generator=self.generator)
        k_pe = torch.randn(len(slots), head_dim - kv_c.shape[1], generator=self.generator)
        write_reference(kv_c, k_pe, cache, slots, cache_format)
        return cache.to(self.device)

    def block_table(self) -> torch.Tensor:
        return self.int32([[2, 0, -1], [4, 1, 3]])


def _padded_blocks(cache: torch.Tensor) -> torch.Tensor:
    """The same rows, with room between blocks and before the first: what an engine's shared pool hands out."""
    num_blocks, block_size, row_width = cache.shape
    pool = cache.new_full((num_blocks + 1, block_size + 2, row_width), FILL)
    view = pool[1:, :block_size]
    view.copy_(cache)
    return view


def _wide_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of wider rows: last dim contiguous, the others not."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 16), FILL)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


_Case = tuple[str, tuple[Any, ...], dict[str, Any]]


def _concat_and_cache(make: _Maker) -> Iterator[_Case]:
    def keys(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        return make.normal(num_tokens, LATENT_DIM, dtype=dtype), make.normal(num_tokens, ROPE_DIM, dtype=dtype)

    for cache_format in FORMATS:
        dtype = _PLAIN.get(cache_format, torch.bfloat16)
        slots = make.int64([3, 19, 0, 8, 7])
        yield f"{cache_format} five tokens", (*keys(5, dtype), make.cache(cache_format), slots, cache_format), {}
    for cache_format in ("bf16", "fp8_ds_mla"):
        cache = make.cache(cache_format)
        yield f"{cache_format} no tokens", (*keys(0), cache, make.int64([]), cache_format), {}
        yield f"{cache_format} one token", (*keys(1), cache.clone(), make.int64([6]), cache_format), {}
        padded = _padded_blocks(cache)
        yield f"{cache_format} padded blocks", (*keys(2), padded, make.int64([4, 15]), cache_format), {}
        slots = make.int64([-1, 2, 20, 2**40, -7])
        yield f"{cache_format} slots out of range", (*keys(5), cache.clone(), slots, cache_format), {}
    fp8 = make.cache("fp8_ds_mla")
    yield "fp8_ds_mla fp32 keys", (*keys(3, torch.float32), fp8, make.int64([1, 2, 3]), "fp8_ds_mla"), {}
    yield "fp8_ds_mla more keys than slots", (*keys(4), fp8.clone(), make.int64([5, 9]), "fp8_ds_mla"), {}
    yield "fp8_ds_mla more slots than keys", (*keys(2), fp8.clone(), make.int64([5, 9, 11, 12]), "fp8_ds_mla"), {}
    fused = make.normal(3, LATENT_DIM + ROPE_DIM)
    kv_c, k_pe = fused.split((LATENT_DIM, ROPE_DIM), dim=1)
    yield "fp8_ds_mla halves of one projection", (kv_c, k_pe, fp8.clone(), make.int64([0, 1, 2]), "fp8_ds_mla"), {}
    kv_c, k_pe = keys(2)
    kv_c[0, 3], kv_c[1, 200], k_pe[0, 5] = torch.nan, torch.inf, -torch.inf
    yield "fp8_ds_mla keys not finite", (kv_c, k_pe, fp8.clone(), make.int64([5, 9]), "fp8_ds_mla"), {}
    no_rope = make.normal(2, 0)
    index_keys = (make.normal(2, 128), no_rope, make.cache("bf16", 128), make.int64([5, 9]), "bf16")
    yield "bf16 index keys without a RoPE part", index_keys, {}
    latent = (make.normal(2, 448), make.normal(2, 64), make.cache("bf16", 512), make.int64([5, 9]), "bf16")
    yield "bf16 rows of 512", latent, {}


def _gather_cache(make: _Maker) -> Iterator[_Case]:
    table, lens, starts = make.block_table(), make.int32([6, 9]), make.int32([0, 6, 15])
    for cache_format in FORMATS:
        yield f"{cache_format} whole requests", (make.cache(cache_format), table, lens, starts, 15, cache_format), {}
    for cache_format in ("bf16", "fp8_ds_mla"):
        cache = make.cache(cache_format)
        yield f"{cache_format} no rows", (cache, table, lens, starts, 0, cache_format), {}
        no_requests = (cache, make.int32([]).view(0, 3), make.int32([]), make.int32([0]), 2, cache_format)
        yield f"{cache_format} no requests", no_requests, {}
        yield f"{cache_format} padded blocks", (_padded_blocks(cache), table, lens, starts, 15, cache_format), {}
        tail = (cache, table, lens, make.int32([0, 2, 5]), 8, cache_format)
        offset = {"gather_lens": make.int32([2, 3]), "offset": 2}
        yield f"{cache_format} last tokens at an offset", tail, offset
    bf16 = make.cache("bf16")
    one = (bf16, make.int32([[3]]), make.int32([1]), make.int32([0, 1]), 1, "bf16")
    yield "bf16 one row", one, {}
    garbage = make.int32([[2, 99, -5], [-(2**31), 2**31 - 1, 0]])
    yield "bf16 block table out of range", (bf16, garbage, lens, starts, 15, "bf16"), {}
    yield "bf16 requests longer than the block table", (bf16, table[:, :1], lens, starts, 15, "bf16"), {}


def _convert(make: _Maker) -> Iterator[_Case]:
    requests = make.int32([0, 1, 1, 0, 1])
    indices = make.indices(0, 12, 5, TOPK)
    table = make.block_table()
    yield "five tokens", (requests, table, indices, BLOCK_SIZE), {}
    yield "five tokens compacted", (requests, table, indices, BLOCK_SIZE), {"compact": True}
    yield "five tokens of a cache of two blocks", (requests, table, indices, BLOCK_SIZE), {"num_blocks": 2}
    yield "one token", (requests[:1], table, indices[:1], BLOCK_SIZE), {}
    yield "no tokens", (requests[:0], table, indices[:0], BLOCK_SIZE), {"compact": True}
    yield "no requests", (make.int32([-1, 0]), table[:0], indices[:2], BLOCK_SIZE), {}
    yield "an empty selection", (requests, table, indices[:, :0], BLOCK_SIZE), {}
    garbage = make.int32([[-1, 5, 99, 2**31 - 1, -(2**31), 0]]).repeat(3, 1)
    wild = (make.int32([0, -1, 7]), table, garbage, BLOCK_SIZE)
    yield "indices and requests out of range", wild, {"compact": True, "num_blocks": NUM_BLOCKS}
    yield "wide rows", (requests, _wide_rows(table), _wide_rows(indices), BLOCK_SIZE), {}


def _filter(make: _Maker) -> Iterator[_Case]:
    indices, context = make.indices(-1, 12, 5, TOPK), make.int32([0, 4, 12, 100, -3])
    yield "five tokens", (indices, context), {}
    yield "one token", (indices[:1], context[1:2]), {}
    yield "no tokens", (indices[:0], context[:0]), {}
    yield "an empty selection", (indices[:, :0], context), {}
    yield "wide rows", (_wide_rows(indices), context), {}


def _selection(make: _Maker, num_tokens: int) -> torch.Tensor:
    return make.indices(-1, NUM_BLOCKS * BLOCK_SIZE, num_tokens, TOPK)


def _paged_sparse_attention(make: _Maker) -> Iterator[_Case]:
    head_dim = LATENT_DIM + ROPE_DIM
    for cache_format in FORMATS:
        dtype = _PLAIN.get(cache_format, torch.bfloat16)
        cache, q = make.cache(cache_format), make.normal(5, NUM_HEADS, head_dim, dtype=dtype)
        yield f"{cache_format} five tokens", (q, cache, _selection(make, 5), SCALE, cache_format), {}
    for cache_format in ("bf16", "fp8_ds_mla"):
        cache, q, indices = make.cache(cache_format), make.normal(5, NUM_HEADS, head_dim), _selection(make, 5)
        yield f"{cache_format} no tokens", (q[:0], cache, indices[:0], SCALE, cache_format), {}
        yield f"{cache_format} one token", (q[:1], cache, indices[:1], SCALE, cache_format), {}
        padded = _padded_blocks(cache)
        yield (
            f"{cache_format} padded blocks and wide rows",
            (
                _wide_rows(q),
                padded,
                _wide_rows(indices),
                SCALE,
                cache_format,
            ),
            {},
        )
        yield (
            f"{cache_format} lengths and sinks",
            (q, cache, indices, SCALE, cache_format),
            {
                "topk_length": make.int32([6, 0, 3, 99, -2]),
                "attn_sink": torch.tensor([0.5, -torch.inf, torch.inf], device=make.device),
            },
        )
        yield (
            f"{cache_format} request-local indices",
            (q, cache, make.indices(-1, 12, 5, TOPK), SCALE, cache_format),
            {
                "block_table": make.block_table(),
                "req_id_per_token": make.int32([0, 1, 1, -1, 7]),
            },
        )
    bf16, q = make.cache("bf16"), make.normal(2, NUM_HEADS, head_dim)
    garbage = make.int32([[-1, -(2**31), 20, 2**31 - 1], [0, 19, 19, 5]])
    yield "bf16 indices out of range", (q, bf16, garbage, SCALE, "bf16"), {}
    yield "bf16 an empty selection", (q, bf16, garbage[:, :0], SCALE, "bf16"), {}
    narrow = make.normal(2, 1, LATENT_DIM)
    yield "bf16 one head of 512", (narrow, make.cache("bf16", LATENT_DIM), garbage, SCALE, "bf16"), {}
    q32 = make.normal(2, NUM_HEADS, head_dim, dtype=torch.float32)
    yield "fp8_ds_mla fp32 queries", (q32, make.cache("fp8_ds_mla"), garbage, SCALE, "fp8_ds_mla"), {}
    poisoned = make.cache("bf16")
    poisoned[0, 1] = torch.nan
    yield "bf16 a NaN in a row that nobody attends", (q, poisoned, garbage, SCALE, "bf16"), {}


def _sparse_attention(make: _Maker) -> Iterator[_Case]:
    head_dim, num_kv = LATENT_DIM + ROPE_DIM, NUM_BLOCKS * BLOCK_SIZE
    for dtype in _PLAIN.values():
        q, kv = make.normal(5, NUM_HEADS, head_dim, dtype=dtype), make.normal(num_kv, head_dim, dtype=dtype)
        yield f"{str(dtype).removeprefix('torch.')} five tokens", (q, kv, _selection(make, 5), SCALE), {}
    q, kv, indices = make.normal(5, NUM_HEADS, head_dim), make.normal(num_kv, head_dim), _selection(make, 5)
    yield "no tokens", (q[:0], kv, indices[:0], SCALE), {}
    yield "one token", (q[:1], kv, indices[:1], SCALE), {}
    yield "no keys", (q, kv[:0], indices, SCALE), {}
    yield "wide rows", (_wide_rows(q), _wide_rows(kv), _wide_rows(indices), SCALE), {}
    yield (
        "lengths and sinks",
        (q, kv, indices, SCALE),
        {
            "topk_length": make.int32([6, 0, 3, 99, -2]),
            "attn_sink": torch.tensor([0.5, -torch.inf, torch.inf], device=make.device),
        },
    )
    yield "one head of 512", (make.normal(2, 1, LATENT_DIM), make.normal(num_kv, LATENT_DIM), indices[:2], SCALE), {}


def _merge_attention_states(make: _Maker) -> Iterator[_Case]:
    def side(num_tokens: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
        out = make.normal(num_tokens, NUM_HEADS, LATENT_DIM, dtype=dtype)
        return out, make.normal(num_tokens, NUM_HEADS, dtype=torch.float32)

    for dtype in _PLAIN.values():
        yield f"{str(dtype).removeprefix('torch.')} five tokens", (*side(5, dtype), *side(5, dtype)), {}
    yield "no tokens", (*side(0), *side(0)), {}
    yield "one token", (*side(1), *side(1)), {}
    (out_a, lse_a), (out_b, lse_b) = side(3), side(3)
    lse_a[0], lse_b[0], lse_a[1], lse_b[2] = -torch.inf, -torch.inf, -torch.inf, torch.inf
    out_a[1], out_b[2] = torch.nan, torch.nan
    yield "empty rows", (out_a, lse_a, out_b, lse_b), {}
    (out_a, lse_a), (out_b, lse_b) = side(2), side(2)
    yield "wide rows and transposed lse", (_wide_rows(out_a), lse_a.t().contiguous().t(), out_b, _wide_rows(lse_b)), {}


def _build_step_metadata(make: _Maker) -> Iterator[_Case]:
    max_num_requests, max_num_tokens, max_blocks = 4, 12, 4

    def buffers() -> tuple[torch.Tensor, ...]:
        tokens = [torch.full((max_num_tokens,), FILL, dtype=torch.int32, device=make.device) for _ in range(4)]
        req_id_per_token, positions, key_lens, topk_length = tokens
        return (
            torch.full((max_num_requests + 1,), FILL, dtype=torch.int32, device=make.device),
            torch.full((max_num_requests,), FILL, dtype=torch.int32, device=make.device),
            torch.full((max_num_requests, max_blocks), FILL, dtype=torch.int32, device=make.device),
            req_id_per_token,
            positions,
            torch.full((max_num_tokens,), FILL, dtype=torch.int64, device=make.device),
            key_lens,
            topk_length,
        )

    def step(starts: list[int], lens: list[int], table: torch.Tensor) -> tuple[Any, ...]:
        return (make.int32(starts), make.int32(lens), table, *buffers(), BLOCK_SIZE, TOPK)

    table = make.block_table()
    yield "two decodes", step([0, 1, 2], [6, 9], table), {}
    yield "a decode and a prefill", step([0, 1, 10], [6, 9], table), {}
    yield "one request", step([0, 1], [1], table[:1]), {}
    yield "no requests", step([0], [], table[:0]), {}
    yield "a request without tokens", step([0, 0, 3], [6, 9], table), {}
    yield "a full batch", step([0, 3, 6, 9, 12], [3, 4, 5, 6], make.indices(0, NUM_BLOCKS, 4, max_blocks)), {}
    yield "requests longer than the block table", step([0, 4, 8], [6, 9], table[:, :1]), {}
    yield "wide rows", step([0, 1, 2], [6, 9], _wide_rows(table)), {}


_SAMPLES: dict[str, Callable[[_Maker], Iterator[_Case]]] = {
    "build_step_metadata": _build_step_metadata,
    "concat_and_cache": _concat_and_cache,
    "convert_req_index_to_global_index": _convert,
    "filter_prefill_indices": _filter,
    "gather_cache": _gather_cache,
    "merge_attention_states": _merge_attention_states,
    "paged_sparse_attention": _paged_sparse_attention,
    "sparse_attention": _sparse_attention,
}


def overload(op_name: str) -> Any:
    """The overload that `op_name` means: `"gather_cache"` or `"gather_cache.out"`."""
    name, _, suffix = op_name.partition(".")
    return getattr(getattr(torch.ops.mla, name), suffix or "default")


def op_names() -> list[str]:
    """Every registered op, `.out` overloads included, e.g. `"gather_cache"` and `"gather_cache.out"`."""
    names = (name.removeprefix("mla::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("mla::"))
    return sorted(names)


def output_names(op: Any) -> list[str]:
    """The arguments of an `.out` overload that take its outputs."""
    return [a.name for a in op._schema.arguments if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]


def _with_buffers(sample: Sample, op: Any, *, wide: bool) -> Sample:
    """The same call into buffers of the caller's."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, torch.Tensor) else value

    with mode:
        outputs = sample.op(*map(fake, sample.args), **{name: fake(value) for name, value in sample.kwargs.items()})
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    buffers = {}
    for name, output in zip(output_names(op), outputs, strict=True):
        buffer = torch.full(output.shape, FILL, dtype=output.dtype, device=output.device)
        buffers[name] = _wide_rows(buffer) if wide else buffer
    name = f"{sample.name} into wide rows" if wide else sample.name
    return Sample(name, sample.args, {**sample.kwargs, **buffers}, op)


def sample_inputs(op_name: str, device: torch.device | str = "cpu") -> list[Sample]:
    """Legal calls of one op, small and reproducible.

    Args:
        op_name: one of `op_names()`.
        device: where the tensors live.

    Returns:
        Samples, whose `name` says what is special. No two share memory that is written: a sample may be run as it is.

    Raises:
        KeyError: there are no samples of that op.
    """
    name, _, suffix = op_name.partition(".")
    functional = [Sample(*case, overload(name)) for case in _SAMPLES[name](_Maker(device))]
    if not suffix:
        return functional
    op = overload(op_name)
    return [
        *(_with_buffers(sample, op, wide=False) for sample in functional),
        _with_buffers(functional[0], op, wide=True),
    ]
