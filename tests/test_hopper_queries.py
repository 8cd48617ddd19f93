"""Queries of 64 heads, whole or in two tensors, are copied to where the scores read them, by the kernels' own code.

Heads past the last repeat another of the tile.
"""

from __future__ import annotations

import ctypes

import pytest
import torch
from hopper_on_cpu import NO_COMPILER, build, pointer

pytestmark = pytest.mark.skipif(NO_COMPILER, reason="no C++ compiler")

HEADS, LINE = 64, 128  # a tile's heads; bytes of 64 dims, and of a line of L2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build("hopper_queries.cpp", tmp_path_factory.mktemp("hopper_queries"))


def aligned(*size: int) -> torch.Tensor:
    """Random bits at a multiple of a line."""
    room = torch.randint(-(2**15), 2**15, (torch.Size(size).numel() + LINE,), dtype=torch.int16)
    return room[-room.data_ptr() % LINE // 2 :][: torch.Size(size).numel()].view(size)


def queries(kind: str, num_heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Dims below 512 and the others of three tokens, `[3, num_heads, *]`."""
    if kind == "whole":
        q = aligned(3, num_heads, 576)
        return q[..., :512], q[..., 512:]
    if kind == "V4":
        q = aligned(3, num_heads, 512)
        return q, q
    return aligned(num_heads, 3, 512).transpose(0, 1), aligned(3, num_heads, 192)[..., 128:]


@pytest.mark.parametrize("threads", [128, 384])
@pytest.mark.parametrize("num_heads", [1, 7, 8, 9, 33, 63, 64, 65, 100, 128])
@pytest.mark.parametrize("kind", ["whole", "halves", "V4"])
def test_each_dim_of_each_head_is_where_it_belongs(
    library: ctypes.CDLL, kind: str, num_heads: int, threads: int
) -> None:
    latent, rope = queries(kind, num_heads)
    chunks = 8 if kind == "V4" else 9
    strides = (ctypes.c_int64 * 4)(*latent.stride()[:2], *rope.stride()[:2])
    for token in (0, 2):
        for tile in range(-(-num_heads // HEADS)):
            shared = torch.zeros(chunks * HEADS * 64, dtype=torch.int16)
            asked, count = (ctypes.c_void_p * 4096)(), ctypes.c_int()
            tensors = pointer(latent), pointer(rope), strides
            where = (num_heads, token, tile, threads, kind != "V4", pointer(shared))
            assert library.copy_row(*tensors, *where, asked, ctypes.byref(count))
            own = slice(tile * HEADS, min((tile + 1) * HEADS, num_heads))
            parts = [latent[token, own]] + ([] if kind == "V4" else [rope[token, own]])
            wanted = torch.cat(parts, dim=-1).unflatten(-1, (chunks, 8, 8))  # [heads, chunk, piece, 8 dims]
            # a chunk after the other, 128 bytes a head, whose pieces of 16 are exchanged by the head's number
            found = shared.view(chunks, HEADS, 8, 8)
            for head in range(HEADS):
                pieces = torch.arange(8) ^ head % 8
                copied = found[:, head, pieces]
                if head < len(wanted):
                    assert torch.equal(copied, wanted[head])
                else:
                    assert any(torch.equal(copied, other) for other in wanted)
            lines = {
                address
                for part in parts
                for row in part
                for address in range(row.data_ptr(), row.data_ptr() + 2 * row.shape[0], LINE)
            }
            assert set(asked[: count.value]) == lines
