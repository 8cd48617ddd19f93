"""Buffers that the layers of a step share, computed once."""

from __future__ import annotations

import torch

from ..dispatch import Call
from ..registry import mutating, require
from ._checks import INT32, INT64, check_block_table, check_not_negative, check_positive, check_tensor


@mutating(
    "query_start_loc_buffer",
    "seq_lens_buffer",
    "block_table_buffer",
    "req_id_per_token",
    "positions",
    "slot_mapping",
    "key_lens",
    "topk_length",
)
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
) -> Call:
    """Writes what a step's layers read into buffers of fixed capacity, with device work only.

    `mla_ops.StepMetadata` owns such buffers and calls this. Rows behind the step's tokens are no-ops for every op.

    Args:
        query_start_loc, seq_lens, block_table: as `StepMetadata.build` takes them.
        query_start_loc_buffer, seq_lens_buffer, block_table_buffer: written: as given, then padding.
        req_id_per_token, positions, slot_mapping, key_lens, topk_length: written. Shapes, dtypes and padding of all
            buffers are those of `StepMetadata`.
        block_size: tokens a block of the cache.
        index_topk: keys that the indexer chooses for a token.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow; nothing is written.
        ValueError: more requests or blocks than the buffers hold; nothing is written.
    """
    op = "build_step_metadata"
    device = query_start_loc.device
    check_tensor(op, "seq_lens", seq_lens, INT32, (("num_requests", None),), device)
    num_requests = seq_lens.shape[0]
    check_tensor(op, "query_start_loc", query_start_loc, INT32, (("num_requests+1", num_requests + 1),), device)
    dims = (("num_requests", num_requests), ("max_blocks", None))
    check_tensor(op, "block_table", block_table, INT32, dims, device)
    check_tensor(op, "seq_lens_buffer", seq_lens_buffer, INT32, (("max_num_requests", None),), device)
    max_num_requests = seq_lens_buffer.shape[0]
    check_tensor(
        op,
        "query_start_loc_buffer",
        query_start_loc_buffer,
        INT32,
        (("max_num_requests+1", max_num_requests + 1),),
        device,
    )
    dims = (("max_num_requests", max_num_requests), ("max_blocks_per_request", None))
    check_tensor(op, "block_table_buffer", block_table_buffer, INT32, dims, device)
    require(
        num_requests <= max_num_requests,
        lambda: f"{op}: seq_lens has {num_requests} requests, the buffers have room for {max_num_requests}",
    )
    require(
        block_table.shape[1] <= block_table_buffer.shape[1],
        lambda: f"{op}: block_table is {block_table.shape[1]} blocks wide, its buffer {block_table_buffer.shape[1]}",
    )
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, (("max_num_tokens", None),), device)
    tokens = (("max_num_tokens", req_id_per_token.shape[0]),)
    check_tensor(op, "positions", positions, INT32, tokens, device)
    check_tensor(op, "slot_mapping", slot_mapping, INT64, tokens, device)
    check_tensor(op, "key_lens", key_lens, INT32, tokens, device)
    check_tensor(op, "topk_length", topk_length, INT32, tokens, device)
    check_positive(op, "block_size", block_size)
    check_not_negative(op, "index_topk", index_topk)
    return Call(op, device, torch.int32, num_tokens=req_id_per_token.shape[0])


@mutating("block_table_buffer", "slot_mapping", "compressed_lens")
def build_compressed_metadata(
    positions: torch.Tensor,
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    block_table_buffer: torch.Tensor,
    slot_mapping: torch.Tensor,
    compressed_lens: torch.Tensor,
    compress_ratio: int,
    block_size: int,
) -> Call:
    """Writes what a step's layers need to know of one compressed cache, with device work only.

    `mla_ops.CompressedMetadata` owns such buffers and calls this, after `build_step_metadata` has placed the tokens.

    Args:
        positions, req_id_per_token: of `StepMetadata`. A negative position, or an id outside `[0, num_requests)`, is
            padding.
        block_table: `[num_requests, max_blocks]` int32, of the compressed cache.
        block_table_buffer, slot_mapping, compressed_lens: written; shapes, dtypes and padding are those of
            `CompressedMetadata`. `compressed_lens` is `(position + 1) // compress_ratio`.
        compress_ratio: tokens a compressed token stands for.
        block_size: compressed tokens a block of the cache.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow; nothing is written.
        ValueError: more requests or blocks than the buffer holds; nothing is written.
    """
    op = "build_compressed_metadata"
    device = positions.device
    check_tensor(op, "positions", positions, INT32, (("max_num_tokens", None),), device)
    tokens = (("max_num_tokens", positions.shape[0]),)
    check_tensor(op, "req_id_per_token", req_id_per_token, INT32, tokens, device)
    check_block_table(op, block_table, device)
    dims = (("max_num_requests", None), ("max_blocks_per_request", None))
    check_tensor(op, "block_table_buffer", block_table_buffer, INT32, dims, device)
    require(
        block_table.shape[0] <= block_table_buffer.shape[0],
        lambda: (
            f"{op}: block_table has {block_table.shape[0]} requests, its buffer has room for "
            f"{block_table_buffer.shape[0]}"
        ),
    )
    require(
        block_table.shape[1] <= block_table_buffer.shape[1],
        lambda: f"{op}: block_table is {block_table.shape[1]} blocks wide, its buffer {block_table_buffer.shape[1]}",
    )
    check_tensor(op, "slot_mapping", slot_mapping, INT64, tokens, device)
    check_tensor(op, "compressed_lens", compressed_lens, INT32, tokens, device)
    check_positive(op, "compress_ratio", compress_ratio)
    check_positive(op, "block_size", block_size)
    return Call(op, device, torch.int32, num_tokens=positions.shape[0])
