"""FlashMLA's Hopper kernels as lowerings, from whichever installed package carries a build of them.

FlashMLA takes 64 or 128 heads, survives no invalid index but -1, has no lengths for 656-byte rows, marks empty rows
with +inf and ends the process on some inputs. This adapter holds the library's contract over it: heads are padded here,
indices are translated, masked and padded first, tokens are cut into chunks that its schedule and its int32 offsets can
take. The package's Python side is never imported: its extension is loaded alone.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from ..dispatch import Call, Lowering, Missing, is_installed
from ..formats import LATENT_DIM, geometry
from .alignment import aligned
from .reference.sparse_attention import slots_or_minus_one, whole_query, with_positive_scale

# its planning kernel keeps 20 bytes a row in shared memory and exits the process when they do not fit; below this
# chunk no offset of 64 or 128 heads reaches 2**31 either
MAX_ROWS_PER_CALL = 8192
DECODE_TOPK_MULTIPLE = 64
DENSE_BLOCK_SIZE = 64
PREFILL_TOPK_MULTIPLE = 128


@dataclass(frozen=True)
class Provider:
    """A package that ships FlashMLA's Hopper kernels.

    Attributes:
        package: what `find_spec` looks for, without importing it.
        library: glob of the extension inside the package.
        namespace: where the extension registers its ops, in `torch.ops`.
        prefill_lse_base: base of the logarithm that its prefill returns.
    """

    package: str
    library: str
    namespace: str
    prefill_lse_base: float = math.e


PROVIDERS = (
    Provider("flash_mla", "*legacy*.so", "flash_mla_legacy"),
    Provider("sgl_kernel", "flashmla_ops*.so", "sgl_kernel", prefill_lse_base=2.0),
    Provider("vllm", "_flashmla_C*.so", "_flashmla_C"),
)


def _library_path(provider: Provider) -> Path | None:
    if not is_installed(provider.package):
        return None
    spec = importlib.util.find_spec(provider.package)
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(root).glob(provider.library)):
            return path
    return None


@functools.cache
def find_provider() -> tuple[Provider | None, str]:
    """The first provider whose extension loads, or None; and why, for each that did not."""
    reasons = []
    for provider in PROVIDERS:
        path = _library_path(provider)
        if path is None:
            reasons.append(f"{provider.package} is not installed, or has no {provider.library}")
            continue
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            reasons.append(f"{path.name} of {provider.package} does not load here ({error})")
            continue
        if hasattr(getattr(torch.ops, provider.namespace), "sparse_decode_fwd"):
            return provider, ""
        reasons.append(f"{provider.package} has no sparse_decode_fwd")
    return None, "; ".join(reasons)


def _provider_reason(call: Call) -> str | None:
    if call.dtype != torch.bfloat16:
        return f"FlashMLA takes bfloat16 queries, these are {call.dtype}"
    provider, reason = find_provider()
    return None if provider is not None else Missing(f"no FlashMLA build for Hopper was found: {reason}")


def paged_reason(call: Call) -> str | None:
    if call.cache_format != "fp8_ds_mla":
        return f"FlashMLA's sparse decode reads fp8_ds_mla only, this cache is {call.cache_format}"
    return _provider_reason(call)


def dense_reason(call: Call) -> str | None:
    if call.cache_format != "bf16" or call.head_dim != 576 or call.block_size != DENSE_BLOCK_SIZE:
        return (
            f"FlashMLA's dense decode reads bf16 rows of 576 in blocks of {DENSE_BLOCK_SIZE}, this cache is "
            f"{call.cache_format} with rows of {call.head_dim} in blocks of {call.block_size}"
        )
    if not is_installed("triton"):
        return Missing(
            "its tables of blocks are made by a Triton kernel, and Triton is not installed: pip install triton"
        )
    reason = _provider_reason(call)
    provider, _ = find_provider()
    if provider is not None and not hasattr(getattr(torch.ops, provider.namespace), "dense_decode_fwd"):
        return Missing(f"the FlashMLA of {provider.package} has no dense_decode_fwd: install a newer one")
    return reason


def padded_heads(num_heads: int) -> int:
    return 64 if num_heads <= 64 else 128


def pad_query(q: torch.Tensor) -> torch.Tensor:
    missing = padded_heads(q.shape[1]) - q.shape[1]
    return F.pad(q, (0, 0, 0, missing)) if missing else aligned(q)


def pad_sink(attn_sink: torch.Tensor | None) -> torch.Tensor | None:
    if attn_sink is None:
        return None
    missing = padded_heads(attn_sink.shape[0]) - attn_sink.shape[0]
    return F.pad(attn_sink, (0, missing)) if missing else aligned(attn_sink.contiguous())


def _pad_indices(indices: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -indices.shape[1] % multiple
    return F.pad(indices, (0, missing), value=-1) if missing else aligned(indices)


def _write_lse(lse: torch.Tensor, theirs: torch.Tensor) -> None:
    lse.copy_(torch.where(theirs == torch.inf, -torch.inf, theirs))


def _fill_empty(out: torch.Tensor, lse: torch.Tensor) -> None:
    out.zero_()
    lse.fill_(-torch.inf)


def defaults(op: torch._ops.OpOverload, given: int) -> tuple[object, ...]:
    """Defaults for the arguments by which the packages' copies differ."""
    return tuple(
        argument.default_value if argument.has_default_value() else None for argument in op._schema.arguments[given:]
    )


