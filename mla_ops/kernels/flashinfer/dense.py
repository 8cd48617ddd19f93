"""An installed FlashInfer as a lowering of prefill_attention and of paged_attention over `bf16`.

FlashInfer divides its work on the host, by lengths that the contract keeps on the device: a call copies them and waits.
So it cannot be captured, but for one causal request with itself, whose kernel needs no plan (once an eager call has
compiled it). Its lse is in base 2, and its kernels must not see a block that does not exist. On Hopper its prefill
multiplies values behind a request by zero, so that what is not finite there goes where no request is beside another.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

import torch

from ...dispatch import Call, Lowering, Missing, device_capability, into_buffers, is_installed
from ...formats import LATENT_DIM, ROPE_DIM, geometry
from ..alignment import aligned
from ..reference.sparse_attention import whole_query, with_positive_scale
from ..torch_sdpa import empty_result, is_one_request_with_itself
from .installation import api, is_capturing, missing_installation

PREFILL_HEAD_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))
LATENT_AND_ROPE = (slice(0, LATENT_DIM), slice(LATENT_DIM, None))
WORKSPACE_BYTES = 256 * 2**20
# A prefill on Hopper plans 7 integers for each of up to 4096 tiles of each head, and has room for half of it by itself.
INT_WORKSPACE_BYTES = 16 * 2**20
# its plan holds 16384 pieces of work, and older versions write past them; a row of 128 heads is up to two, and a split
# one more
MAX_ROWS_PER_CALL = 4096


def _installation_reason(call: Call) -> str | None:
    if call.device.type != "cuda" or device_capability(call.device) < (8, 0):
        return f"it needs a GPU of compute capability 8.0 or later, these tensors are on {call.device}"
    missing = missing_installation()
    if missing is not None:
        return missing
    if not is_installed("triton"):
        return Missing(
            "what its kernels leave out is made by Triton kernels, and Triton is not installed: pip install triton"
        )
    return None


def prefill_reason(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"FlashInfer's ragged prefill takes bfloat16 or float16, these are {call.dtype}"
    if (call.head_dim, call.head_dim_v) not in PREFILL_HEAD_DIMS:
        known = ", ".join(f"{head_dim}/{head_dim_v}" for head_dim, head_dim_v in PREFILL_HEAD_DIMS)
        return f"FlashInfer has prefill kernels for head dims {known}, these are {call.head_dim}/{call.head_dim_v}"
    return _installation_reason(call)


def paged_reason(call: Call) -> str | None:
    if call.cache_format != "bf16" or call.head_dim != LATENT_DIM + ROPE_DIM:
        return (
            f"FlashInfer's MLA decode reads bf16 rows of {LATENT_DIM} + {ROPE_DIM}, this cache is {call.cache_format} "
            f"with rows of {call.head_dim}"
        )
    if call.dtype != torch.bfloat16:
        return f"FlashInfer's MLA decode takes queries of the cache's dtype, bfloat16, these are {call.dtype}"
    return _installation_reason(call)


def _refuse_capture(op: str, device: torch.device) -> None:
    """Not a reason for dispatch, which remembers its choice for calls outside of a capture."""
    if is_capturing(device):
        raise NotImplementedError(
            f"{op}: FlashInfer plans on the host, by lengths that are on the device: a CUDA graph that is being "
            "captured cannot wait for them, and would replay the plan of these"
        )


@functools.cache
def _plan_metadata() -> Any | None:
    """`MLAPlanMetadata`, where a plan takes its lengths and blocks in one; None where it takes them one by one."""
    taken = inspect.signature(api("BatchMLAPagedAttentionWrapper").plan).parameters
    return importlib.import_module("flashinfer.mla").MLAPlanMetadata if "metadata" in taken else None


def _backend(device: torch.device) -> str:
    """FlashInfer's choice between 3 and 2 on Hopper; elsewhere what returns an lse in base 2 for any shape."""
    return "auto" if device_capability(device)[0] == 9 else "fa2"


