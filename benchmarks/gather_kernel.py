"""Device code of gather_floor.py."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_keys"])
def gather_sums_kernel(words, slots, sums, num_keys: tl.int32, row_words: tl.int32, KEYS: tl.constexpr):
    """Adds up the words of KEYS rows: one program loads them all at once, so that many loads are on the way."""
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    live = key < num_keys
    row = tl.load(slots + key, mask=live, other=0).to(tl.int64) * row_words
    word = tl.arange(0, 128)
    latent = tl.load(words + row[:, None] + word[None, :], mask=live[:, None], other=0)
    word = 128 + tl.arange(0, 64)
    rest = tl.load(words + row[:, None] + word[None, :], mask=live[:, None] & (word < row_words)[None, :], other=0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.sum(latent, 1), 0) + tl.sum(tl.sum(rest, 1), 0))