def paged_sparse_attention(
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
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    if kv_cache.shape[0] == 0 or indices.shape[1] == 0:
        _fill_empty(out, lse)
        return
    slots = slots_or_minus_one(kv_cache, indices, cache_format, topk_length, block_table, req_id_per_token)
    slots = _pad_indices(slots, DECODE_TOPK_MULTIPLE)
    q, softmax_scale = with_positive_scale(whole_query(q, q_rope), softmax_scale)
    q, attn_sink = pad_query(q), pad_sink(attn_sink)
    provider, _ = find_provider()
    assert provider is not None
    op = getattr(torch.ops, provider.namespace).sparse_decode_fwd.default
    kv = kv_cache.unsqueeze(2)
    for start in range(0, num_tokens, MAX_ROWS_PER_CALL):
        rows = slice(start, start + MAX_ROWS_PER_CALL)
        arguments = (
            q[rows].unsqueeze(1),
            kv,
            slots[rows].unsqueeze(1),
            None,  # topk_length: not for 656-byte rows; -1 tails stand for it
            attn_sink,
            None,  # its schedule: planned inside the call, on the device
            None,
            None,
            None,
            None,
            LATENT_DIM,
            softmax_scale,
        )
        result, result_lse, *_ = op(*arguments, *defaults(op, len(arguments)))
        out[rows] = result[:, 0, :num_heads]
        _write_lse(lse[rows], result_lse[:, :num_heads, 0])


def sparse_attention(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    softmax_scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    num_tokens, num_heads, _ = q.shape
    if num_tokens == 0:
        return
    if kv.shape[0] == 0 or indices.shape[1] == 0:
        _fill_empty(out, lse)
        return
    provider, _ = find_provider()
    assert provider is not None
    op = getattr(torch.ops, provider.namespace).sparse_prefill_fwd.default
    indices = _pad_indices(indices, PREFILL_TOPK_MULTIPLE)
    q, softmax_scale = with_positive_scale(q, softmax_scale)
    arguments = (
        pad_query(q),
        aligned(kv).unsqueeze(1),
        indices.unsqueeze(1),
        softmax_scale,
        LATENT_DIM,
        pad_sink(attn_sink),
        None if topk_length is None else topk_length.clamp(0, indices.shape[1]),
    )
    result, _, result_lse = op(*arguments, *defaults(op, len(arguments)))
    out.copy_(result[:, :num_heads])
    _write_lse(lse, result_lse[:, :num_heads] * math.log(provider.prefill_lse_base))


def paged_attention(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    from .triton.dense_attention import compact_blocks

    num_blocks, block_size, _, _ = geometry(kv_cache, cache_format)
    num_tokens = q.shape[0]
    if num_tokens == 0:
        return
    if num_blocks == 0 or block_table.numel() == 0:
        _fill_empty(out, lse)
        return
    blocks, lens = compact_blocks(block_table, req_id_per_token, key_lens, num_blocks, block_size)
    provider, _ = find_provider()
    assert provider is not None
    op = getattr(torch.ops, provider.namespace).dense_decode_fwd.default
    q, softmax_scale = with_positive_scale(whole_query(q, q_rope), softmax_scale)
    q, kv = aligned(q), kv_cache.unsqueeze(2)
    for start in range(0, num_tokens, MAX_ROWS_PER_CALL):
        rows = slice(start, start + MAX_ROWS_PER_CALL)
        # not causal: every token is a request of one query; its schedule is planned inside the call, on the device
        arguments = (q[rows].unsqueeze(1), kv, LATENT_DIM, lens[rows], blocks[rows], softmax_scale, False, None, None)
        result, result_lse, *_ = op(*arguments, *defaults(op, len(arguments)))
        out[rows] = result[:, 0]
        _write_lse(lse[rows], result_lse[:, :, 0])


LOWERINGS = {
    "paged_attention": Lowering(paged_attention, dense_reason),
    "paged_sparse_attention": Lowering(paged_sparse_attention, paged_reason),
    "sparse_attention": Lowering(sparse_attention, _provider_reason),
}
