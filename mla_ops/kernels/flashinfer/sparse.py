"""FlashInfer's sparse MLA as lowerings of paged_sparse_attention. Contract-tested; it has not run on its GPUs.

**SM120, SM121** (`SparseMLASm120Wrapper`): `fp8_ds_mla`, `fp8_ds_mla_v4`, and two caches of the latter. Its kernels
round more than the contract allows, which is why dispatch never chooses them by itself. To e4m3 (0.7.2) go

- the latent dims of a query, in groups of 128 of `fp8_ds_mla` and 64 of `fp8_ds_mla_v4`, divided by amax / 448 or the
  next power of two; but not over `fp8_ds_mla_v4` with more than 64 tokens and two caches or up to 256 keys;
- the weights, times the scale of the key's group, for each tile of keys and head, by their largest / 448: once for
  `fp8_ds_mla_v4`; for `fp8_ds_mla` what the first rounding leaves is rounded and added as well.

With amax at least 1e-4, a score is off by up to
`e = softmax_scale * sum over latent dims of |k_d| * max(|q_d| / 16, amax / 2**17)`, an lse by the largest e of its row,
and an output by `(exp(2 e) * (1 + w) - 1) * A`, `A = sum of p_k |v_k|`, with w = 1/16 for `fp8_ds_mla_v4` and 1/256 for
`fp8_ds_mla`; each key adds at most `2**-10` of the row's largest weight times the largest scale, or of 1e-10.
(compute_precision="bf16", without such rounding, exists for the 528 bytes of V4.1 alone.) Before 0.7.1 they read slot 0
for a key that is masked, so that a NaN there reaches an output: those versions are refused.

**SM100, SM103** (trtllm-gen): `bf16` rows of 576, multiplied as they are. The sources of these kernels are not public.
A vLLM report (pull request 37442) says that they multiply what lies behind a length in a tile of 128 keys by zero,
which makes NaN of what is not finite there. So no entry of a tile is behind a length here but repeats a live key of its
row, and dense decode, whose tiles are pages, is no lowering.

Both return base 2 lse with the sink in it. Where the sink is the larger, the lse without it cannot be had from that, so
the sink is applied here. Scratch and counters are allocated for each call, in stream order or in the graph's pool, so
that no two streams share them.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ...dispatch import Call, Lowering, device_capability, into_buffers
from ...formats import FORMATS, LATENT_DIM, ROPE_DIM, geometry
from ..alignment import aligned
from ..reference.sparse_attention import slots_or_minus_one, whole_query, with_positive_scale
from .installation import api, is_capturing, missing_installation

PACKED = ("fp8_ds_mla", "fp8_ds_mla_v4")
# A call of so many tokens is a decode, with any number of heads; one of more is a prefill, with one of these numbers
DECODE_TOKENS = 64
PREFILL_HEADS = (8, 16, 32, 64, 128)
KEYS_PER_TILE = 64
# its kernels' lse of a row without keys, in base 2, where they do not write -inf
NO_KEYS = -1e29

ROW_DIM = LATENT_DIM + ROPE_DIM
TRTLLM_PAGES = (64, 32)
TRTLLM_TILE = 128
TRTLLM_WORKSPACE_BYTES = 256 * 2**20
# its partial results: a tile of 128 rows of 512 bfloat16 and statistics for each SM, and a megabyte of its own guard
TRTLLM_PARTIAL_BYTES = 64 * 2**20
# statistics of the lse: 8 bytes a head for each of the 256 queries to which it rounds up the one of a request
TRTLLM_BYTES_PER_HEAD = 256 * 8


class Selection(NamedTuple):
    """A cache that has blocks, and int32 slots of it, -1 for what is not attended to; `length` cuts tails off."""

    cache: torch.Tensor
    slots: torch.Tensor
    length: torch.Tensor | None


def sparse_reason(call: Call) -> str | None:
    if call.dtype != torch.bfloat16:
        return f"FlashInfer's sparse MLA takes bfloat16 queries, these are {call.dtype}"
    capability = device_capability(call.device)
    if capability[0] == 12:
        if call.cache_format not in PACKED:
            return f"FlashInfer's sparse MLA for SM120 reads {' and '.join(PACKED)}, this cache is {call.cache_format}"
        if call.extra_cache_format and (call.cache_format, call.extra_cache_format) != (PACKED[1], PACKED[1]):
            return (
                f"FlashInfer's sparse MLA reads two caches of {PACKED[1]}, these are {call.cache_format} and "
                f"{call.extra_cache_format}"
            )
    elif capability in ((10, 0), (10, 3)):
        if call.extra_cache_format:
            return "FlashInfer's trtllm-gen kernels read two caches of plain rows only with a window of 128 keys"
        if call.cache_format != "bf16" or call.head_dim != ROW_DIM:
            return (
                f"FlashInfer's sparse MLA for SM100 reads bf16 rows of {ROW_DIM}, this cache is {call.cache_format} "
                f"with rows of {call.head_dim}"
            )
    else:
        return f"it needs a GPU of compute capability 10.0, 10.3, 12.0 or 12.1, these tensors are on {call.device}"
    return missing_installation()


@contextlib.contextmanager
def _beside_the_capture(device: torch.device) -> Iterator[None]:
    """Calls inside are not captured, and may compile, load and allocate."""
    from ..cuda.driver import relaxed_capture

    with relaxed_capture(), torch.cuda.stream(torch.cuda.Stream(device)):
        yield


# signatures of calls that FlashInfer has planned, and compiled and loaded its kernels for
_warm: set[tuple[object, ...]] = set()


def _run(function: Callable[..., Any], name: str, **arguments: Any) -> Any:
    """Calls FlashInfer, which plans by shapes and strides, and compiles and loads: not in a capture.

    There a call of zeros comes first, beside the capture. Zeros name no key, or the first one of a cache.
    """
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    device = tensors["kv_cache"].device
    signature = name, *((key, value.shape, value.stride(), value.device) for key, value in tensors.items())
    if signature not in _warm:
        if is_capturing(device):
            with _beside_the_capture(device):
                zeros = {key: torch.zeros_like(value) for key, value in tensors.items() if "kv_cache" not in key}
                function(**{**arguments, **zeros})
        _warm.add(signature)
    return function(**arguments)


def with_sink(out: torch.Tensor, base2: torch.Tensor, attn_sink: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Our results of FlashInfer's, which have no sink in them."""
    empty = base2 <= NO_KEYS
    lse = torch.where(empty, -torch.inf, base2 * math.log(2))
    if attn_sink is not None:
        out = (out * torch.sigmoid(lse - attn_sink).unsqueeze(-1)).to(out.dtype)
    return out.masked_fill_(empty.unsqueeze(-1), 0), lse


