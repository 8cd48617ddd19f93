"""torch's own attention kernels as lowerings of prefill_attention: cuDNN's, and the FlashAttention-2 that is built in.

cuDNN's varlen form cannot be captured, so its batched form is used, for the one shape that it shares with a varlen
call: a single request whose queries are its keys. All else goes to FlashAttention-2, whose heads are of one width: what
is narrower is padded here. Both return tensors of their own and leave what lies behind the last request as it was.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..dispatch import Call, Lowering, Missing, device_capability, into_buffers, is_installed
from .alignment import aligned

HEAD_DIM_MULTIPLE = 8


def prefill_reason(call: Call) -> str | None:
    """A reason against torch's kernels, and against FlashAttention wherever it comes from."""
    if call.device.type != "cuda" or device_capability(call.device) < (8, 0):
        return f"it needs a GPU of compute capability 8.0 or later, these tensors are on {call.device}"
    if call.dtype not in (torch.bfloat16, torch.float16):
        return f"cuDNN and FlashAttention take bfloat16 or float16, these are {call.dtype}"
    if call.head_dim % HEAD_DIM_MULTIPLE or call.head_dim_v % HEAD_DIM_MULTIPLE:
        return (
            f"cuDNN and FlashAttention take head dims that are multiples of {HEAD_DIM_MULTIPLE}, these are "
            f"{call.head_dim} and {call.head_dim_v}"
        )
    if not is_installed("triton"):
        return Missing(
            "what lies behind the last request is cleared by a Triton kernel, and Triton is not installed: "
            "pip install triton"
        )
    return None


def is_one_request_with_itself(q: torch.Tensor, k: torch.Tensor, lens_q: torch.Tensor, lens_k: torch.Tensor) -> bool:
    """Causal from the top left is causal from the bottom right, and padding behind the request is seen by no query."""
    return (
        lens_q.shape[0] == 2
        and lens_q.data_ptr() == lens_k.data_ptr()
        and q.shape[0] == k.shape[0]
        and q.shape[1] == k.shape[1]
    )


def _cudnn(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    batched = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *batched, None, True, 0.0, True, False, scale=softmax_scale
    )
    # its layout is that of q
    return out[0].transpose(0, 1).contiguous(), lse.view(q.shape[1], q.shape[0])


def empty_result(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The result where there is nothing to launch a kernel for, else None."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens and k.shape[0] and cu_seqlens_q.shape[0] > 1:
        return None
    out = q.new_zeros((num_tokens, num_heads, v.shape[2]))
    return out, torch.full((num_tokens, num_heads), -torch.inf, dtype=torch.float32, device=q.device)


def pad_heads(width: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(F.pad(tensor, (0, width - tensor.shape[2])) for tensor in tensors)


def finish(
    out: torch.Tensor, theirs: torch.Tensor, head_dim_v: int, cu_seqlens_q: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The contract's out and lse, of outputs that may be padded and an lse `[num_heads, num_tokens]`.

    FlashAttention marks an empty row with +inf, and nobody writes what lies behind the last request.
    """
    from .triton.dense_attention import clear_behind

    out = out[..., :head_dim_v].contiguous()
    lse = torch.where(theirs == torch.inf, -torch.inf, theirs).t().contiguous()
    clear_behind(cu_seqlens_q, out, lse)
    return out, lse


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
    empty = empty_result(q, k, v, cu_seqlens_q)
    if empty is not None:
        return empty
    head_dim_v = v.shape[2]
    q, k, v = (aligned(tensor) for tensor in (q, k, v))
    if causal and is_one_request_with_itself(q, k, cu_seqlens_q, cu_seqlens_k):
        return finish(*_cudnn(q, k, v, softmax_scale), head_dim_v, cu_seqlens_q)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        *pad_heads(max(q.shape[2], head_dim_v), q, k, v),
        cu_seqlens_q.clamp(max=q.shape[0]),
        cu_seqlens_k.clamp(max=k.shape[0]),
        max_seqlen_q,
        max_seqlen_k,
        0.0,
        causal,
        False,
        scale=softmax_scale,
    )
    return finish(out, lse, head_dim_v, cu_seqlens_q)


LOWERINGS = {"prefill_attention": Lowering(into_buffers(compute_prefill), prefill_reason, compute_prefill)}
