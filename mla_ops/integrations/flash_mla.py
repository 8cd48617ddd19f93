"""The interface of FlashMLA over `torch.ops.mla`, for programs that were written for `flash_mla`.

    from mla_ops.integrations import flash_mla              # replaces `import flash_mla`
    mla_ops.integrations.flash_mla.install()                # or: `import flash_mla` resolves to this module
    python -m mla_ops.integrations.flash_mla program.py     # or: the same for a program that is not edited

Arguments, shapes and results are those of FlashMLA 1.0, and of the copies in vLLM 0.24 and 0.33 and in sgl-flash-mla
1.0: an lse of `[b, h_q, s_q]`, natural logarithm, +inf where a query sees no key. More is allowed: 1 to 128 heads,
any topk and page size, bfloat16 caches, `topk_length` with every format, indices out of range, and GPUs that FlashMLA
has no kernels for. Nothing is planned: metadata is accepted and ignored, so a step may be captured at one set of
lengths and replayed at others.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import ops
from ..formats import FORMATS, LATENT_DIM, PLAIN_FORMATS
from ..sizes import check_sizes

__all__ = [
    "FlashMLASchedMeta",
    "flash_mla_sparse_fwd",
    "flash_mla_with_kvcache",
    "get_mla_decoding_metadata",
    "get_mla_metadata",
    "install",
]

KV_FORMATS = {"V32": "fp8_ds_mla", "V4": "fp8_ds_mla_v4"}  # names of sgl-flash-mla, and ours

# lse of logits times this is their maximum times this, plus at most ln(topk): 16,384 equal keys leave 6e-7
MAX_LOGITS_FACTOR = 2.0**24

# whether `flash_mla_sparse_fwd` computes its second result; `install` sets it
_with_max_logits = True

flash_mla_interface = sys.modules[__name__]  # `import flash_mla.flash_mla_interface as name` finds it


@dataclass
class FlashMLASchedMeta:
    """FlashMLA's plan of a call. Nothing here needs one; the fields are those that its users look at."""

    have_initialized: bool = False
    config: object | None = None
    tile_scheduler_metadata: torch.Tensor | None = None
    num_splits: torch.Tensor | None = None


def get_mla_metadata(*_: object, **__: object) -> tuple[FlashMLASchedMeta, None]:
    """An empty plan, whatever the arguments: those of every release of FlashMLA are accepted."""
    return FlashMLASchedMeta(), None


def get_mla_decoding_metadata(*_: object, **__: object) -> tuple[None, None]:
    """The two fields of a plan, which stay empty: sgl-flash-mla plans a decode step ahead by this."""
    return None, None


def _expect(
    op: str, name: str, tensor: torch.Tensor | None, *shape: int | str, dtype: torch.dtype | None = torch.int32
) -> None:
    """Refuses a tensor of another shape or dtype; a name in `shape` is any size, None any dtype."""
    if tensor is None:
        return
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {tensor.dtype}")
    sizes = zip(tensor.shape, shape, strict=False)
    if tensor.dim() != len(shape) or any(size != want for size, want in sizes if isinstance(want, int)):
        raise ValueError(f"{op}: {name} must have shape [{', '.join(map(str, shape))}], got {list(tensor.shape)}")


