"""KV-cache formats: the byte layout of one token, and the tensors that hold it.

A cache never describes itself: two formats can have rows of the same width, and a wrong guess is read as
numbers, not as an error. So every op that touches a cache takes `cache_format` by name and checks the tensor
against the entry here. Adding a format is one entry in `FORMATS` and its kernels.

`slot = block * block_size + offset` addresses one token. Slots are int64 wherever they are multiplied by a
row's size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from .sizes import check_sizes

LATENT_DIM = 512
ROPE_DIM = 64
INDEX_DIM = 128
CACHE_ALIGNMENT = 16  # bytes; blocks and rows start on it, so kernels may load 16 bytes at once


@dataclass(frozen=True)
class CacheFormat:
    """One cache format.

    Attributes:
        name: what callers pass as `cache_format`.
        dtype: element type of the cache tensor `[num_blocks, block_size, row_width]`.
        value_dtype: element type of a row once it is read back (`gather_cache`).
        head_dims: key widths that a row can hold. 576 is latent 512 + RoPE 64, 512 is a latent alone (or V4's
            448 + 64), 128 is an unquantised index key, which only the cache ops take.
        row_widths: elements of `dtype` a token, one entry for each of `head_dims`.
        group_size: latent dims that share a scale; 0 where nothing is quantised.
        latent_dim: how many dims are quantised, from the first; the 64 RoPE dims follow. Plain formats do not care.
        data_bytes: 0 where a row lies in one piece. Else the format is planar: the rows' data of a block come first,
            `data_bytes` each, then the rest of every row, and blocks are padded to a multiple of `block_multiple`
            bytes. Such a cache is `[num_blocks, block_bytes]`, or the view `[num_blocks, block_size, row_width]`, whose
            `[b, t]` is not one token.
        block_multiple: see `data_bytes`; less than a row.
    """

    name: str
    dtype: torch.dtype
    value_dtype: torch.dtype
    head_dims: tuple[int, ...]
    row_widths: tuple[int, ...]
    group_size: int = 0
    latent_dim: int = LATENT_DIM
    data_bytes: int = 0
    block_multiple: int = 0

    @property
    def quantized(self) -> bool:
        return self.group_size > 0

    @property
    def planar(self) -> bool:
        return self.data_bytes > 0

    @property
    def row_bytes(self) -> int:
        """Bytes from one token's data to the next one's, for keys of the first width."""
        return self.data_bytes or self.bytes_per_token()

    @property
    def scale_bytes(self) -> int:
        """Bytes of a token's scales, with what pads them; 0 where nothing is quantised."""
        if self.planar:
            return self.row_widths[0] - self.data_bytes
        return self.latent_dim // self.group_size * 4 if self.quantized else 0

    @property
    def rope_at(self) -> int:
        """First byte of the RoPE part of a quantised row: behind the latent, and scales in the row."""
        return self.latent_dim + (0 if self.planar else self.scale_bytes)

    @property
    def index_only(self) -> bool:
        """Whether rows are index keys and nothing else, which attention cannot read."""
        return self.head_dims == (INDEX_DIM,)

    def row_width(self, head_dim: int) -> int:
        """Elements of the cache tensor that one token takes."""
        if head_dim not in self.head_dims:
            raise ValueError(f"cache_format '{self.name}' holds keys of width {self.head_dims}, got {head_dim}")
        return self.row_widths[self.head_dims.index(head_dim)]

    def head_dim(self, row_width: int) -> int:
        """Key width of a row that is `row_width` elements wide."""
        if row_width not in self.row_widths:
            raise ValueError(f"cache_format '{self.name}' has rows of {self.row_widths} elements, got {row_width}")
        return self.head_dims[self.row_widths.index(row_width)]

    def bytes_per_token(self, head_dim: int | None = None) -> int:
        """Bytes of one token, without what pads a block. `head_dim` None is the format's first."""
        return self.row_width(self.head_dims[0] if head_dim is None else head_dim) * self.dtype.itemsize

    def block_bytes(self, block_size: int) -> int:
        """Bytes of a padded block of a planar format."""
        multiple = self.block_multiple
        return -(-block_size * self.row_widths[0] // multiple) * multiple

    def block_size(self, block_bytes: int) -> int:
        """Tokens of a planar block that is padded to `block_bytes`: the inverse of `block_bytes`."""
        return block_bytes // self.row_widths[0]  # a block's padding is less than a row


class Geometry(NamedTuple):
    """Places of the tokens in a cache tensor.

    Attributes:
        num_blocks, block_size: `slot = block * block_size + offset`.
        block_stride: bytes from one block to the next.
        head_dim: width of the keys.
    """

    num_blocks: int
    block_size: int
    block_stride: int
    head_dim: int


_PLAIN_WIDTHS = (LATENT_DIM + ROPE_DIM, LATENT_DIM, INDEX_DIM)

FORMATS: dict[str, CacheFormat] = {
    entry.name: entry
    for entry in (
        CacheFormat("bf16", torch.bfloat16, torch.bfloat16, _PLAIN_WIDTHS, _PLAIN_WIDTHS),
        CacheFormat("fp16", torch.float16, torch.float16, _PLAIN_WIDTHS, _PLAIN_WIDTHS),
        CacheFormat("fp32", torch.float32, torch.float32, _PLAIN_WIDTHS, _PLAIN_WIDTHS),
        # 512 e4m3, then 4 float32 scales, then 64 bfloat16
        CacheFormat("fp8_ds_mla", torch.uint8, torch.bfloat16, (LATENT_DIM + ROPE_DIM,), (656,), group_size=128),
        # 448 e4m3 and 64 bfloat16 a token; then, for the block, 7 exponents and a zero a token
        CacheFormat("fp8_ds_mla_v4", torch.uint8, torch.bfloat16, (512,), (584,), 64, 448, 576, block_multiple=576),
        # 128 e4m3 a token; then, for the block, a float32 scale a token
        CacheFormat(
            "fp8_index", torch.uint8, torch.float8_e4m3fn, (INDEX_DIM,), (132,), 128, INDEX_DIM, 128, CACHE_ALIGNMENT
        ),
    )
}

# formats whose rows are numbers as they are: the dtype of each, and the format of a dtype
PLAIN = {name: entry.dtype for name, entry in FORMATS.items() if not entry.quantized}
PLAIN_FORMATS = {dtype: name for name, dtype in PLAIN.items()}

# those that hold the latents of attention
LATENT_FORMATS = tuple(name for name, entry in FORMATS.items() if not entry.index_only)


def get_format(cache_format: str, op: str = "mla_ops", argument: str = "cache_format") -> CacheFormat:
    """The entry of that name, or a ValueError of `op` and its `argument` that lists the names there are."""
    entry = FORMATS.get(cache_format) if isinstance(cache_format, str) else None
    if entry is None:
        raise ValueError(f"{op}: {argument} must be one of {sorted(FORMATS)}, got {cache_format!r}")
    return entry


def index_format_of(cache_format: str) -> str:
    """The format of the index keys beside a cache of latents: fp8 beside a quantised one, else the same."""
    return "fp8_index" if get_format(cache_format).quantized else cache_format


def geometry(kv_cache: torch.Tensor, cache_format: str) -> Geometry:
    """The geometry of a cache tensor that `cache_format` describes, whichever of its shapes it has.

    Sizes may be symbolic. Whether the tensor can hold the format is for `check_cache` to say.
    """
    entry = FORMATS[cache_format]
    stride = kv_cache.stride(0) * entry.dtype.itemsize
    if kv_cache.dim() == 2:
        num_blocks, block_bytes = kv_cache.shape
        return Geometry(num_blocks, entry.block_size(block_bytes), stride, entry.head_dims[0])
    num_blocks, block_size, row_width = kv_cache.shape
    return Geometry(num_blocks, block_size, stride, entry.head_dim(row_width))


def planar_views(kv_cache: torch.Tensor, cache_format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of a planar cache by token: its data `[num_blocks, block_size, data_bytes]`, and the rest of its row."""
    entry = FORMATS[cache_format]
    num_blocks, block_size, stride, head_dim = geometry(kv_cache, cache_format)
    rest = entry.row_width(head_dim) - entry.data_bytes
    start = kv_cache.storage_offset()
    data = kv_cache.as_strided((num_blocks, block_size, entry.data_bytes), (stride, entry.data_bytes, 1), start)
    start += block_size * entry.data_bytes
    return data, kv_cache.as_strided((num_blocks, block_size, rest), (stride, rest, 1), start)


def allocate_cache(
    cache_format: str,
    num_blocks: int,
    block_size: int,
    *,
    head_dim: int | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A zeroed cache for one layer.

    One whole tensor a layer: a view `pool[layer]` passed to a compiled op writes to offset 0 under dynamic shapes
    (docs/compile.md).

    Args:
        cache_format: a name in `FORMATS`.
        num_blocks: blocks of the cache, at least 0.
        block_size: tokens a block, at least 1.
        head_dim: key width, one of the format's `head_dims`; None is the first of them, 576 where there is a choice.
        device: where the cache lives.

    Returns:
        `[num_blocks, block_size, row_width]` of the format's dtype, contiguous; `[num_blocks, block_bytes]` for
        `fp8_ds_mla_v4` and `fp8_index`.

    Raises:
        TypeError: a size that is no integer.
        ValueError: unknown format, width or a negative size.
    """
    entry = get_format(cache_format, "allocate_cache")
    (num_blocks,) = check_sizes("allocate_cache", 0, num_blocks=num_blocks)
    head_dim = entry.head_dims[0] if head_dim is None else head_dim
    block_size, head_dim = check_sizes("allocate_cache", 1, block_size=block_size, head_dim=head_dim)
    if head_dim not in entry.head_dims:
        raise ValueError(
            f"allocate_cache: head_dim must be one of {entry.head_dims} for cache_format '{entry.name}', got {head_dim}"
        )
    row_width = entry.row_width(head_dim)
    shape = (num_blocks, entry.block_bytes(block_size)) if entry.planar else (num_blocks, block_size, row_width)
    return torch.zeros(shape, dtype=entry.dtype, device=device)
