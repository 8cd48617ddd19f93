"""FlashMLA's own ops, called as its users call them, for comparison.

Queries are padded to the head counts that it takes before the timing starts, and its schedule is planned once, as a
serving engine plans it for all layers of a step; rows `FlashMLA, with plan` plan inside each call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.common import Check, Peer
from mla_ops.formats import LATENT_DIM
from mla_ops.kernels import flash_mla

Compare = Callable[[torch.Tensor, torch.Tensor], list[Check]]


def _op(name: str) -> torch._ops.OpOverload | None:
    """An op of whichever build is installed; None, and a line that says why, if there is none."""
    provider, reason = flash_mla.find_provider()
    if provider is None:
        print(f"FlashMLA is not measured: {reason}")
        return None
    return getattr(getattr(torch.ops, provider.namespace), name).default


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
    op = _op("sparse_decode_fwd")
    if op is None:
        return {}
    num_heads = sets[0][0].shape[1]
    kv = kv_cache.unsqueeze(2)
    inputs = [(flash_mla.pad_query(q).unsqueeze(1), slots.to(torch.int32).unsqueeze(1)) for q, slots in sets]

    def call(
        number: int, schedule: torch.Tensor | None = None, num_splits: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, ...]:
        q, slots = inputs[number]
        arguments = (q, kv, slots, None, None, schedule, num_splits, None, None, None, LATENT_DIM, softmax_scale)
        return tuple(op(*arguments, *flash_mla.defaults(op, len(arguments))))

    *_, schedule, num_splits = call(0)

    def peer(plan_inside: bool) -> Peer:
        results: list[tuple[torch.Tensor, ...]] = [()] * len(inputs)

        def run(number: int) -> None:
            planned = () if plan_inside else (schedule, num_splits)
            results[number] = call(number, *planned)

        def check() -> list[Check]:
            out, lse = results[0][:2]
            return compare(out[:, 0, :num_heads], lse[:, :num_heads, 0])

        return Peer([partial(run, number) for number in range(len(inputs))], check)

    return {"FlashMLA": peer(plan_inside=False), "FlashMLA, with plan": peer(plan_inside=True)}


def prefill_peers(
    sets: Sequence[tuple[torch.Tensor, torch.Tensor]], kv: torch.Tensor, softmax_scale: float, compare: Compare
) -> dict[str, Peer]:
    """Sparse prefill over flat bfloat16 keys `[num_kv, head_dim]`; arguments as in `decode_peers`."""
    op = _op("sparse_prefill_fwd")
    if op is None:
        return {}
    num_heads = sets[0][0].shape[1]
    inputs = [(flash_mla.pad_query(q), indices.unsqueeze(1)) for q, indices in sets]
    results: list[tuple[torch.Tensor, ...]] = [()] * len(inputs)

    def run(number: int) -> None:
        q, indices = inputs[number]
        arguments = (q, kv.unsqueeze(1), indices, softmax_scale, LATENT_DIM, None, None)
        results[number] = tuple(op(*arguments, *flash_mla.defaults(op, len(arguments))))

    def check() -> list[Check]:
        out, _, lse = results[0]
        return compare(out[:, :num_heads], lse[:, :num_heads])

    return {"FlashMLA": Peer([partial(run, number) for number in range(len(inputs))], check)}
