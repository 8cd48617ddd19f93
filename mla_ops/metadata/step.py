"""Step metadata: plain tensors at capacity, refreshed in place on the device."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from ..ops import build_step_metadata
from ..pytrees import exportable
from ..sizes import check_sizes
from .buffers import Buffers


@exportable
@dataclass(frozen=True, eq=False)
class StepMetadata(Buffers):
    """Buffers that every layer of a step reads. Allocate once, `build()` before each step, pass them whole to the ops.

    A captured graph freezes the addresses, the capacity and so the padded number of tokens; everything else may change
    between replays. Rows past the step's tokens, and requests past its requests, are no-ops for every op.

    Attributes:
        query_start_loc: `[max_num_requests + 1]` int32, first token of each request, padded with the token count.
        seq_lens: `[max_num_requests]` int32, tokens of each request with the new ones, padded with 0.
        block_table: `[max_num_requests, max_blocks_per_request]` int32, padded with -1.
        req_id_per_token: `[max_num_tokens]` int32, -1 for padding.
        positions: `[max_num_tokens]` int32, position of each token in its request, 0 for padding.
        slot_mapping: `[max_num_tokens]` int64, where each token's key goes, -1 for padding.
        key_lens: `[max_num_tokens]` int32, keys that each token may see, 0 for padding.
        topk_length: `[max_num_tokens]` int32, `min(key_lens, index_topk)`.
        block_size: tokens a cache block.
        index_topk: keys that the indexer chooses for a token.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    req_id_per_token: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    key_lens: torch.Tensor
    topk_length: torch.Tensor
    block_size: int
    index_topk: int

    @classmethod
    def allocate(
        cls,
        *,
        max_num_tokens: int,
        max_num_requests: int,
        max_blocks_per_request: int,
        block_size: int,
        index_topk: int,
        device: torch.device | str | None = None,
    ) -> StepMetadata:
        """Buffers for up to `max_num_tokens` tokens of `max_num_requests` requests, as padding throughout."""
        where = "StepMetadata.allocate"
        max_num_tokens, max_num_requests, max_blocks_per_request, index_topk = check_sizes(
            where,
            0,
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_blocks_per_request=max_blocks_per_request,
            index_topk=index_topk,
        )
        (block_size,) = check_sizes(where, 1, block_size=block_size)

        def filled(value: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        return cls(
            query_start_loc=filled(0, max_num_requests + 1),
            seq_lens=filled(0, max_num_requests),
            block_table=filled(-1, max_num_requests, max_blocks_per_request),
            req_id_per_token=filled(-1, max_num_tokens),
            positions=filled(0, max_num_tokens),
            slot_mapping=filled(-1, max_num_tokens, dtype=torch.int64),
            key_lens=filled(0, max_num_tokens),
            topk_length=filled(0, max_num_tokens),
            block_size=block_size,
            index_topk=index_topk,
        )

    @property
    def max_num_tokens(self) -> int:
        return self.req_id_per_token.shape[0]

    @property
    def max_num_requests(self) -> int:
        return self.seq_lens.shape[0]

    def build(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor, block_table: torch.Tensor) -> None:
        """Refreshes every buffer in place: device work only, no allocation, no synchronisation; may be captured.

        Args:
            query_start_loc: `[num_requests + 1]` int32, ascending; request r owns tokens `query_start_loc[r]` up to
                `query_start_loc[r + 1]`, which may be none. More tokens than the capacity are cut off there.
            seq_lens: `[num_requests]` int32, with the new tokens.
            block_table: `[num_requests, max_blocks]` int32, at most as wide as the buffer; entries past a request's end
                may be anything.
        """
        build_step_metadata(
            query_start_loc,
            seq_lens,
            block_table,
            self.query_start_loc,
            self.seq_lens,
            self.block_table,
            self.req_id_per_token,
            self.positions,
            self.slot_mapping,
            self.key_lens,
            self.topk_length,
            self.block_size,
            self.index_topk,
        )

    def check(self, num_blocks: int | None = None) -> None:
        """Says what is wrong with the step that was built last. For debugging: it reads the device and synchronises.

        `build` cannot: it runs on the device alone. It cuts off what does not fit, and drops what has no block.

        Args:
            num_blocks: blocks of the cache, to find block numbers past its end.

        Raises:
            ValueError: the step has more tokens than `max_num_tokens`, or a request has more query tokens than its
                length, or is longer than the blocks in its row of `block_table`; with the number of each such request.
        """
        starts, lengths = self.query_start_loc.tolist(), self.seq_lens.tolist()
        wrong = []
        if starts[0] != 0 or any(a > b for a, b in itertools.pairwise(starts)):
            wrong.append(f"query_start_loc must ascend from 0, got {starts}")
        if starts[-1] > self.max_num_tokens:
            wrong.append(
                f"the step has {starts[-1]} tokens, max_num_tokens is {self.max_num_tokens}: the rest is cut off"
            )
        limit = torch.iinfo(torch.int32).max if num_blocks is None else num_blocks
        for request, (length, row) in enumerate(zip(lengths, self.block_table.tolist(), strict=True)):
            queries = starts[request + 1] - starts[request]
            if queries > length:
                wrong.append(f"request {request} has {queries} query tokens, but seq_lens has {length} with them")
            held = next((i for i, block in enumerate(row) if not 0 <= block < limit), len(row))
            if length > held * self.block_size:
                end = f"entry {held} is {row[held]}" if held < len(row) else f"the table is {len(row)} wide"
                wrong.append(
                    f"request {request} has {length} tokens, its row of block_table has {held} blocks of "
                    f"{self.block_size}: {end}"
                )
        if wrong:
            raise ValueError("StepMetadata.check: " + "; ".join(wrong))
