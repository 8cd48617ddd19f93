"""The memory floor of sparse attention: a kernel that only reads the selected rows of the cache, at full occupancy.

Random rows of 656 bytes do not reach copy bandwidth, so what a gather alone takes, not bytes over bandwidth, is what an
attention kernel can hope for where memory bounds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.common import Check, Peer, exact
from mla_ops import dispatch

KEYS_PER_PROGRAM = 16


def gather_peer(kv_cache: torch.Tensor, slot_sets: Sequence[torch.Tensor]) -> dict[str, Peer]:
    """Reads every selected row once and adds up its 32-bit words.

    Args:
        kv_cache: `[num_blocks, block_size, row_bytes]` uint8, contiguous, rows a multiple of 4 bytes.
        slot_sets: `[num_tokens, topk]` slots, all valid, for each input set.
    """
    if not dispatch.is_installed("triton") or kv_cache.device.type != "cuda":
        print("a gather alone is not measured: it needs Triton and a GPU")
        return {}
    kernel = importlib.import_module("benchmarks.gather_kernel").gather_sums_kernel
    words = kv_cache.view(-1, kv_cache.shape[2]).view(torch.int32)
    slot_sets = [slots.reshape(-1).to(torch.int32) for slots in slot_sets]
    programs = -(-slot_sets[0].shape[0] // KEYS_PER_PROGRAM)
    sums = torch.empty(programs, dtype=torch.int32, device=kv_cache.device)

    def run(slots: torch.Tensor) -> None:
        kernel[(programs,)](words, slots, sums, slots.shape[0], words.shape[1], KEYS=KEYS_PER_PROGRAM, num_warps=4)

    def check() -> list[Check]:
        run(slot_sets[0])
        rows = torch.nn.functional.pad(slot_sets[0].long(), (0, programs * KEYS_PER_PROGRAM - slot_sets[0].shape[0]))
        valid = torch.arange(rows.shape[0], device=rows.device) < slot_sets[0].shape[0]
        row_sums = torch.where(valid, words.sum(1, dtype=torch.int64)[rows], 0)
        expected = row_sums.view(programs, KEYS_PER_PROGRAM).sum(1).to(torch.int32)
        return [exact("sums", sums, expected)]

    return {"gather alone": Peer([partial(run, slots) for slots in slot_sets], check)}
