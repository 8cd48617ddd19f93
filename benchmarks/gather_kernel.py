"""Device code of gather_floor.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_keys"])
def gather_sums_kernel(
    words,
    slots,
    sums,
    num_keys: tl.int32,
    ROW: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Adds up the words of KEYS rows: one program loads them all at once, so that many loads are on the way.

    A row of ROW words is taken in HEAD words, a power of two, and in the rest, which fits TAIL words.
    """
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live = key < num_keys
    row = tl.load(slots + key, mask=live, other=0).to(tl.int64) * ROW
    head = tl.arange(0, HEAD)
    total = tl.sum(tl.sum(tl.load(words + row[:, None] + head[None, :], mask=live[:, None], other=0), 1), 0)
    if TAIL:
        tail = HEAD + tl.arange(0, TAIL)
        mask = live[:, None] & (tail < ROW)[None, :]
        total += tl.sum(tl.sum(tl.load(words + row[:, None] + tail[None, :], mask=mask, other=0), 1), 0)
    tl.store(sums + tl.program_id(0), total)
