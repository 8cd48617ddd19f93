"""Buffers that the layers of a step share, computed once."""

from __future__ import annotations

import torch

from ..contracts import step_metadata as contracts


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
    """Writes what a step's layers read into buffers of fixed capacity, with device work only.

    `mla_ops.StepMetadata` owns such buffers and calls this. Rows behind the step's tokens are no-ops for every op.

    Args:
        query_start_loc: `[num_requests + 1]` int32, ascending; request r owns tokens `query_start_loc[r]` up to
            `query_start_loc[r + 1]`. Two equal neighbours are a request without tokens in this step.
        seq_lens: `[num_requests]` int32, tokens of each request with the new ones; they are its last.
        block_table: `[num_requests, max_blocks]` int32; entries past a request's end may be anything.
        query_start_loc_buffer, seq_lens_buffer, block_table_buffer: written: as given, then padding.
        req_id_per_token, positions, slot_mapping, key_lens, topk_length: written. Shapes, dtypes and padding of all
            buffers are those of `StepMetadata`.
        block_size: tokens a block of the cache.
        index_topk: keys that the indexer chooses for a token.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow; nothing is written.
        ValueError: more requests or blocks than the buffers hold; nothing is written.
    """
    contracts.build_step_metadata(
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
        block_size,
        index_topk,
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
    """Writes what a step's layers need to know of one compressed cache, with device work only.

    `mla_ops.CompressedMetadata` owns such buffers and calls this, after `build_step_metadata` has placed the tokens.

    Args:
        positions: `[max_num_tokens]` int32, position of each token in its request. Negative is padding.
        req_id_per_token: `[max_num_tokens]` int32; outside `[0, num_requests)` is padding.
        block_table: `[num_requests, max_blocks]` int32, of the compressed cache; entries past a request's end may be
            anything.
        block_table_buffer, slot_mapping, compressed_lens: written; shapes, dtypes and padding are those of
            `CompressedMetadata`. `compressed_lens` is `(position + 1) // compress_ratio`.
        compress_ratio: tokens a compressed token stands for.
        block_size: compressed tokens a block of the cache.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow; nothing is written.
        ValueError: more requests or blocks than the buffer holds; nothing is written.
    """
    contracts.build_compressed_metadata(
        positions,
        req_id_per_token,
        block_table,
        block_table_buffer,
        slot_mapping,
        compressed_lens,
        compress_ratio,
        block_size,
    )