# ---- SM120 ----------------------------------------------------------------------------------------------------------


@functools.cache
def _sm120_wrapper(cache_format: str, device: torch.device) -> Any:
    """Scales of fp8_ds_mla may be any. Shared by streams, since each call brings its scratch."""
    scales = "arbitrary_fp32" if cache_format == "fp8_ds_mla" else "auto"
    return api("SparseMLASm120Wrapper")(kv_scale_format=scales, device=device)


def pages_of(kv_cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """`[num_blocks, block_size, bytes a token]`, though a planar block's bytes do not lie so."""
    if kv_cache.dim() == 3:
        return kv_cache
    _, block_size, _, head_dim = geometry(kv_cache, cache_format)
    width = FORMATS[cache_format].row_width(head_dim)
    return kv_cache[:, : block_size * width].unflatten(1, (block_size, width))


def _with_heads(q: torch.Tensor, num_heads: int) -> torch.Tensor:
    missing = num_heads - q.shape[1]
    return F.pad(q, (0, 0, 0, missing)) if missing else aligned(q.contiguous())


def _whole_tiles(slots: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -slots.shape[1] % multiple
    return F.pad(slots, (0, missing), value=-1) if missing else slots


def _sm120(
    q: torch.Tensor, selections: list[Selection], softmax_scale: float, cache_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[num_tokens, num_heads, 512]` and an lse in base 2."""
    num_tokens, num_heads, _ = q.shape
    scratch: dict[str, torch.Tensor] = {}
    if num_tokens > DECODE_TOKENS:
        q = _with_heads(q, next(heads for heads in PREFILL_HEADS if heads >= num_heads))
    else:
        q = _with_heads(q, num_heads)
        # partial results of each tile; it keeps those of 8 heads, and else of whole groups of 16
        heads = 8 if num_heads == 8 else -(-num_heads // 16) * 16
        parts = num_tokens, heads, sum(-(-each.slots.shape[1] // KEYS_PER_TILE) for each in selections)
        scratch["mid_out"] = q.new_empty((*parts, LATENT_DIM))
        scratch["mid_lse"] = q.new_empty(parts, dtype=torch.float32)
    named: dict[str, torch.Tensor] = {}
    for prefix, (cache, slots, length) in zip(("", "extra_"), selections, strict=False):
        named[f"{prefix}kv_cache"] = pages_of(cache, cache_format)
        named[f"{prefix}indices"] = _whole_tiles(slots, KEYS_PER_TILE)
        if length is not None:
            named[f"{prefix}topk_length"] = length.contiguous()
    out = q.new_empty((*q.shape[:2], LATENT_DIM))
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    run = _sm120_wrapper(cache_format, q.device).run
    _run(run, cache_format, q=q, output=out, out_lse=lse, sm_scale=softmax_scale, **named, **scratch)
    return out[:, :num_heads], lse[:, :num_heads]


def _rows_per_call(num_tokens: int, cache: torch.Tensor, cache_format: str) -> int:
    """Its prefill reads rows of 656 bytes only without gaps between blocks; its decode reads any."""
    _, block_size, stride, _ = geometry(cache, cache_format)
    entry = FORMATS[cache_format]
    return num_tokens if entry.planar or stride == block_size * entry.bytes_per_token() else DECODE_TOKENS


# ---- SM100 ----------------------------------------------------------------------------------------------------------


def pages_and_rows(kv_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of 64 or 32, and slots as rows of 576 from the cache's beginning, where gaps between blocks count too."""
    num_blocks, block_size, _ = kv_cache.shape
    rows, gap = divmod(kv_cache.stride(0), ROW_DIM)
    if num_blocks == 1 or (gap, rows) == (0, block_size):
        page = next((page for page in TRTLLM_PAGES if num_blocks * block_size % page == 0), None)
        if page is not None:
            return kv_cache.view(-1, page, ROW_DIM), slots
    elif gap == 0 and block_size in TRTLLM_PAGES and num_blocks * rows < 2**31:
        return kv_cache, torch.where(slots < 0, -1, slots // block_size * rows + slots % block_size)
    raise NotImplementedError(
        "paged_sparse_attention: FlashInfer reads bf16 rows in pages of 32 or 64 that are whole rows apart, this "
        f"cache has {num_blocks} blocks of {block_size}, {kv_cache.stride(0)} elements apart"
    )


def packed(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Valid slots first, in order, then the first of them up to whole tiles; and how many are valid.

    Where none is, slot 0 counts as one.
    """
    num_tokens, topk = slots.shape
    valid = slots >= 0
    width = -(-topk // TRTLLM_TILE) * TRTLLM_TILE
    # invalid ones all go to a column of their own, which is cut off
    place = torch.where(valid, valid.cumsum(1) - 1, width)
    front = slots.new_zeros((num_tokens, width + 1)).scatter_(1, place, slots)[:, :width]
    counts = valid.sum(1, dtype=torch.int32)
    within = torch.arange(width, device=slots.device) < counts.unsqueeze(1)
    return torch.where(within, front, front[:, :1]), counts.clamp(min=1)


def _sm100(
    q: torch.Tensor, selections: list[Selection], softmax_scale: float, cache_format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """`[num_tokens, num_heads, 512]` and an lse in base 2."""
    ((cache, slots, _),) = selections
    num_tokens, num_heads, _ = q.shape
    q, softmax_scale = with_positive_scale(q, softmax_scale)
    q = _with_heads(q, num_heads if num_heads <= 64 else 128)
    heads = q.shape[1]
    pages, rows = pages_and_rows(cache, slots)
    indices, lengths = packed(rows)
    out = q.new_empty((num_tokens, 1, heads, LATENT_DIM))
    lse = q.new_empty((num_tokens, heads), dtype=torch.float32)
    workspace_bytes = TRTLLM_PARTIAL_BYTES + num_tokens * heads * TRTLLM_BYTES_PER_HEAD
    _run(
        api("trtllm_batch_decode_with_kv_cache_mla"),
        "trtllm-gen",
        query=q.unsqueeze(1),
        kv_cache=pages,
        workspace_buffer=torch.empty(workspace_bytes, dtype=torch.uint8, device=q.device),
        qk_nope_head_dim=128,
        kv_lora_rank=LATENT_DIM,
        qk_rope_head_dim=ROPE_DIM,
        block_tables=indices.unsqueeze(1),
        seq_lens=lengths,
        max_seq_len=indices.shape[1],
        sparse_mla_top_k=indices.shape[1],
        out=out,
        bmm1_scale=softmax_scale,
        backend="trtllm-gen",
        lse=lse,
        return_lse=True,
    )
    lse.masked_fill_((slots < 0).all(1, keepdim=True), -torch.inf)
    return out[:, 0, :num_heads], lse[:, :num_heads]


# ---- the ops --------------------------------------------------------------------------------------------------------


def _attend(
    q: torch.Tensor,
    selections: list[Selection],
    softmax_scale: float,
    cache_format: str,
    attn_sink: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    selections = [each for each in selections if each.cache.shape[0] and each.slots.shape[1]]
    num_tokens = q.shape[0]
    if num_tokens == 0 or not selections:
        return q.new_zeros((*q.shape[:2], LATENT_DIM)), torch.full(
            q.shape[:2], -torch.inf, dtype=torch.float32, device=q.device
        )
    if cache_format in PACKED:
        attend = _sm120
        step = min(_rows_per_call(num_tokens, each.cache, cache_format) for each in selections)
    else:
        attend = _sm100
        step = (TRTLLM_WORKSPACE_BYTES - TRTLLM_PARTIAL_BYTES) // (TRTLLM_BYTES_PER_HEAD * 128)
    parts = []
    for start in range(0, num_tokens, step):
        rows = slice(start, start + step)
        chosen = [
            Selection(cache, slots[rows], None if length is None else length[rows])
            for cache, slots, length in selections
        ]
        parts.append(with_sink(*attend(q[rows], chosen, softmax_scale, cache_format), attn_sink))
    out, lse = parts[0] if len(parts) == 1 else (torch.cat(part) for part in zip(*parts, strict=True))
    return out.contiguous(), lse.contiguous()


def compute_sparse(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots_or_minus_one(kv_cache, indices, cache_format, topk_length, block_table, req_id_per_token)
    selections = [Selection(kv_cache, slots, topk_length)]
    return _attend(whole_query(q, q_rope), selections, softmax_scale, cache_format, attn_sink)


def compute_extra(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    extra_kv_cache: torch.Tensor,
    extra_indices: torch.Tensor,
    extra_cache_format: str,
    *,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    extra_block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    slots = slots_or_minus_one(kv_cache, indices, cache_format, topk_length, block_table, req_id_per_token)
    extra_slots = slots_or_minus_one(
        extra_kv_cache, extra_indices, extra_cache_format, extra_topk_length, extra_block_table, req_id_per_token
    )
    selections = [Selection(kv_cache, slots, topk_length), Selection(extra_kv_cache, extra_slots, extra_topk_length)]
    return _attend(q, selections, softmax_scale, cache_format, attn_sink)


LOWERINGS = {
    "paged_sparse_attention": Lowering(into_buffers(compute_sparse), sparse_reason, compute_sparse),
    "paged_sparse_attention.extra": Lowering(into_buffers(compute_extra), sparse_reason, compute_extra),
}
