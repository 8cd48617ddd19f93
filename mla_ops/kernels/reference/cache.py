"""Cache ops in plain PyTorch: what the bytes mean."""

from __future__ import annotations

import torch

from ...dispatch import Lowering
from ...formats import LATENT_DIM, ROPE_DIM

E4M3_NAN = 0x7F


def power_of_two_scale(amax: torch.Tensor) -> torch.Tensor:
    """`2 ** ceil(log2(max(amax / 448, 1e-4)))` for finite float32 `amax >= 0`, in integer arithmetic.

    448 is 1.75 * 2**8, so the exponent is that of `amax`, less 8, plus one if the mantissa is above 1.75.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return ((exponent.clamp(min=-13) + 127) << 23).view(torch.float32)


def quantize_fp8_ds_mla(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`[n, 512]` and `[n, 64]` of any float dtype to `[n, 656]` bytes.

    The scale of a group follows from its finite values; NaN and infinities become NaN where they stand and touch
    nothing else.
    """
    groups = latent.float().view(-1, LATENT_DIM // 128, 128)
    finite = groups.isfinite()
    scale = power_of_two_scale(torch.where(finite, groups.abs(), 0.0).amax(-1))
    e4m3 = torch.where(finite, groups / scale.unsqueeze(-1), 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    e4m3 = torch.where(finite, e4m3, E4M3_NAN).view(-1, LATENT_DIM)
    return torch.cat((e4m3, scale.view(torch.uint8), rope.to(torch.bfloat16).contiguous().view(torch.uint8)), dim=1)


def dequantize_fp8_ds_mla(rows: torch.Tensor) -> torch.Tensor:
    """`[n, 656]` bytes to `[n, 576]` float32."""
    rows = rows.contiguous()
    e4m3 = rows[:, :LATENT_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[:, LATENT_DIM : LATENT_DIM + 16].contiguous().view(torch.float32)
    rope = rows[:, LATENT_DIM + 16 :].contiguous().view(torch.bfloat16).float()
    return torch.cat(((e4m3.view(-1, 4, 128) * scale.unsqueeze(-1)).view(-1, LATENT_DIM), rope), dim=1)


def read_slots(kv_cache: torch.Tensor, slots: torch.Tensor, cache_format: str) -> torch.Tensor:
    """Keys at `slots` (int64, any shape, all valid) as float32, `slots.shape + (head_dim,)`."""
    block_size = kv_cache.shape[1]
    width = kv_cache.shape[2]
    rows = kv_cache[slots // block_size, slots % block_size]
    if cache_format == "fp8_ds_mla":
        return dequantize_fp8_ds_mla(rows.view(-1, width)).view(*slots.shape, LATENT_DIM + ROPE_DIM)
    return rows.float()


def concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    num_blocks, block_size, _ = kv_cache.shape
    num_rows = min(slot_mapping.shape[0], kv_c.shape[0])
    slots = slot_mapping[:num_rows]
    written = ((slots >= 0) & (slots < num_blocks * block_size)).nonzero().squeeze(1)
    slots, latent, rope = slots[written], kv_c[written], k_pe[written]
    if cache_format == "fp8_ds_mla":
        rows = quantize_fp8_ds_mla(latent, rope)
    else:
        rows = torch.cat((latent, rope), dim=1).to(kv_cache.dtype)
    kv_cache[slots // block_size, slots % block_size] = rows


def gather_cache(
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seq_lens: torch.Tensor,
    num_rows: int,
    cache_format: str,
    *,
    gather_lens: torch.Tensor | None = None,
    offset: int = 0,
    out: torch.Tensor,
) -> None:
    num_blocks, block_size, _ = kv_cache.shape
    num_requests, max_blocks = block_table.shape
    if num_requests == 0:
        return
    lens = seq_lens.clamp(min=0)
    if gather_lens is not None:
        lens = torch.minimum(lens, gather_lens.clamp(min=0))
    row = torch.arange(num_rows, device=out.device) - offset
    request = torch.searchsorted(cu_seq_lens[1:].long(), row, right=True).clamp(max=num_requests - 1)
    index = row - cu_seq_lens[request]
    covered = (index >= 0) & (index < lens[request]) & (row < cu_seq_lens[request + 1])
    position = index + seq_lens[request] - lens[request]
    column = position // block_size
    block = block_table[request, column.clamp(0, max_blocks - 1)] if max_blocks else torch.full_like(request, -1)
    readable = covered & (column < max_blocks) & (block >= 0) & (block < num_blocks)
    slots = block.long() * block_size + position % block_size
    out[covered & ~readable] = 0
    chosen = readable.nonzero().squeeze(1)
    for part in chosen.split(65536):
        out[part] = read_slots(kv_cache, slots[part], cache_format).to(out.dtype)


LOWERINGS = {"concat_and_cache": Lowering(concat_and_cache), "gather_cache": Lowering(gather_cache)}
