"""How kernels find the request of a row, and the blocks that hold a request's tokens.

Launches pass flat arguments: in a tuple, Triton would specialise every number on 1 and on multiples of 16, and compile
again for another number of requests. Kernels put what belongs together into a NamedTuple, which costs no instruction.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# num_blocks where nothing bounds the entries of a block table
ANY_BLOCK = tl.constexpr(2**31)


class Blocks(NamedTuple):
    """The blocks of a request, or of one request for each row of a tile.

    Attributes:
        table: pointer to its row of the block table, `[max_blocks]` int32.
        known: whether there is such a request.
        max_blocks: entries of the row.
        block_size: tokens a block.
        num_blocks: blocks of the cache; other entries are no blocks.
    """

    table: Any
    known: Any
    max_blocks: Any
    block_size: Any
    num_blocks: Any


@triton.jit
def request_of(req_id_per_token, token, num_requests):
    """The request of a token, int64, and whether there is one. Padding has none, and gets request 0."""
    request = tl.load(req_id_per_token + token)
    known = (request >= 0) & (request < num_requests)
    return tl.where(known, request, 0).to(tl.int64), known


@triton.jit
def find_request(cu_seq_lens, row, num_requests, search_steps):
    """The request whose rows, from one entry of `cu_seq_lens` to the next, hold each row: as torch.searchsorted does.

    `num_requests` for a row behind the last. `search_steps` is the bit length of `num_requests`.
    """
    low = tl.zeros(row.shape, tl.int32)
    high = low + num_requests
    for _ in range(search_steps):
        middle = (low + high) >> 1
        open_ = low < high
        after = tl.load(cu_seq_lens + 1 + middle, mask=open_, other=0) <= row
        low = tl.where(open_ & after, middle + 1, low)
        high = tl.where(open_ & ~after, middle, high)
    return low


@triton.jit
def find_block(blocks, position, wanted):
    """The block of each position, int64, the place of the position in it, and whether there is such a block."""
    column = position // blocks.block_size
    wanted &= blocks.known & (column < blocks.max_blocks)
    block = tl.load(blocks.table + column, mask=wanted, other=-1).to(tl.int64)
    return block, position % blocks.block_size, wanted & (block >= 0) & (block < blocks.num_blocks)


@triton.jit
def find_slot(blocks, position, wanted):
    """The slot of each position, int64, and whether there is one that int32 holds."""
    block, place, found = find_block(blocks, position, wanted)
    slot = block * blocks.block_size + place
    return slot, found & (slot <= 0x7FFFFFFF)