# A plan lies in pinned memory until the stream has copied it. The next plan of the same stream waits for its lengths,
# so by then it was.
_wrappers: dict[tuple[str, str, torch.device, int], Any] = {}
# Threads share wrappers where they share a stream: one plans, and runs what it planned, before another plans.
_planning = threading.Lock()


def _one_thread_at_a_time(compute: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compute)
    def locked(*args: Any, **kwargs: Any) -> Any:
        with _planning:
            return compute(*args, **kwargs)

    return locked


def _wrapper(name: str, backend: str, device: torch.device) -> Any:
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    wrapper = _wrappers.get((name, backend, device, stream))
    if wrapper is None:
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        wrapper = _wrappers[name, backend, device, stream] = api(name)(workspace, backend=backend)
        if name == "BatchPrefillWithRaggedKVCacheWrapper":
            integers = torch.empty(INT_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
            wrapper.reset_workspace_buffer(workspace, integers)
    return wrapper


def rows_without_keys(starts_q: torch.Tensor, starts_k: torch.Tensor, causal: bool) -> torch.Tensor:
    """Marks the rows of requests that see no key, `[starts_q[-1]]` bool; all on the host."""
    lens_q, lens_k = starts_q.diff(), starts_k.diff()
    blind = (lens_q - lens_k).clamp(min=0) if causal else torch.where(lens_k > 0, 0, lens_q)
    owner = torch.repeat_interleave(torch.arange(len(lens_q)), lens_q)
    return torch.arange(len(owner)) - starts_q[owner] < blind[owner]


def may_see_neighbours(backend: str, num_requests: int) -> bool:
    """Whether values of the next request are multiplied too, by zero, which is NaN where they are not finite.

    Hopper's kernel copies whole tiles and ends at the tensor's end; FlashAttention-2 fills with zeros behind a request.
    """
    return backend != "fa2" and num_requests > 1


def rows_per_call(max_keys: int) -> int:
    """Its kernel numbers the keys of all rows of a call in 32 bits."""
    return max(1, min(MAX_ROWS_PER_CALL, (2**31 - 1) // max_keys))


def _on_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies a tensor to the host in one copy."""
    return list(torch.cat(tensors).cpu().split([len(tensor) for tensor in tensors]))


def _single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, ...]:
    """Causal, as many keys as queries."""
    out, lse = api("single_prefill_with_kv_cache")(
        q, k, v, causal=True, sm_scale=softmax_scale, backend=_backend(q.device), return_lse=True
    )
    return out.contiguous(), lse * math.log(2)


@_one_thread_at_a_time
def compute_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    *,
    causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    from ..triton.dense_attention import clear_behind

    empty = empty_result(q, k, v, cu_seqlens_q)
    if empty is not None:
        return empty
    q, k, v = (aligned(tensor) for tensor in (q, k, v))
    num_tokens, num_heads, head_dim = q.shape
    _, num_kv_heads, head_dim_v = v.shape
    if causal and is_one_request_with_itself(q, k, cu_seqlens_q, cu_seqlens_k):
        out, lse = _single(q, k, v, softmax_scale)
        clear_behind(cu_seqlens_q, out, lse)
        return out, lse
    _refuse_capture("prefill_attention", q.device)
    backend = _backend(q.device)
    wanted = [cu_seqlens_q.clamp(max=num_tokens), cu_seqlens_k.clamp(max=k.shape[0])]
    if may_see_neighbours(backend, len(cu_seqlens_k) - 1):
        wanted.append(v.isfinite().all().int().view(1))
    starts_q, starts_k, *finite = _on_host(*wanted)
    if finite and not finite[0]:
        backend = "fa2"
    covered = int(starts_q[-1])
    out = q.new_zeros((num_tokens, num_heads, head_dim_v))
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
    if covered == 0 or starts_k[-1] == 0:
        return out, lse
    wrapper = _wrapper("BatchPrefillWithRaggedKVCacheWrapper", backend, q.device)
    wrapper.plan(
        qo_indptr=starts_q,
        kv_indptr=starts_k,
        num_qo_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim_qk=head_dim,
        head_dim_vo=head_dim_v,
        causal=causal,
        sm_scale=softmax_scale,
        q_data_type=q.dtype,
        kv_data_type=k.dtype,
    )
    rows, keys = slice(covered), slice(int(starts_k[-1]))
    wrapper.run(q[rows], k[keys], v[keys], out=out[rows], lse=lse[rows], return_lse=True)
    lse *= math.log(2)
    blind = rows_without_keys(starts_q, starts_k, causal)
    if blind.any():
        _clear(out[rows], lse[rows], blind.to(q.device))
    return out, lse


def _clear(out: torch.Tensor, lse: torch.Tensor, rows: torch.Tensor) -> None:
    out.masked_fill_(rows[:, None, None], 0)
    lse.masked_fill_(rows[:, None], -torch.inf)


def _plan_rows(
    wrapper: Any, blocks: torch.Tensor, lens: torch.Tensor, num_heads: int, block_size: int, softmax_scale: float
) -> None:
    """Every row a request of one query over its own `[num_rows, max_blocks]` blocks."""
    pages = (lens + block_size - 1) // block_size
    held = torch.arange(blocks.shape[1], device=blocks.device) < pages.unsqueeze(1)
    zero = torch.zeros(1, dtype=torch.int32)
    host_pages, host_lens = torch.stack((pages, lens)).cpu()
    csr = {
        "qo_indptr": torch.arange(len(lens) + 1, dtype=torch.int32),
        "kv_indptr": torch.cat((zero, host_pages.cumsum(0, dtype=torch.int32))),
        "kv_indices": blocks[held],
        "kv_len_arr": host_lens.contiguous(),
    }
    metadata = _plan_metadata()
    given = csr if metadata is None else {"metadata": metadata.csr(**csr), "lse_mode": "base2"}
    wrapper.plan(
        **given,
        num_heads=num_heads,
        head_dim_ckv=LATENT_DIM,
        head_dim_kpe=ROPE_DIM,
        page_size=block_size,
        causal=False,
        sm_scale=softmax_scale,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
    )


@_one_thread_at_a_time
def compute_paged(
    q: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    req_id_per_token: torch.Tensor,
    key_lens: torch.Tensor,
    softmax_scale: float,
    cache_format: str,
    *,
    q_rope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from ..triton.dense_attention import compact_blocks

    _refuse_capture("paged_attention", q.device)
    num_blocks, block_size, _, _ = geometry(kv_cache, cache_format)
    num_tokens, num_heads, _ = q.shape
    out = q.new_zeros((num_tokens, num_heads, LATENT_DIM))
    lse = torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device)
    if num_tokens == 0 or num_blocks == 0 or block_table.numel() == 0:
        return out, lse
    q, softmax_scale = with_positive_scale(whole_query(q, q_rope), softmax_scale)
    q = aligned(q)
    blocks, lens = compact_blocks(block_table, req_id_per_token, key_lens, num_blocks, block_size)
    wrapper = _wrapper("BatchMLAPagedAttentionWrapper", _backend(q.device), q.device)
    step = rows_per_call(blocks.shape[1] * block_size)
    for start in range(0, num_tokens, step):
        rows = slice(start, start + step)
        _plan_rows(wrapper, blocks[rows], lens[rows], num_heads, block_size, softmax_scale)
        results = {"out": out[rows], "lse": lse[rows], "return_lse": True}
        if _plan_metadata() is None:
            parts = (tensor[..., columns] for tensor in (q[rows], kv_cache) for columns in LATENT_AND_ROPE)
            wrapper.run(*parts, **results)
        else:
            wrapper.run(query=q[rows], kv_cache=kv_cache, **results)
    lse *= math.log(2)
    _clear(out, lse, lens == 0)
    return out, lse


LOWERINGS = {
    "prefill_attention": Lowering(into_buffers(compute_prefill), prefill_reason, compute_prefill),
    "paged_attention": Lowering(into_buffers(compute_paged), paged_reason, compute_paged),
}
