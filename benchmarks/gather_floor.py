"""The memory floor of sparse attention: a kernel that only reads the selected rows of the cache, at full occupancy.

Random rows of 656 bytes do not reach copy bandwidth, and those of a prefill come from the L2 cache, so what a gather
alone takes, not bytes over bandwidth, is what an attention kernel can hope for where memory bounds it: its ratio to a
peer is the least that any kernel can reach which reads each row that a token chose once.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.common import Check, Peer, exact
from mla_ops import dispatch

KEYS_PER_PROGRAM = 16


def gather_peer(rows: torch.Tensor, slot_sets: Sequence[torch.Tensor]) -> dict[str, Peer]:
    """Reads every selected row once and adds up its 32-bit words.

    Args:
        rows: `[num_rows, width]` of any dtype, contiguous, rows a multiple of 16 bytes.
        slot_sets: `[num_tokens, topk]` rows, all valid, for each input set.
    """
    if not dispatch.is_installed("triton") or rows.device.type != "cuda":
        print("a gather alone is not measured: it needs Triton and a GPU")
        return {}
    words = rows.view(torch.int32)
    slot_sets = [slots.reshape(-1).to(torch.int32) for slots in slot_sets]
    programs = -(-slot_sets[0].shape[0] // KEYS_PER_PROGRAM)
    sums = torch.empty(programs, dtype=torch.int32, device=rows.device)

    def check() -> list[Check]:
        gather_sums(words, slot_sets[0], sums)
        chosen = torch.nn.functional.pad(slot_sets[0].long(), (0, programs * KEYS_PER_PROGRAM - slot_sets[0].shape[0]))
        valid = torch.arange(chosen.shape[0], device=rows.device) < slot_sets[0].shape[0]
        row_sums = torch.where(valid, words.sum(1, dtype=torch.int64)[chosen], 0)
        expected = row_sums.view(programs, KEYS_PER_PROGRAM).sum(1).to(torch.int32)
        return [exact("sums", sums, expected)]

    runs = [partial(gather_sums, words, slots, sums) for slots in slot_sets]
    bytes_moved = slot_sets[0].shape[0] * (4 * words.shape[1] + 4)
    return {"gather alone": Peer(runs, check, bytes_moved=bytes_moved)}


def gather_sums(words: torch.Tensor, slots: torch.Tensor, sums: torch.Tensor) -> None:
    """Sums of the words `[num_rows, row_words]` int32 of each `KEYS_PER_PROGRAM` slots."""
    kernel = importlib.import_module("benchmarks.gather_kernel").gather_sums_kernel
    row_words = words.shape[1]
    head = 1 << (row_words.bit_length() - 1)
    tail = 1 << (row_words - head - 1).bit_length() if row_words > head else 0
    kernel[(sums.shape[0],)](
        words, slots, sums, slots.shape[0], ROW=row_words, HEAD=head, TAIL=tail, KEYS=KEYS_PER_PROGRAM, num_warps=4
    )
