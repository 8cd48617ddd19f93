"""Parts of sample inputs: tensors from one seed, and views that are laid out as engines lay them out."""

from __future__ import annotations

from typing import Any

import torch

from ..formats import CACHE_ALIGNMENT, FORMATS, LATENT_DIM, allocate_cache, geometry
from ..kernels.reference.cache import concat_and_cache as write_reference

NUM_BLOCKS = 5
BLOCK_SIZE = 4
NUM_HEADS = 3
TOPK = 6
SCALE = 0.0625

# an `.out` buffer holds this before the call, so that a row that must be left alone can be told from a written one
FILL = 7


class Maker:
    """Tensors on one device, from one seed, made on the CPU so that every device gets the same numbers."""

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self.generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float32, generator=self.generator).to(dtype).to(self.device)

    def indices(self, low: int, high: int, *shape: int) -> torch.Tensor:
        values = torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32)
        return values.to(self.device)

    def int32(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def int64(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def cache(
        self, cache_format: str, head_dim: int | None = None, block_size: int = BLOCK_SIZE, num_blocks: int = NUM_BLOCKS
    ) -> torch.Tensor:
        """Every slot written, through the reference, so that quantised rows hold sensible bytes."""
        cache = allocate_cache(cache_format, num_blocks, block_size, head_dim=head_dim)
        slots = torch.arange(num_blocks * block_size)
        head_dim = geometry(cache, cache_format).head_dim
        latent_dim = min(FORMATS[cache_format].latent_dim, head_dim)
        kv_c, k_pe = (
            torch.randn(len(slots), width, dtype=torch.float32, generator=self.generator)
            for width in (latent_dim, head_dim - latent_dim)
        )
        write_reference(kv_c, k_pe, cache, slots, cache_format)
        return cache.to(self.device)

    def block_table(self) -> torch.Tensor:
        return self.int32([[2, 0, -1], [4, 1, 3]])


def padded_blocks(cache: torch.Tensor) -> torch.Tensor:
    """The same rows, with room between blocks and before the first: what an engine's shared pool hands out."""
    if cache.dim() == 2:
        num_blocks, block_bytes = cache.shape
        pool = cache.new_full((num_blocks + 1, block_bytes + 2 * CACHE_ALIGNMENT), FILL)
        view = pool[1:, :block_bytes]
    else:
        num_blocks, block_size, row_width = cache.shape
        pool = cache.new_full((num_blocks + 1, block_size + 2, row_width), FILL)
        view = pool[1:, :block_size]
    view.copy_(cache)
    return view


def by_token(cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """A planar cache as `[num_blocks, block_size, row_width]`, which is how engines pass it."""
    num_blocks, block_size, block_stride, head_dim = geometry(cache, cache_format)
    width = FORMATS[cache_format].row_width(head_dim)
    return cache.as_strided((num_blocks, block_size, width), (block_stride, width, 1))


def wide_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a slice of wider rows: last dim contiguous, the others not."""
    wide = tensor.new_full((*tensor.shape[:-1], tensor.shape[-1] + 16), FILL)
    view = wide[..., : tensor.shape[-1]]
    view.copy_(tensor)
    return view


def halves(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The latent and the RoPE dims of queries as layers have them: of a product, heads first; of a wider projection."""
    latent = q[..., :LATENT_DIM].transpose(0, 1).contiguous().transpose(0, 1)
    return latent, wide_rows(q[..., LATENT_DIM:])


Case = tuple[str, tuple[Any, ...], dict[str, Any]]
