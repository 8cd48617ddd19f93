"""FlashMLA's own ops, called as its users call them, for comparison.

Queries are padded to the head counts that it takes before the timing starts, and its schedule is planned once, as a
serving engine plans it for all layers of a step; rows `FlashMLA, with plan` plan inside each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.common import Check, Peer
from mla_ops import formats
from mla_ops.formats import LATENT_DIM
from mla_ops.kernels import flash_mla

Compare = Callable[[torch.Tensor, torch.Tensor], list[Check]]
MAX_FLAT_ELEMENTS = 2**31  # flat keys that 32-bit offsets reach


class Selection(NamedTuple):
    """A paged cache, the slots in it that each token attends to, all valid, and how many there are."""

    kv_cache: torch.Tensor
    cache_format: str
    slots: torch.Tensor
    lens: torch.Tensor


def _op(name: str) -> torch._ops.OpOverload | None:
    """An op of whichever build is installed; None, and a line that says why, if there is none."""
    provider, reason = flash_mla.find_provider()
    if provider is None:
        print(f"FlashMLA is not measured: {reason}")
        return None
    return getattr(getattr(torch.ops, provider.namespace), name).default


def decode(
    q: torch.Tensor,
    kv: torch.Tensor,
    slots: torch.Tensor,
    softmax_scale: float,
    *,
    lens: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    schedule: torch.Tensor | None = None,
    num_splits: torch.Tensor | None = None,
    extra: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
) -> tuple[torch.Tensor, ...]:
    """One call of the raw op: out, lse, schedule and num_splits. Arguments as it takes them, heads padded."""
    op = _op("sparse_decode_fwd")
    assert op is not None
    arguments = (q, kv, slots, lens, attn_sink, schedule, num_splits, *extra, LATENT_DIM, softmax_scale)
    return tuple(op(*arguments, *flash_mla.defaults(op, len(arguments))))


def _peers(
    calls: Sequence[Callable[..., tuple[torch.Tensor, ...]]], num_heads: int, compare: Compare
) -> dict[str, Peer]:
    """Peers that make each of `calls`, one an input set, with a schedule planned before and with none."""
    *_, schedule, num_splits = calls[0]()

    def peer(**planned: torch.Tensor) -> Peer:
        results: list[tuple[torch.Tensor, ...]] = [()] * len(calls)

        def run(number: int) -> None:
            results[number] = calls[number](**planned)

        def check() -> list[Check]:
            out, lse = results[0][:2]
            return compare(out[:, 0, :num_heads], lse[:, :num_heads, 0])

        return Peer([partial(run, number) for number in range(len(calls))], check)

    return {"FlashMLA": peer(schedule=schedule, num_splits=num_splits), "FlashMLA, with plan": peer()}


def decode_peers(
    sets: Sequence[tuple[torch.Tensor, torch.Tensor]],
    kv_cache: torch.Tensor,
    softmax_scale: float,
    compare: Compare,
) -> dict[str, Peer]:
    """Sparse decode over `fp8_ds_mla`.

    Args:
        sets: q `[num_tokens, num_heads, 576]` and slots `[num_tokens, topk]`, all valid, for each input set.
        kv_cache: `[num_blocks, block_size, 656]` uint8.
        softmax_scale: factor of the scores.
        compare: checks an output and its lse for the first set.
    """
    if _op("sparse_decode_fwd") is None:
        return {}
    kv = kv_cache.unsqueeze(2)
    calls = [
        partial(decode, flash_mla.pad_query(q).unsqueeze(1), kv, slots.to(torch.int32).unsqueeze(1), softmax_scale)
        for q, slots in sets
    ]
    return _peers(calls, sets[0][0].shape[1], compare)


def two_cache_peers(
    sets: Sequence[tuple[torch.Tensor, Selection, Selection]],
    attn_sink: torch.Tensor,
    softmax_scale: float,
    compare: Compare,
) -> dict[str, Peer]:
    """Sparse decode over two `fp8_ds_mla_v4` caches with a sink: q, window and compressed tokens of each input set."""
    if _op("sparse_decode_fwd") is None:
        return {}
    sink = flash_mla.pad_sink(attn_sink)
    calls = []
    for q, window, extra in sets:
        kv, slots, lens = _as_pages(window)
        calls.append(
            partial(
                decode,
                flash_mla.pad_query(q).unsqueeze(1),
                kv,
                slots,
                softmax_scale,
                lens=lens,
                attn_sink=sink,
                extra=_as_pages(extra),
            )
        )
    return _peers(calls, sets[0][0].shape[1], compare)


def _as_pages(selection: Selection) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The cache as `[pages, page, 1, row]`, which does not say where a planar row lies; its slots and lengths."""
    kv_cache, cache_format, slots, lens = selection
    num_blocks, block_size, block_stride, head_dim = formats.geometry(kv_cache, cache_format)
    width = formats.FORMATS[cache_format].row_width(head_dim)
    pages = kv_cache.as_strided((num_blocks, block_size, 1, width), (block_stride, width, width, 1))
    return pages, slots.to(torch.int32).unsqueeze(1), lens


def prefill_peers(
    sets: Sequence[tuple[torch.Tensor, torch.Tensor]], kv: torch.Tensor, softmax_scale: float, compare: Compare
) -> dict[str, Peer]:
    """Sparse prefill over flat bfloat16 keys `[num_kv, head_dim]`; arguments as in `decode_peers`."""
    op = _op("sparse_prefill_fwd")
    if op is None:
        return {}
    if kv.numel() >= MAX_FLAT_ELEMENTS:
        print(f"FlashMLA is not measured: {kv.numel()} elements of flat keys are past its 32-bit offsets")
        return {}
    num_heads = sets[0][0].shape[1]
    inputs = [(flash_mla.pad_query(q), indices.to(torch.int32).unsqueeze(1)) for q, indices in sets]
    results: list[tuple[torch.Tensor, ...]] = [()] * len(inputs)

    def run(number: int) -> None:
        q, indices = inputs[number]
        arguments = (q, kv.unsqueeze(1), indices, softmax_scale, LATENT_DIM, None, None)
        results[number] = tuple(op(*arguments, *flash_mla.defaults(op, len(arguments))))

    def check() -> list[Check]:
        out, _, lse = results[0]
        return compare(out[:, :num_heads], lse[:, :num_heads])

    return {"FlashMLA": Peer([partial(run, number) for number in range(len(inputs))], check)}
