"""Step metadata of DeepSeek V4: one sliding-window cache, and compressed caches with tables and pages of their own."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..ops import build_compressed_metadata
from ..pytrees import exportable
from ..sizes import check_sizes
from .buffers import Buffers
from .step import StepMetadata


def _known_blocks(where: str, **argument: int | None) -> int | None:
    """The one argument, blocks of a cache, as a Python integer; None where nobody said."""
    known = {name: blocks for name, blocks in argument.items() if blocks is not None}
    return check_sizes(where, 0, **known)[0] if known else None


@exportable
@dataclass(frozen=True, eq=False)
class CompressedMetadata(Buffers):
    """Buffers of one compressed cache for a step, which all layers of a type share.

    Attributes:
        block_table: `[max_num_requests, max_blocks_per_request]` int32, padded with -1.
        slot_mapping: `[max_num_tokens]` int64, where the compressed token goes that a token completes; -1 for a token
            that completes none, and for padding.
        compressed_lens: `[max_num_tokens]` int32, compressed tokens that each token may see, 0 for padding: the length
            of an indexer's row.
        compress_ratio: tokens a compressed token stands for.
        block_size: compressed tokens a cache block.
        num_blocks: blocks of the cache, for the ops that look slots up in `block_table`; None where nobody said.
    """

    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    compressed_lens: torch.Tensor
    compress_ratio: int
    block_size: int
    num_blocks: int | None = None

    @classmethod
    def allocate(
        cls,
        *,
        max_num_tokens: int,
        max_num_requests: int,
        max_blocks_per_request: int,
        compress_ratio: int,
        block_size: int,
        num_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> CompressedMetadata:
        """Buffers for up to `max_num_tokens` tokens of `max_num_requests` requests, as padding throughout."""
        where = "CompressedMetadata.allocate"
        max_num_tokens, max_num_requests, max_blocks_per_request = check_sizes(
            where,
            0,
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_blocks_per_request=max_blocks_per_request,
        )
        compress_ratio, block_size = check_sizes(where, 1, compress_ratio=compress_ratio, block_size=block_size)
        num_blocks = _known_blocks(where, num_blocks=num_blocks)
        table = torch.full((max_num_requests, max_blocks_per_request), -1, dtype=torch.int32, device=device)
        return cls(
            block_table=table,
            slot_mapping=torch.full((max_num_tokens,), -1, dtype=torch.int64, device=device),
            compressed_lens=torch.zeros(max_num_tokens, dtype=torch.int32, device=device),
            compress_ratio=compress_ratio,
            block_size=block_size,
            num_blocks=num_blocks,
        )

    def build(self, step: StepMetadata, block_table: torch.Tensor) -> None:
        """Refreshes every buffer in place: device work only, no allocation, no synchronisation; may be captured.

        Args:
            step: built for the same step before, of the same `max_num_tokens`.
            block_table: `[num_requests, max_blocks]` int32 of the compressed cache, at most as large as the buffer. A
                token of a request past its rows is padding here.
        """
        build_compressed_metadata(
            step.positions,
            step.req_id_per_token,
            block_table,
            self.block_table,
            self.slot_mapping,
            self.compressed_lens,
            self.compress_ratio,
            self.block_size,
        )


@exportable
@dataclass(frozen=True, eq=False)
class V4StepMetadata(Buffers):
    """Buffers that every layer of a DeepSeek V4 step reads. Allocate once, `build()` before each step.

    A captured graph freezes addresses and capacities, and rows of padding are no-ops, as with `StepMetadata`. All
    layers of a type share the index buffers. Attention translates the choice of a C4A layer's indexer by
    `c4a.block_table`.

    Without the caches' numbers of blocks, an entry of a block table past its cache counts in the lengths, although
    attention reads nothing there; with them it is left out.

    Attributes:
        step: of the sliding-window cache, which every layer has. `step.topk_length` is `min(key_lens, window)`.
        window_indices: `[max_num_tokens, window]` int32, slots of each token's window, -1 behind and for padding.
        window_lens: `[max_num_tokens]` int32, valid ones of each row, 0 for padding.
        c4a: of the cache whose layers choose keys by an indexer.
        c128a: of the cache whose layers read all of it.
        c128a_indices: `[max_num_tokens, max_seq_len // 128]` int32, slots of every compressed token that each token may
            see, -1 behind and for padding. The row stride is the capacity, whatever the step.
        c128a_lens: `[max_num_tokens]` int32, valid ones of each row, 0 for padding.
        num_blocks: blocks of the sliding-window cache; None where nobody said.
    """

    step: StepMetadata
    window_indices: torch.Tensor
    window_lens: torch.Tensor
    c4a: CompressedMetadata
    c128a: CompressedMetadata
    c128a_indices: torch.Tensor
    c128a_lens: torch.Tensor
    num_blocks: int | None = None

    @classmethod
    def allocate(
        cls,
        *,
        max_num_tokens: int,
        max_num_requests: int,
        max_seq_len: int,
        block_size: int = 64,
        c4a_block_size: int = 64,
        c128a_block_size: int = 2,
        window: int = 128,
        c4a_ratio: int = 4,
        c128a_ratio: int = 128,
        num_blocks: int | None = None,
        c4a_num_blocks: int | None = None,
        c128a_num_blocks: int | None = None,
        device: torch.device | str | None = None,
    ) -> V4StepMetadata:
        """Buffers at capacity, as padding throughout.

        Args:
            max_num_tokens: tokens of a step, padding included.
            max_num_requests: requests of a step.
            max_seq_len: tokens of a request; block tables may be as wide as that takes, and no wider.
            block_size: tokens a block of the sliding-window cache.
            c4a_block_size, c128a_block_size: compressed tokens a block of each compressed cache.
            window: tokens of the sliding window.
            c4a_ratio, c128a_ratio: tokens that a compressed token of each cache stands for.
            num_blocks, c4a_num_blocks, c128a_num_blocks: blocks of each cache.
            device: where the buffers lie.
        """
        where = "V4StepMetadata.allocate"
        max_num_tokens, max_num_requests, max_seq_len, window = check_sizes(
            where,
            0,
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_seq_len=max_seq_len,
            window=window,
        )
        block_size, c4a_block_size, c128a_block_size, c4a_ratio, c128a_ratio = check_sizes(
            where,
            1,
            block_size=block_size,
            c4a_block_size=c4a_block_size,
            c128a_block_size=c128a_block_size,
            c4a_ratio=c4a_ratio,
            c128a_ratio=c128a_ratio,
        )
        num_blocks = _known_blocks(where, num_blocks=num_blocks)
        c4a_num_blocks = _known_blocks(where, c4a_num_blocks=c4a_num_blocks)
        c128a_num_blocks = _known_blocks(where, c128a_num_blocks=c128a_num_blocks)

        def compressed(compress_ratio: int, block_size: int, num_blocks: int | None) -> CompressedMetadata:
            return CompressedMetadata.allocate(
                max_num_tokens=max_num_tokens,
                max_num_requests=max_num_requests,
                # the last block may hold only tokens that complete no group: engines count it
                max_blocks_per_request=-(-max_seq_len // (compress_ratio * block_size)),
                compress_ratio=compress_ratio,
                block_size=block_size,
                num_blocks=num_blocks,
                device=device,
            )

        step = StepMetadata.allocate(
            max_num_tokens=max_num_tokens,
            max_num_requests=max_num_requests,
            max_blocks_per_request=-(-max_seq_len // block_size),
            block_size=block_size,
            index_topk=window,
            device=device,
        )
        c4a = compressed(c4a_ratio, c4a_block_size, c4a_num_blocks)
        c128a = compressed(c128a_ratio, c128a_block_size, c128a_num_blocks)

        def indices(width: int) -> torch.Tensor:
            return torch.full((max_num_tokens, width), -1, dtype=torch.int32, device=device)

        def lens() -> torch.Tensor:
            return torch.zeros(max_num_tokens, dtype=torch.int32, device=device)

        return cls(
            step=step,
            window_indices=indices(window),
            window_lens=lens(),
            c4a=c4a,
            c128a=c128a,
            c128a_indices=indices(max_seq_len // c128a_ratio),
            c128a_lens=lens(),
            num_blocks=num_blocks,
        )

    def build(
        self,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor,
        c4a_block_table: torch.Tensor,
        c128a_block_table: torch.Tensor,
    ) -> None:
        """Refreshes every buffer in place by five launches: no allocation, no synchronisation; may be captured.

        Args:
            query_start_loc, seq_lens: as `StepMetadata.build` takes them.
            block_table: `[num_requests, max_blocks]` int32 of the sliding-window cache.
            c4a_block_table, c128a_block_table: the same of each compressed cache, each of its own width.
        """
        step, c128a = self.step, self.c128a
        step.build(query_start_loc, seq_lens, block_table)
        self.c4a.build(step, c4a_block_table)
        c128a.build(step, c128a_block_table)
        torch.ops.mla.sliding_window_indices.out(
            step.positions,
            step.req_id_per_token,
            step.block_table,
            self.window_indices.shape[1],
            step.block_size,
            num_blocks=self.num_blocks,
            indices=self.window_indices,
            lens=self.window_lens,
        )
        torch.ops.mla.compressed_indices.out(
            step.positions,
            step.req_id_per_token,
            c128a.block_table,
            c128a.compress_ratio,
            c128a.block_size,
            self.c128a_indices.shape[1],
            num_blocks=c128a.num_blocks,
            indices=self.c128a_indices,
            lens=self.c128a_lens,
        )
