"""Memory of a selection of keys: whole rows of scores, of as many tokens at a time as there is room for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

ROW_BYTES = 64 * 1024  # a token may take so much memory beside its result, on average over a call
CALL_BYTES = 32 * 1024 * 1024  # a call may take so much, if that is more
MOST_BYTES = 256 * 1024 * 1024  # a call takes no more
UNIT = 16  # tokens: groups that share keys begin at multiples of it


def call_bytes(num_tokens: int) -> int:
    """Memory that a call may take beside its result."""
    return min(max(ROW_BYTES * num_tokens, CALL_BYTES), MOST_BYTES)


def tokens_together(num_tokens: int, row_bytes: int) -> int:
    """Tokens whose scores are in memory at one time; slices of about one size. `row_bytes`: what a token takes."""
    most = max(1, call_bytes(num_tokens) // max(1, row_bytes))
    if most >= num_tokens:
        return num_tokens
    if most > UNIT:
        most -= most % UNIT
    each = -(-num_tokens // -(-num_tokens // most))
    return min(-(-each // UNIT) * UNIT, most)


def token_slices(
    num_tokens: int, num_columns: int, device: torch.device, *, beside: int = 0
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Tokens, and where their scores go. `beside`: bytes that top-k takes beside a row of scores."""
    together = tokens_together(num_tokens, 4 * num_columns + beside)
    scores = torch.empty(together, num_columns, dtype=torch.float32, device=device)
    for first in range(0, num_tokens, together):
        tokens = slice(first, min(first + together, num_tokens))
        yield tokens, scores[: tokens.stop - first]
