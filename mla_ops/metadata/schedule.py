"""The schedule of a step's sparse attention: one persistent buffer for all layers that attend to as many keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..ops import plan_sparse_attention
from .buffers import Buffers, register

KEY_BLOCK = 64
HEADS_OF_A_TILE = 64
MAX_CLUSTER_SIZE = 16
# Where there is no GPU to ask. Schedules are then for looking at, or for a lowering that ignores them.
NUM_SMS_WITHOUT_GPU = 132
# Blocks of keys that a slot costs beside its own.
OVERHEAD = 4
# Clusters do not fill every GPC: how many of an H200's 132 SMs they reach, by cluster size.
REACHED_SMS = {1: 132, 2: 132, 4: 120, 8: 120, 16: 112}
# Blocks of a part at most, at every batch size, as far as cluster sizes go.
DETERMINISTIC_SHARE = 8


class ScheduleSize(NamedTuple):
    """Size of a schedule, and the thread blocks that it is for."""

    num_clusters: int
    cluster_size: int
    num_workers: int


def schedule_size(
    max_num_tokens: int, num_heads: int, topk: int, num_sms: int, *, deterministic: bool = False
) -> ScheduleSize:
    """What a captured step of so many tokens, heads and keys (of both caches) is scheduled over.

    Of the cluster sizes by which a full batch of longest rows takes least time, the largest, for the batches with fewer
    live rows; no more than pairs where a full batch takes several rounds, since a cluster waits until all its places
    are free. Slots to split a full batch once, or to occupy all workers beside one slot for each row of padding. A
    deterministic schedule has the cluster size that follows from `topk` alone, so that no row's split depends on the
    batch.
    """
    sms = max(num_sms // -(-num_heads // HEADS_OF_A_TILE), 1)
    blocks = max(-(-topk // KEY_BLOCK), 1)
    workers = {size: max(sms * reached // 132 // size, 1) * size for size, reached in REACHED_SMS.items()}
    if deterministic:
        cluster_size = next((size for size in workers if size * DETERMINISTIC_SHARE >= blocks), 16)
        return ScheduleSize(max_num_tokens, cluster_size, workers[cluster_size])

    def time_of_a_full_batch(size: int) -> int:
        splits = [parts for parts in workers if parts <= size]
        return min(-(-max_num_tokens * parts // workers[size]) * (OVERHEAD - (-blocks // parts)) for parts in splits)

    sizes = [1, *(size for size in (2, 4, 8, 16) if size <= blocks and (size == 2 or max_num_tokens <= workers[size]))]
    cluster_size = min(sizes, key=lambda size: (time_of_a_full_batch(size), -size))
    slots = min(max_num_tokens + max(sms, max_num_tokens), max_num_tokens * cluster_size)
    return ScheduleSize(-(-slots // cluster_size), cluster_size, workers[cluster_size])


@register
@dataclass(frozen=True, eq=False)
class SparseSchedule(Buffers):
    """Which thread blocks share the keys of which token. Allocate once, `build()` once a step, for all layers alike.

    Attributes:
        tile_scheduler_metadata: `[num_clusters, cluster_size, 2]` int32, as `plan_sparse_attention` says.
        topk: columns of the indices that layers attend by.
        extra_topk: columns of their extra indices, 0 without an extra cache.
        num_workers: thread blocks that run at one time for one tile of heads.
        deterministic: whether a row's split, and so the bits of its output, depend on `topk` and `extra_topk` alone.
    """

    tile_scheduler_metadata: torch.Tensor
    topk: int
    extra_topk: int
    num_workers: int
    deterministic: bool

    @classmethod
    def allocate(
        cls,
        *,
        max_num_tokens: int,
        num_heads: int,
        topk: int,
        extra_topk: int = 0,
        deterministic: bool = False,
        device: torch.device | str | None = None,
    ) -> SparseSchedule:
        """A schedule for up to `max_num_tokens` tokens of `num_heads` heads on this device, all of them padding."""
        for name, size, least in (
            ("max_num_tokens", max_num_tokens, 0),
            ("num_heads", num_heads, 1),
            ("topk", topk, 0),
            ("extra_topk", extra_topk, 0),
        ):
            if size < least:
                raise ValueError(f"SparseSchedule.allocate: {name} must be at least {least}, got {size}")
        place = torch.empty(0, device=device).device
        num_sms = NUM_SMS_WITHOUT_GPU
        if place.type == "cuda":
            num_sms = torch.cuda.get_device_properties(place).multi_processor_count
        chosen = schedule_size(max_num_tokens, num_heads, topk + extra_topk, num_sms, deterministic=deterministic)
        schedule = cls(
            torch.empty(chosen.num_clusters, chosen.cluster_size, 2, dtype=torch.int32, device=place),
            topk,
            extra_topk,
            chosen.num_workers,
            deterministic,
        )
        schedule.build(torch.zeros(max_num_tokens, dtype=torch.int32, device=place))
        return schedule

    def build(self, topk_length: torch.Tensor, extra_topk_length: torch.Tensor | None = None) -> None:
        """Refreshes the buffer in place, in one launch: no allocation, no synchronisation; may be captured.

        Args:
            topk_length: `[num_tokens]` int32, keys of each token, up to `max_num_tokens` of them.
            extra_topk_length: `[num_tokens]` int32, keys in the extra cache; None: `extra_topk`.
        """
        plan_sparse_attention(
            topk_length,
            self.tile_scheduler_metadata,
            self.topk,
            self.num_workers,
            overhead=OVERHEAD,
            extra_topk_length=extra_topk_length,
            extra_topk=self.extra_topk,
            deterministic=self.deterministic,
        )
