"""Exact softmax merge in plain PyTorch."""

from __future__ import annotations

import torch

from ...dispatch import Lowering


def merge_attention_states(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    merge_attention_states_stacked(torch.stack((out_a, out_b)), torch.stack((lse_a, lse_b)), out=out, lse=lse)


def merge_attention_states_stacked(
    outs: torch.Tensor, lses: torch.Tensor, *, out: torch.Tensor, lse: torch.Tensor
) -> None:
    if outs.shape[0] == 0:
        out.zero_()
        lse.fill_(-torch.inf)
        return
    # some kernels mark an empty row with +inf
    lses = torch.where(lses == torch.inf, -torch.inf, lses)
    lse_max = lses.amax(0)
    safe_max = torch.where(lse_max == -torch.inf, 0.0, lse_max)
    weights = (lses - safe_max).exp()
    total = weights.sum(0)
    safe = torch.where(total == 0, 1.0, total)
    merged = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    # an empty part may hold anything, NaN included
    for part, weight in zip(outs, weights, strict=True):
        merged += torch.where((weight == 0).unsqueeze(-1), 0.0, part.float() * (weight / safe).unsqueeze(-1))
    out.copy_(merged)
    lse.copy_(torch.where(total == 0, -torch.inf, safe_max + safe.log()))


LOWERINGS = {
    "merge_attention_states": Lowering(merge_attention_states),
    "merge_attention_states.stacked": Lowering(merge_attention_states_stacked),
}