def _refuse_none(op: str, **tensors: torch.Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is None:
            raise TypeError(f"{op}: {name} must be a tensor, got None")


def _rows(cache: torch.Tensor, name: str, op: str) -> tuple[torch.Tensor, str]:
    """A cache as the ops take it, `[num_blocks, block_size, row_width]`, and its format."""
    if cache.dim() != 4:
        raise ValueError(f"{op}: {name} must have shape [num_blocks, page_size, 1, row], got {list(cache.shape)}")
    if cache.shape[2] != 1:
        raise NotImplementedError(
            f"{op}: {name} has {cache.shape[2]} key heads; multi-head latent attention has one, and so have the kernels"
        )
    rows = cache.squeeze(2)
    if cache.element_size() == 1:
        for entry in FORMATS.values():
            if entry.quantized and not entry.index_only and cache.shape[3] in entry.row_widths:
                return (rows if rows.dtype == torch.uint8 else rows.view(torch.uint8)), entry.name
        raise ValueError(
            f"{op}: rows of {name} must be 656 bytes (fp8_ds_mla) or 584 (fp8_ds_mla_v4), got {cache.shape[3]}"
        )
    if cache.dtype in PLAIN_FORMATS:
        return rows, PLAIN_FORMATS[cache.dtype]
    raise TypeError(f"{op}: {name} must be of 8-bit elements, bfloat16, float16 or float32, got {cache.dtype}")


def _outward(lse: torch.Tensor) -> torch.Tensor:
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _per_token(length: torch.Tensor | None, s_q: int) -> torch.Tensor | None:
    # one request's would be a view of stride 0
    return None if length is None else length.unsqueeze(1).expand(-1, s_q).reshape(-1).contiguous()


def _check_decode_shapes(
    op: str,
    sizes: tuple[int, int, int],
    *,
    indices: torch.Tensor | None,
    extra_indices_in_kvcache: torch.Tensor | None,
    topk_length: torch.Tensor | None,
    extra_topk_length: torch.Tensor | None,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    out: torch.Tensor | None,
) -> None:
    """Refuses what does not have the `b`, `s_q` and `h_q` of q. Beside indices, two arguments are not read."""
    b, s_q, h_q = sizes
    _expect(op, "indices", indices, b, s_q, "topk")
    _expect(op, "extra_indices_in_kvcache", extra_indices_in_kvcache, b, s_q, "topk")
    _expect(op, "topk_length", topk_length, b)
    _expect(op, "extra_topk_length", extra_topk_length, b)
    read = torch.int32 if indices is None else None
    _expect(op, "block_table", block_table, b, "max_blocks", dtype=read)
    _expect(op, "cache_seqlens", cache_seqlens, b, dtype=read)
    _expect(op, "out", out, b, s_q, h_q, LATENT_DIM, dtype=None)
    if out is not None and b > 1 and s_q > 1 and out.stride(0) != s_q * out.stride(1):
        raise ValueError(f"{op}: out must be contiguous, got strides {out.stride()}")


def _attend_to_all(
    queries: torch.Tensor,
    cache: torch.Tensor,
    cache_format: str,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    scale: float,
    s_q: int,
    causal: bool,
    options: dict[str, Any],
) -> None:
    """Dense attention; `causal`: the last of a request's `s_q` queries stands beside its last key."""
    steps = torch.arange(len(queries), dtype=torch.int32, device=queries.device)
    requests = steps // s_q if s_q else steps
    lengths = cache_seqlens.unsqueeze(1).expand(-1, s_q)
    if causal:
        lengths = lengths - torch.arange(s_q - 1, -1, -1, dtype=torch.int32, device=queries.device)
    lengths = lengths.reshape(-1).contiguous()
    torch.ops.mla.paged_attention.out(queries, cache, block_table, requests, lengths, scale, cache_format, **options)


def flash_mla_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
    cache_seqlens: torch.Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool | None = None,
    indices: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None,
    extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    extra_topk_length: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    enable_batch_invariant: bool = False,
    use_legacy: bool | None = None,
    kv_format: str | None = None,
    descale_q: torch.Tensor | None = None,
    descale_k: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a decode step over a paged cache: to chosen keys if `indices` is given, to all keys otherwise.

    Args:
        q: `[b, s_q, h_q, head_dim]`, 576 or 512 wide, 1 to 128 heads.
        k_cache: `[num_blocks, page_size, 1, row]`: rows of 656 or 584 bytes, of float8_e4m3fn, int8 or uint8, or keys
            of q's dtype. In a compiled program pass uint8: torch 2.11 and 2.12 clone a cache that is seen as another
            dtype.
        block_table, cache_seqlens: `[b, max_blocks]` and `[b]` int32, of dense attention. Entries past a request's end
            may hold anything.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: ignored.
        softmax_scale: None is `head_dim**-0.5`.
        causal: of dense attention: the last query stands beside the last key.
        is_fp8_kvcache: None follows from `k_cache`; anything else must agree with it.
        indices: `[b, s_q, topk]` int32 slots. Out of the cache: not attended.
        attn_sink: `[h_q]` float32, of sparse attention.
        extra_k_cache, extra_indices_in_kvcache: a second cache and the slots in it.
        topk_length, extra_topk_length: `[b]` int32, one value for the queries of a request.
        out: `[b, s_q, h_q, 512]` contiguous; written and returned.
        enable_batch_invariant: a row's bits do not depend on the others.
        use_legacy: ignored.
        kv_format: None follows from `k_cache`; "V32" or "V4" must agree with it.
        descale_q, descale_k: refused: keys with one scale a tensor are not known here.

    Returns:
        out `[b, s_q, h_q, 512]` and lse `[b, h_q, s_q]` float32.
    """
    op = "flash_mla_with_kvcache"
    _refuse_none(op, q=q, k_cache=k_cache)
    _expect(op, "q", q, "b", "s_q", "h_q", "head_dim", dtype=None)
    if head_dim_v != LATENT_DIM:
        raise ValueError(f"{op}: head_dim_v must be {LATENT_DIM}, got {head_dim_v}")
    if descale_q is not None or descale_k is not None:
        raise NotImplementedError(f"{op}: descale_q and descale_k go with one scale a tensor, which no format here has")
    cache, cache_format = _rows(k_cache, "k_cache", op)
    if is_fp8_kvcache is not None and is_fp8_kvcache != FORMATS[cache_format].quantized:
        raise ValueError(f"{op}: is_fp8_kvcache is {is_fp8_kvcache}, but k_cache is {cache_format}")
    if kv_format is not None and KV_FORMATS.get(kv_format) != cache_format:
        raise ValueError(f"{op}: kv_format is {kv_format}, of {', '.join(KV_FORMATS)}, but k_cache is {cache_format}")
    b, s_q, h_q, head_dim = q.shape
    _check_decode_shapes(
        op,
        (b, s_q, h_q),
        indices=indices,
        extra_indices_in_kvcache=extra_indices_in_kvcache,
        topk_length=topk_length,
        extra_topk_length=extra_topk_length,
        block_table=block_table,
        cache_seqlens=cache_seqlens,
        out=out,
    )
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    queries = q.reshape(b * s_q, h_q, head_dim)
    flat_out = queries.new_empty(b * s_q, h_q, LATENT_DIM) if out is None else out.view(b * s_q, h_q, LATENT_DIM)
    lse = torch.empty(b * s_q, h_q, dtype=torch.float32, device=q.device)
    options = {"deterministic": enable_batch_invariant, "out": flat_out, "lse": lse}
    if indices is None:
        sparse_only = (attn_sink, extra_k_cache, extra_indices_in_kvcache, topk_length, extra_topk_length)
        if any(argument is not None for argument in sparse_only):
            raise ValueError(f"{op}: attn_sink, topk_length and the extra cache go with indices, which is None")
        if block_table is None or cache_seqlens is None:
            raise ValueError(f"{op}: without indices, block_table and cache_seqlens must be given")
        _attend_to_all(queries, cache, cache_format, block_table, cache_seqlens, scale, s_q, causal, options)
    else:
        if causal:
            raise ValueError(f"{op}: causal goes with dense attention; indices say which keys a query sees")
        options |= {"attn_sink": attn_sink, "topk_length": _per_token(topk_length, s_q)}
        chosen = queries, cache, indices.flatten(0, 1), scale, cache_format
        if extra_k_cache is not None and extra_indices_in_kvcache is not None:
            extra, extra_format = _rows(extra_k_cache, "extra_k_cache", op)
            torch.ops.mla.paged_sparse_attention.extra_out(
                *chosen,
                extra,
                extra_indices_in_kvcache.flatten(0, 1),
                extra_format,
                extra_topk_length=_per_token(extra_topk_length, s_q),
                **options,
            )
        elif extra_k_cache is not None or extra_indices_in_kvcache is not None or extra_topk_length is not None:
            raise ValueError(f"{op}: an extra cache takes extra_k_cache and extra_indices_in_kvcache")
        else:
            torch.ops.mla.paged_sparse_attention.out(*chosen, **options)
    answer = flat_out.view(b, s_q, h_q, LATENT_DIM) if out is None else out
    return answer, _outward(lse).view(b, s_q, h_q).transpose(1, 2)


def flash_mla_sparse_fwd(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None,
    *,
    indexer_topk: int = 0,
    out: torch.Tensor | None = None,
    use_legacy: bool | None = None,
    return_log2_lse: bool | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """Attention of each query to the keys chosen for it, from flat keys.

    Args:
        q: `[s_q, h_q, head_dim]`, 576 or 512 wide, 1 to 128 heads.
        kv: `[s_kv, 1, head_dim]` of q's dtype.
        indices: `[s_q, 1, topk]` int32 rows of `kv`; outside `[0, s_kv)`: not attended.
        sm_scale: multiplies `q @ k`.
        d_v: 512.
        attn_sink: `[h_q]` float32.
        topk_length: `[s_q]` int32.
        indexer_topk: above 0, a fourth result: the lse over the first so many columns of `indices`, by one more call.
        out: `[s_q, h_q, 512]` contiguous; written and returned.
        use_legacy: ignored.
        return_log2_lse: False leaves out both logarithms; True is refused, since they are natural.

    Returns:
        out `[s_q, h_q, 512]`; max_logits `[s_q, h_q]` float32, the largest `sm_scale * q @ k` of a row, -inf for none,
        at most `ln(topk) / 2**24` too large; lse `[s_q, h_q]` float32, +inf where a query sees no key. max_logits is a
        second call of attention. A compiled graph that does not use it drops it; `install(max_logits=False)` returns
        None in its place.
    """
    op = "flash_mla_sparse_fwd"
    _refuse_none(op, q=q, kv=kv, indices=indices)
    if kv.dim() != 3 or indices.dim() != 3:
        raise ValueError(
            f"{op}: kv and indices must have shapes [s_kv, 1, head_dim] and [s_q, 1, topk], got {list(kv.shape)} and "
            f"{list(indices.shape)}"
        )
    if kv.shape[1] != 1 or indices.shape[1] != 1:
        raise NotImplementedError(
            f"{op}: kv has {kv.shape[1]} key heads and indices {indices.shape[1]}; the kernels have one"
        )
    if d_v != LATENT_DIM:
        raise ValueError(f"{op}: d_v must be {LATENT_DIM}, got {d_v}")
    (indexer_topk,) = check_sizes(op, 0, most=indices.shape[2], indexer_topk=indexer_topk)
    if return_log2_lse:
        raise NotImplementedError(f"{op}: return_log2_lse: results are natural logarithms")
    keys, chosen = kv.squeeze(1), indices.squeeze(1)
    if out is None:
        answer, lse = ops.sparse_attention(q, keys, chosen, sm_scale, topk_length=topk_length, attn_sink=attn_sink)
    else:
        answer, lse = out, torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        torch.ops.mla.sparse_attention.out(
            q, keys, chosen, sm_scale, topk_length=topk_length, attn_sink=attn_sink, out=out, lse=lse
        )
    if return_log2_lse is False:
        return answer, None, None
    of_indexer: tuple[torch.Tensor, ...] = ()
    if indexer_topk:
        length = None if topk_length is None else topk_length.clamp(max=indexer_topk)
        _, first = ops.sparse_attention(q, keys, chosen[:, :indexer_topk], sm_scale, topk_length=length)
        of_indexer = (_outward(first),)
    max_logits = None
    if _with_max_logits:
        # a power of two rounds nothing; every weight but those of the largest logit vanishes
        _, scaled = ops.sparse_attention(q, keys, chosen, sm_scale * MAX_LOGITS_FACTOR, topk_length=topk_length)
        max_logits = scaled / MAX_LOGITS_FACTOR
    return answer, max_logits, _outward(lse), *of_indexer


def install(*, max_logits: bool = True) -> None:
    """Makes `import flash_mla` resolve to this module, in this process.

    Args:
        max_logits: whether `flash_mla_sparse_fwd` computes its second result, which costs as much as the first.

    Raises:
        RuntimeError: another `flash_mla` has been imported; what it gave away cannot be taken back.
    """
    global _with_max_logits
    module = sys.modules[__name__]
    present = sys.modules.get("flash_mla")
    if present is not None and present is not module:
        raise RuntimeError(
            f"mla_ops.integrations.flash_mla.install: flash_mla is imported already, as {present}; "
            "call install() before the first `import flash_mla`"
        )
    _with_max_logits = max_logits
    sys.modules["flash_mla"] = sys.modules["flash_mla.flash_mla_interface"] = module


def main(arguments: list[str]) -> None:
    """Runs a program as `python program.py ...` would, with this module in the place of `flash_mla`."""
    if not arguments:
        raise SystemExit("usage: python -m mla_ops.integrations.flash_mla program.py [argument ...]")
    if not Path(arguments[0]).exists():
        raise SystemExit(f"there is no program {arguments[0]}")
    importlib.import_module(".flash_mla", __package__).install()  # not of `__main__`, which this file is now
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
