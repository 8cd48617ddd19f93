"""The rows of quantised formats, in bytes, as constants of kernels: from `formats.py`."""

import triton.language as tl

from ...formats import FORMATS

_FP8, _V4 = FORMATS["fp8_ds_mla"], FORMATS["fp8_ds_mla_v4"]

FP8_ROW_BYTES = tl.constexpr(_FP8.row_bytes)
FP8_SCALES_AT = tl.constexpr(_FP8.latent_dim)
FP8_ROPE_AT = tl.constexpr(_FP8.rope_at)
# a row of the plane of data, whose RoPE part follows the latent; scales are in a plane behind it
V4_ROW_BYTES = tl.constexpr(_V4.row_bytes)
V4_LATENT = tl.constexpr(_V4.latent_dim)
V4_SCALE_BYTES = tl.constexpr(_V4.scale_bytes)
