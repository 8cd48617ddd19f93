"""Decode context parallel: every rank keeps a part of each request's tokens, attends to it, and the parts are merged.

Position p of a request lies on rank `(p // interleave) % world_size`, as in vLLM. A rank has `1 / world_size` of every
block: block b of a request is block b of the cache on each rank, so that all ranks share one block table. Everything
here is device work of known shapes on PyTorch's functional collectives: it traces with `fullgraph=True`, and a CUDA
graph captures it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

from ..ops import (
    convert_req_index_to_global_index,
    merge_stacked_attention_states,
    merge_topk,
    paged_indexer_logits,
    topk_indices,
)
from ..sizes import check_sizes

# torch 2.13 calls `_tensor` deprecated, earlier ones have nothing else
_all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_reduce_scatter = getattr(collectives, "reduce_scatter_single", None) or collectives.reduce_scatter_tensor


@dataclass(frozen=True)
class ContextParallel:
    """A rank's place among those that share the contexts.

    Attributes:
        group: the process group of these ranks.
        rank: of this process in `group`.
        world_size: of `group`.
        block_size: tokens a block, on all ranks together; a multiple of `world_size * interleave`.
        interleave: neighbouring tokens on one rank; `block_size // world_size` is the largest.
    """

    group: Any
    rank: int
    world_size: int
    block_size: int
    interleave: int = 1

    def __post_init__(self) -> None:
        sizes = {"world_size": self.world_size, "block_size": self.block_size, "interleave": self.interleave}
        checked = dict(zip(sizes, check_sizes("ContextParallel", 1, **sizes), strict=True))
        (checked["rank"],) = check_sizes("ContextParallel", 0, most=checked["world_size"] - 1, rank=self.rank)
        for name, size in checked.items():
            object.__setattr__(self, name, size)
        stripe = self.world_size * self.interleave
        if self.block_size % stripe:
            raise ValueError(
                f"ContextParallel: block_size must be a multiple of world_size * interleave, {stripe}, "
                f"got {self.block_size}"
            )

    @classmethod
    def of(cls, group: Any, block_size: int, interleave: int = 1) -> ContextParallel:
        """This process's place in a process group or a one-dimensional DeviceMesh."""
        group = group.get_group() if hasattr(group, "get_group") else group
        return cls(group, dist.get_rank(group), dist.get_world_size(group), block_size, interleave)

    @property
    def local_block_size(self) -> int:
        """Tokens of a block on one rank: what the rank's cache is allocated with."""
        return self.block_size // self.world_size

    def lengths(self, lengths: torch.Tensor) -> torch.Tensor:
        """This rank's part of `seq_lens`, `key_lens` and their like: positions below each that lie on it."""
        stripe = self.world_size * self.interleave
        rest = (lengths % stripe - self.rank * self.interleave).clamp(0, self.interleave)
        return torch.div(lengths, stripe, rounding_mode="floor") * self.interleave + rest

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the shared numbering to slots of this rank's cache, -1 for those of other ranks and for -1.

        A slot mapping so tells what a rank writes. Window indices and compressed indices are slots too.
        """
        return self._own(slots)

    def positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions in a request, as an indexer chooses them, to positions in this rank's part; -1 elsewhere."""
        return self._own(positions)

    def _own(self, places: torch.Tensor) -> torch.Tensor:
        # a block holds whole stripes, so slots and positions divide alike
        stripe = self.world_size * self.interleave
        block = torch.div(places, stripe, rounding_mode="floor")
        offset = places - block * stripe
        mine = (torch.div(offset, self.interleave, rounding_mode="floor") == self.rank) & (places >= 0)
        return torch.where(mine, block * self.interleave + offset % self.interleave, -1)

    def global_positions(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions in this rank's part to positions in the request; negative ones become -1."""
        stripe = torch.div(positions, self.interleave, rounding_mode="floor")
        place = (stripe * self.world_size + self.rank) * self.interleave + positions % self.interleave
        return torch.where(positions >= 0, place, -1)

    def local_indices(
        self, positions: torch.Tensor, block_table: torch.Tensor, req_id_per_token: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns what `paged_sparse_attention` takes as `indices` and `topk_length` on this rank.

        Args:
            positions: `[num_tokens, topk]` int32 positions in each token's request, the same on every rank; -1 is none.
            block_table: `[num_requests, max_blocks]` int32, the same on every rank.
            req_id_per_token: `[num_tokens]` int32.

        Returns:
            `[num_tokens, topk]` int32 slots of this rank's cache, in their order, -1 behind them, and `[num_tokens]`
            int32, how many there are; 0 for a rank that has none.
        """
        return convert_req_index_to_global_index(
            req_id_per_token, block_table, self.positions(positions), self.local_block_size, compact=True
        )

    def gather_heads(self, q: torch.Tensor) -> torch.Tensor:
        """All heads, `[num_tokens, num_heads, head_dim]`, from each rank's `[num_tokens, its heads, head_dim]`."""
        if self.world_size == 1:
            return q
        return self._gather(q).transpose(0, 1).flatten(1, 2)

    def _check_heads(self, method: str, lse: torch.Tensor) -> None:
        if lse.shape[1] % self.world_size:
            raise ValueError(f"{method}: {lse.shape[1]} heads do not divide over {self.world_size} ranks")

    def merge_heads(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over all ranks' keys of this rank's share of the heads: one exchange, then one launch.

        Each rank sends every other its heads' outputs and lse, in the outputs' dtype; `merge_attention_states.stacked`
        joins them in float32. A reduce-scatter moves as many values, but adds rounded ones.

        Args:
            out: `[num_tokens, num_heads, head_dim_v]`, this rank's attention to its part, without a sink; anything for
                a row that has no key here.
            lse: `[num_tokens, num_heads]` float32, -inf for such a row.
            attn_sink: `[num_heads // world_size]` float32 of this rank's heads, counted once, here.

        Returns:
            `[num_tokens, num_heads // world_size, head_dim_v]` and `[num_tokens, num_heads // world_size]`, of heads
            `rank * num_heads // world_size` and on.

        Raises:
            ValueError: the heads do not divide over the ranks.
        """
        self._check_heads("merge_heads", lse)
        if self.world_size > 1:
            outs, lses = self._exchange(out), self._exchange(lse)
            out, lse = merge_stacked_attention_states(outs, lses)
        return apply_sink(out, lse, attn_sink), lse

    def merge_heads_by_sum(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what `merge_heads` does, by an all-gather of lse and a reduce-scatter of rescaled outputs in float32.

        It is vLLM's way: the ranks' order of the sum is the collective's, and float32 takes twice the bytes. Arguments,
        results and errors as of `merge_heads`.
        """
        self._check_heads("merge_heads_by_sum", lse)
        if self.world_size > 1:
            lses = self._gather(lse)
            lses = torch.where(lses == torch.inf, -torch.inf, lses)
            total = lses.logsumexp(0)
            mine = lses[self.rank] == -torch.inf
            weight = lses.softmax(0)[self.rank]
            scaled = torch.where(mine.unsqueeze(-1), 0.0, out.float() * weight.unsqueeze(-1))
            # heads first: a reduce-scatter cuts the first dim
            scaled = scaled.transpose(0, 1).contiguous()
            summed = _done(_reduce_scatter(scaled, "sum", 0, self.group))
            out = summed.transpose(0, 1).to(out.dtype)
            lse = total.chunk(self.world_size, dim=1)[self.rank]
        return apply_sink(out, lse, attn_sink), lse

    def merge(
        self, out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Merges as `merge_heads` does, with every head on every rank, for weights that are whole.

        Args:
            out, lse: as of `merge_heads`.
            attn_sink: `[num_heads]` float32, counted once.

        Returns:
            `[num_tokens, num_heads, head_dim_v]` and `[num_tokens, num_heads]`, the same on every rank.
        """
        if self.world_size > 1:
            out, lse = merge_stacked_attention_states(self._gather(out), self._gather(lse))
        return apply_sink(out, lse, attn_sink), lse

    def select_keys(
        self,
        q: torch.Tensor,
        index_cache: torch.Tensor,
        weights: torch.Tensor,
        lengths: torch.Tensor,
        block_table: torch.Tensor,
        req_id_per_token: torch.Tensor,
        topk: int,
        cache_format: str,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`mla_ops.select_keys` over all ranks' keys: the same positions on every rank.

        Each rank scores its part and gives its best `topk`; `merge_topk` chooses among them, ties as over the whole.

        Args:
            index_cache: this rank's.
            q, weights, lengths, block_table, req_id_per_token: the same on every rank, lengths of whole requests.
            topk, cache_format: as `select_keys` takes them.

        Returns:
            `[num_tokens, topk]` int32 positions, -1 behind them, and `[num_tokens]` int32, how many there are.
        """
        most = block_table.shape[1] * self.local_block_size
        if type(most) is int and most == 0:  # no request has a block
            none = q.new_full((q.shape[0], topk), -1, dtype=torch.int32)
            return none, none.new_zeros(q.shape[0])
        local_lengths = self.lengths(lengths)
        scores = paged_indexer_logits(
            q, index_cache, weights, local_lengths, block_table, req_id_per_token, most, cache_format
        )
        # a padding token belongs to no request, and its scores are not written
        known = (req_id_per_token >= 0) & (req_id_per_token < block_table.shape[0])
        ends = torch.where(known, local_lengths, 0)
        best, _ = topk_indices(scores, topk, row_ends=ends)
        score = scores.gather(1, best.clamp(min=0).long())
        score = torch.where(best >= 0, score, -torch.inf)
        position = self.global_positions(best)
        if self.world_size > 1:
            score, position = (self._gather(x).transpose(0, 1).flatten(1).contiguous() for x in (score, position))
        _, chosen = merge_topk(score, position, topk)
        return chosen, (chosen >= 0).sum(1, dtype=torch.int32)

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, `[world_size, *x.shape]`."""
        return _done(_all_gather(x.contiguous().unsqueeze(0), 0, self.group))

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        """`[world_size, num_tokens, heads of this rank, ...]`: this rank's heads of every rank's `x`."""
        parts = torch.unflatten(x, 1, (self.world_size, -1)).transpose(0, 1).contiguous()
        return _done(collectives.all_to_all_single(parts, None, None, self.group))


def apply_sink(out: torch.Tensor, lse: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """Scales outputs `[num_tokens, num_heads, dim]` by `exp(lse) / (exp(lse) + exp(sink))`; lse has no sink in it."""
    if attn_sink is None:
        return out
    scale = torch.where(lse == -torch.inf, 0.0, torch.sigmoid(lse - attn_sink))
    return (out * scale.unsqueeze(-1)).to(out.dtype)


def _done(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor; the stream that reads it waits for the collective, as it does in a graph."""
    return tensor.wait() if isinstance(tensor, collectives.AsyncCollectiveTensor) else tensor
