"""Turning token indices into what attention reads."""

from __future__ import annotations

import torch

from ..meta import index as meta


def convert_req_index_to_global_index(
    req_id_per_token: torch.Tensor,
    block_table: torch.Tensor,
    token_indices: torch.Tensor,
    block_size: int,
    *,
    compact: bool = False,
    num_blocks: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Translates request-local token indices into slots of the paged cache.

    `paged_sparse_attention` does this inside its kernel when it is given `block_table`; this op is for other readers,
    and for layers that share one selection.

    Args:
        req_id_per_token: `[num_tokens]` int32. A token whose id is outside `[0, num_requests)` is padding: its whole
            row becomes -1.
        block_table: `[num_requests, max_blocks]` int32. Bounded by its shape; a negative entry makes an index invalid.
        token_indices: `[num_tokens, topk]` int32, position of a key in its request. Negative, or past the block
            table, is invalid.
        block_size: tokens a block.
        compact: move the valid entries of each row to its front, in order.
        num_blocks: blocks of the cache; a block table entry that is not below it makes an index invalid. None checks
            no upper bound (attention ignores slots past its cache anyway).

    Returns:
        slots `[num_tokens, topk]` int32, -1 where invalid, and the number of valid entries of each row,
        `[num_tokens]` int32.

    Raises:
        TypeError, ValueError: a dtype, device, shape or non-positive `block_size` that the contract does not allow.
    """
    return meta.convert_req_index_to_global_index(
        req_id_per_token, block_table, token_indices, block_size, compact=compact, num_blocks=num_blocks
    )


def filter_prefill_indices(indices: torch.Tensor, context_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Splits request-local indices of prefill tokens into the cached context and the new tokens.

    Args:
        indices: `[num_tokens, topk]` int32, negative is invalid.
        context_lens: `[num_tokens]` int32, tokens of the token's request that were cached before this step.

    Returns:
        Two `[num_tokens, topk]` int32: indices into the context (`0 <= index < context_len`), and indices into the new
        tokens (`index - context_len`); -1 wherever an index belongs to the other, or is invalid.

    Raises:
        TypeError, ValueError: a dtype, device or shape that the contract does not allow.
    """
    return meta.filter_prefill_indices(indices, context_lens)
