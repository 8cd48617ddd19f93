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

    `mla_ops.metadata.StepMetadata` owns such buffers and calls this. Prefill, decode, several query tokens a request
    and mixed batches are all the same call. The row of a token that belongs to no request, up to the capacity, is a
    no-op for every op of the library.

    Args:
        query_start_loc: `[num_requests + 1]` int32, ascending; request r owns tokens `query_start_loc[r]` up to
            `query_start_loc[r + 1]`. Two equal neighbours are a request without tokens in this step.
        seq_lens: `[num_requests]` int32, tokens of each request with the new ones; they are its last.
        block_table: `[num_requests, max_blocks]` int32; entries past a request's end may be anything.
        query_start_loc_buffer: `[max_num_requests + 1]` int32, written: as given, then the number of tokens.
        seq_lens_buffer: `[max_num_requests]` int32, written: as given, then 0.
        block_table_buffer: `[max_num_requests, max_blocks_per_request]` int32, written: as given, then -1.
        req_id_per_token: `[max_num_tokens]` int32, written; -1 for padding.
        positions: `[max_num_tokens]` int32, written: position of the token in its request; 0 for padding.
        slot_mapping: `[max_num_tokens]` int64, written: where the token's key goes; -1 for padding.
        key_lens: `[max_num_tokens]` int32, written: keys that the token may see, itself included; 0 for padding.
        topk_length: `[max_num_tokens]` int32, written: `min(key_lens, index_topk)`.
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
        block_table_buffer: `[max_num_requests, max_blocks_per_request]` int32, written: as given, then -1.
        slot_mapping: `[max_num_tokens]` int64, written: where the compressed token goes that a token completes; -1 for
            a token that completes none, and for padding.
        compressed_lens: `[max_num_tokens]` int32, written: compressed tokens that the token may see,
            `(position + 1) // compress_ratio`; 0 for padding.
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
