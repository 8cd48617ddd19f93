"""Cache ops in plain PyTorch: what the bytes mean."""

from __future__ import annotations

import torch

from ...dispatch import Lowering
from ...formats import FORMATS, LATENT_DIM, geometry, planar_views

E4M3_NAN = 0x7F
NAN_BITS = {
    torch.bfloat16: (torch.int16, 0x7FC0),
    torch.float16: (torch.int16, 0x7E00),
    torch.float32: (torch.int32, 0x7FC00000),
}
FP8, V4 = FORMATS["fp8_ds_mla"], FORMATS["fp8_ds_mla_v4"]


def power_of_two_exponent(amax: torch.Tensor, lowest: int) -> torch.Tensor:
    """`max(ceil(log2(amax / 448)), lowest)` for finite float32 `amax >= 0`, as int32, in integer arithmetic.

    448 is 1.75 * 2**8, so the exponent is that of `amax`, less 8, plus one if the mantissa is above 1.75. `lowest` says
    where the formats put their floor: -13 is `max(amax / 448, 1e-4)`, -22 is `max(amax, 1e-4) / 448`.
    """
    bits = amax.view(torch.int32)
    exponent = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).to(torch.int32)
    return exponent.clamp(min=lowest)


def quantize_groups(latent: torch.Tensor, group_size: int, lowest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, d]` of any float dtype to e4m3 bytes `[n, d]` and the exponents of their scales, `[n, d / group_size]`.

    The scale of a group follows from its finite values; NaN and infinities become NaN where they stand and touch
    nothing else.
    """
    num_rows, width = latent.shape
    groups = latent.float().reshape(num_rows, width // group_size, group_size)
    finite = groups.isfinite()
    exponent = power_of_two_exponent(torch.where(finite, groups.abs(), 0.0).amax(-1), lowest)
    scale = ((exponent + 127) << 23).view(torch.float32).unsqueeze(-1)
    e4m3 = torch.where(finite, groups / scale, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(finite, e4m3, E4M3_NAN).view(num_rows, width), exponent


def convert(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Converts to another float type, NaN to `NAN_BITS`; torch's own conversion leaves its bits to the machine."""
    if values.dtype == dtype:
        return values
    converted = values.to(dtype)
    integer, bits = NAN_BITS[dtype]
    return converted.view(integer).masked_fill(converted.isnan(), bits).view(dtype)


def rope_bytes(rope: torch.Tensor) -> torch.Tensor:
    return convert(rope, torch.bfloat16).contiguous().view(torch.uint8)


def quantize_fp8_ds_mla(latent: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """`[n, 512]` and `[n, 64]` of any float dtype to bytes, `[n, FP8.row_bytes]`."""
    e4m3, exponent = quantize_groups(latent, 128, -13)
    return torch.cat((e4m3, ((exponent + 127) << 23).view(torch.uint8), rope_bytes(rope)), dim=1)


def quantize_fp8_ds_mla_v4(latent: torch.Tensor, rope: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`[n, 448]` and `[n, 64]` of any float dtype to bytes of data and, `[n, 8]`, of scales, the last 0."""
    e4m3, exponent = quantize_groups(latent, 64, -22)
    scales = torch.nn.functional.pad((exponent + 127).to(torch.uint8), (0, 1))
    return torch.cat((e4m3, rope_bytes(rope)), dim=1), scales


def dequantize_fp8_ds_mla(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes, `[n, FP8.row_bytes]`, to the latent, `[n, 512]` float32, and the RoPE part, `[n, 64]` bfloat16."""
    rows = rows.contiguous()
    e4m3 = rows[:, :LATENT_DIM].contiguous().view(torch.float8_e4m3fn).float()
    scale = rows[:, LATENT_DIM : FP8.rope_at].contiguous().view(torch.float32)
    rope = rows[:, FP8.rope_at :].contiguous().view(torch.bfloat16)
    return (e4m3.view(-1, 4, 128) * scale.unsqueeze(-1)).view(-1, LATENT_DIM), rope


def dequantize_fp8_ds_mla_v4(data: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes of data and, `[n, 8]`, of scales to the latent, `[n, 448]` float32, and the RoPE part, `[n, 64]` bfloat16.

    A scale's byte is its exponent + 127; 255 is NaN.
    """
    e4m3 = data[:, : V4.latent_dim].contiguous().view(torch.float8_e4m3fn).float()
    byte = scales[:, :7].to(torch.int32)
    bits = torch.where(byte == 0, 0x400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    latent = e4m3.view(-1, 7, 64) * bits.view(torch.float32).unsqueeze(-1)
    rope = data[:, V4.latent_dim :].contiguous().view(torch.bfloat16)
    return latent.view(-1, V4.latent_dim), rope


def read_slots(
    kv_cache: torch.Tensor, slots: torch.Tensor, cache_format: str, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Keys at `slots` (int64, any shape, all valid), `slots.shape + (head_dim,)`; what has `dtype` keeps its bits."""
    _, block_size, _, head_dim = geometry(kv_cache, cache_format)
    place = slots // block_size, slots % block_size
    if cache_format == "fp8_ds_mla_v4":
        data, scales = (view[place] for view in planar_views(kv_cache, cache_format))
        parts = dequantize_fp8_ds_mla_v4(data.view(-1, V4.row_bytes), scales.view(-1, V4.scale_bytes))
    elif cache_format == "fp8_ds_mla":
        parts = dequantize_fp8_ds_mla(kv_cache[place].view(-1, FP8.row_bytes))
    else:
        return convert(kv_cache[place], dtype)
    return torch.cat([convert(part, dtype) for part in parts], dim=1).view(*slots.shape, head_dim)


def concat_and_cache(
    kv_c: torch.Tensor, k_pe: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor, cache_format: str
) -> None:
    num_blocks, block_size, _, _ = geometry(kv_cache, cache_format)
    num_rows = min(slot_mapping.shape[0], kv_c.shape[0])
    slots = slot_mapping[:num_rows]
    written = ((slots >= 0) & (slots < num_blocks * block_size)).nonzero().squeeze(1)
    slots, latent, rope = slots[written], kv_c[written], k_pe[written]
    place = slots // block_size, slots % block_size
    if cache_format == "fp8_ds_mla_v4":
        data, scales = planar_views(kv_cache, cache_format)
        data[place], scales[place] = quantize_fp8_ds_mla_v4(latent, rope)
    elif cache_format == "fp8_ds_mla":
        kv_cache[place] = quantize_fp8_ds_mla(latent, rope)
    else:
        kv_cache[place] = convert(torch.cat((latent, rope), dim=1), kv_cache.dtype)


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
    num_blocks, block_size, _, _ = geometry(kv_cache, cache_format)
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
        out[part] = read_slots(kv_cache, slots[part], cache_format, out.dtype)


LOWERINGS = {"concat_and_cache": Lowering(concat_and_cache), "gather_cache": Lowering(gather_cache)}
