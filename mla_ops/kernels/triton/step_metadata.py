"""Step metadata, one Triton launch each."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...dispatch import Lowering
from .common import cdiv, sized_jit
from .requests import ANY_BLOCK, Blocks, find_block, find_request

TOKEN_BLOCK = 128
COPY_BLOCK = 1024


class Table(NamedTuple):
    """A block table in device code: pointer, elements between its rows, entries of a row."""

    pointer: Any
    stride: Any
    max_blocks: Any


@triton.jit
def _copy_table_piece(table, buffer, num_requests, piece, COPY: tl.constexpr):
    """Copies one piece of one row of a block table into its buffer, -1 where nothing was given."""
    pieces = tl.cdiv(buffer.max_blocks, COPY)
    row = (piece // pieces).to(tl.int64)
    column = piece % pieces * COPY + tl.arange(0, COPY)
    given = (row < num_requests) & (column < table.max_blocks)
    block = tl.load(table.pointer + row * table.stride + column, mask=given, other=-1)
    tl.store(buffer.pointer + row * buffer.stride + column, block, mask=column < buffer.max_blocks)


@sized_jit(
    any_alignment=(
        "query_start_loc",
        "seq_lens",
        "block_table",
        "query_start_loc_buffer",
        "seq_lens_buffer",
        "block_table_buffer",
        "req_id_per_token",
        "positions",
        "slot_mapping",
        "key_lens",
        "topk_length",
    )
)
def _step_kernel(
    query_start_loc,
    seq_lens,
    block_table,
    query_start_loc_buffer,
    seq_lens_buffer,
    block_table_buffer,
    req_id_per_token,
    positions,
    slot_mapping,
    key_lens,
    topk_length,
    num_requests: tl.int32,
    max_num_requests: tl.int32,
    max_num_tokens: tl.int32,
    max_blocks: tl.int32,
    max_blocks_buffer: tl.int32,
    search_steps: tl.int32,
    token_programs: tl.int32,
    request_programs: tl.int32,
    block_size: tl.int32,
    index_topk: tl.int64,
    stride_table: tl.int64,
    stride_table_buffer: tl.int64,
    TOKENS: tl.constexpr,
    COPY: tl.constexpr,
):
    """One of three jobs, by program number, so that a step costs one launch.

    Grid: (token_programs + request_programs + max_num_requests * pieces of a table row), fixed by the capacities.
    The first programs each place TOKENS tokens: a bisection of query_start_loc finds the request, as
    torch.searchsorted does. The next copy and pad the request arrays, COPY entries each; the rest copy and pad COPY
    entries of one block-table row. Inputs only are read, so the jobs need no order.
    """
    program = tl.program_id(0)
    if program < token_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        within = token < max_num_tokens
        first = tl.load(query_start_loc)
        end = tl.load(query_start_loc + num_requests)
        low = find_request(query_start_loc, token, num_requests, search_steps)
        live = within & (token >= first) & (token < end) & (num_requests > 0)
        request = tl.minimum(low, num_requests - 1)
        stop = tl.load(query_start_loc + request + 1, mask=live, other=0)
        # 64 bits: seq_lens may hold anything
        wide = token.to(tl.int64) - stop + tl.load(seq_lens + request, mask=live, other=0)
        live &= (wide >= 0) & (wide < 2147483647)
        position = wide.to(tl.int32)
        blocks = Blocks(block_table + request.to(tl.int64) * stride_table, live, max_blocks, block_size, ANY_BLOCK)
        block, place, found = find_block(blocks, position, live)
        slot = tl.where(found, block * block_size + place, -1)
        length = position + 1
        tl.store(req_id_per_token + token, tl.where(live, low, -1), mask=within)
        tl.store(positions + token, tl.where(live, position, 0), mask=within)
        tl.store(slot_mapping + token, slot, mask=within)
        tl.store(key_lens + token, tl.where(live, length, 0), mask=within)
        kept = tl.minimum(length.to(tl.int64), index_topk).to(tl.int32)
        tl.store(topk_length + token, tl.where(live, kept, 0), mask=within)
    elif program < token_programs + request_programs:
        entry = (program - token_programs) * COPY + tl.arange(0, COPY)
        # past the last request every start is the number of tokens
        start = tl.load(query_start_loc + tl.minimum(entry, num_requests), mask=entry <= max_num_requests, other=0)
        tl.store(query_start_loc_buffer + entry, start, mask=entry <= max_num_requests)
        length = tl.load(seq_lens + entry, mask=entry < num_requests, other=0)
        tl.store(seq_lens_buffer + entry, length, mask=entry < max_num_requests)
    else:
        table = Table(block_table, stride_table, max_blocks)
        buffer = Table(block_table_buffer, stride_table_buffer, max_blocks_buffer)
        _copy_table_piece(table, buffer, num_requests, program - token_programs - request_programs, COPY)


@sized_jit(
    any_alignment=(
        "positions",
        "req_id_per_token",
        "block_table",
        "block_table_buffer",
        "slot_mapping",
        "compressed_lens",
    )
)
def _compressed_kernel(
    positions,
    req_id_per_token,
    block_table,
    block_table_buffer,
    slot_mapping,
    compressed_lens,
    num_requests: tl.int32,
    max_num_tokens: tl.int32,
    max_blocks: tl.int32,
    max_blocks_buffer: tl.int32,
    token_programs: tl.int32,
    compress_ratio: tl.int32,
    block_size: tl.int32,
    stride_table: tl.int64,
    stride_table_buffer: tl.int64,
    TOKENS: tl.constexpr,
    COPY: tl.constexpr,
):
    """One of two jobs, by program number, as in `_step_kernel`: TOKENS tokens, or COPY entries of one table row.

    Grid: (token_programs + max_num_requests * pieces of a table row), fixed by the capacities.
    """
    program = tl.program_id(0)
    if program < token_programs:
        token = program * TOKENS + tl.arange(0, TOKENS)
        within = token < max_num_tokens
        request = tl.load(req_id_per_token + token, mask=within, other=-1)
        position = tl.load(positions + token, mask=within, other=-1)
        live = (request >= 0) & (request < num_requests) & (position >= 0)
        # position + 1 may be past int32: the quotient and the remainder are those of position, one step on
        done = position // compress_ratio
        completes = position % compress_ratio == compress_ratio - 1
        blocks = Blocks(block_table + request.to(tl.int64) * stride_table, live, max_blocks, block_size, ANY_BLOCK)
        block, place, found = find_block(blocks, done, live & completes)
        slot = tl.where(found, block * block_size + place, -1)
        tl.store(slot_mapping + token, slot, mask=within)
        length = tl.minimum(done.to(tl.int64) + completes, 0x7FFFFFFF).to(tl.int32)
        tl.store(compressed_lens + token, tl.where(live, length, 0), mask=within)
    else:
        table = Table(block_table, stride_table, max_blocks)
        buffer = Table(block_table_buffer, stride_table_buffer, max_blocks_buffer)
        _copy_table_piece(table, buffer, num_requests, program - token_programs, COPY)


def build_step_metadata(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc_buffer: torch.Tensor,
    seq_lens_buffer: torch.Tensor,
    block_table_buffer: torch.Tensor,
    req_id_per_token: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_lens: torch.Tensor,
    topk_length: torch.Tensor,
    block_size: int,
    index_topk: int,
) -> None:
    num_requests, max_blocks = block_table.shape
    max_num_requests, max_blocks_buffer = block_table_buffer.shape
    max_num_tokens = req_id_per_token.shape[0]
    token_programs = cdiv(max_num_tokens, TOKEN_BLOCK)
    request_programs = cdiv(max_num_requests + 1, COPY_BLOCK)
    table_programs = max_num_requests * cdiv(max_blocks_buffer, COPY_BLOCK)
    _step_kernel[(token_programs + request_programs + table_programs,)](
        query_start_loc,
        seq_lens,
        block_table,
        query_start_loc_buffer,
        seq_lens_buffer,
        block_table_buffer,
        req_id_per_token,
        positions,
        slot_mapping,
        key_lens,
        topk_length,
        num_requests,
        max_num_requests,
        max_num_tokens,
        max_blocks,
        max_blocks_buffer,
        num_requests.bit_length(),
        token_programs,
        request_programs,
        block_size,
        index_topk,
        block_table.stride(0),
        block_table_buffer.stride(0),
        TOKENS=TOKEN_BLOCK,
        COPY=COPY_BLOCK,
        num_warps=4,
    )


def build_compressed_metadata(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_table_buffer: torch.Tensor,
    slot_mapping: torch.Tensor,
    compressed_lens: torch.Tensor,
    compress_ratio: int,
    block_size: int,
) -> None:
    num_requests, max_blocks = block_table.shape
    max_num_requests, max_blocks_buffer = block_table_buffer.shape
    max_num_tokens = positions.shape[0]
    token_programs = cdiv(max_num_tokens, TOKEN_BLOCK)
    table_programs = max_num_requests * cdiv(max_blocks_buffer, COPY_BLOCK)
    if token_programs + table_programs == 0:
        return
    _compressed_kernel[(token_programs + table_programs,)](
        positions,
        req_id_per_token,
        block_table,
        block_table_buffer,
        slot_mapping,
        compressed_lens,
        num_requests,
        max_num_tokens,
        max_blocks,
        max_blocks_buffer,
        token_programs,
        compress_ratio,
        block_size,
        block_table.stride(0),
        block_table_buffer.stride(0),
        TOKENS=TOKEN_BLOCK,
        COPY=COPY_BLOCK,
        num_warps=4,
    )


LOWERINGS = {
    "build_compressed_metadata": Lowering(build_compressed_metadata),
    "build_step_metadata": Lowering(build_step_metadata),
}
