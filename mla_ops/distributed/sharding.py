"""How DTensor splits the ops: over tokens and heads, which attention keeps apart; nothing that is shared is gathered.

Each op has a table row: the letters name the dims of its tensors, and a dim may be sharded where its letter is one of
`split`. Tensors without that letter are whole on every rank. Caches are: a rank's cache is its own, and an op that
writes one writes the same on every rank. Contexts over ranks are `ContextParallel`'s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding


class Rule(NamedTuple):
    """Dims of an op's tensors: `t` tokens, `h` heads, `.` any other; arguments that are not named have none to shard.

    Attributes:
        inputs: letters of the dims of each tensor argument.
        outputs: of each output.
        split: letters that may be sharded.
    """

    inputs: dict[str, str]
    outputs: Sequence[str]
    split: str


_SELECTION = {"indices": "t.", "topk_length": "t", "attn_sink": "h", "req_id_per_token": "t"}
_ATTENTION_OUT = ("th.", "th")
_INDEX_QUERY = {"q": "t..", "weights": "t.", "lengths": "t", "req_id_per_token": "t"}
_TOKEN_TABLE = {"topk_indices": "t.", "token_indices": "t.", "positions": "t", "req_id_per_token": "t"}

RULES = {
    "paged_sparse_attention": Rule({"q": "th.", "q_rope": "th.", **_SELECTION}, _ATTENTION_OUT, "th"),
    "paged_sparse_attention.extra": Rule(
        {"q": "th.", **_SELECTION, "extra_indices": "t.", "extra_topk_length": "t"}, _ATTENTION_OUT, "th"
    ),
    "sparse_attention": Rule({"q": "th.", **_SELECTION}, _ATTENTION_OUT, "th"),
    "paged_attention": Rule(
        {"q": "th.", "q_rope": "th.", "req_id_per_token": "t", "key_lens": "t"}, _ATTENTION_OUT, "th"
    ),
    "prefill_attention": Rule({"q": ".h.", "k": ".h.", "v": ".h."}, (".h.", ".h"), "h"),
    "merge_attention_states": Rule(
        {"out_a": "th.", "lse_a": "th", "out_b": "th.", "lse_b": "th"}, _ATTENTION_OUT, "th"
    ),
    "merge_attention_states.stacked": Rule({"outs": ".th.", "lses": ".th"}, _ATTENTION_OUT, "th"),
    "quantize_index_query": Rule({"q": "th.", "weights": "th"}, ("th.", "th"), "th"),
    "indexer_logits": Rule({"q": "t..", "weights": "t.", "row_starts": "t", "row_ends": "t"}, ("t.",), "t"),
    "paged_indexer_logits": Rule(_INDEX_QUERY, ("t.",), "t"),
    "select_keys": Rule(_INDEX_QUERY, ("t.", "t"), "t"),
    "select_keys.flat": Rule({"q": "t..", "weights": "t.", "row_starts": "t", "row_ends": "t"}, ("t.", "t"), "t"),
    "topk_indices": Rule(
        {"scores": "t.", "row_starts": "t", "row_ends": "t", "req_id_per_token": "t"}, ("t.", "t"), "t"
    ),
    "merge_topk": Rule({"scores": "t.", "indices": "t."}, ("t.", "t."), "t"),
    "convert_req_index_to_global_index": Rule(_TOKEN_TABLE, ("t.", "t"), "t"),
    "compute_global_topk_indices_and_lens": Rule(_TOKEN_TABLE, ("t.", "t"), "t"),
    "sliding_window_indices": Rule(_TOKEN_TABLE, ("t.", "t"), "t"),
    "compressed_indices": Rule(_TOKEN_TABLE, ("t.", "t"), "t"),
    "combine_topk_swa_indices": Rule(_TOKEN_TABLE, ("t.", "t"), "t"),
    "filter_prefill_indices": Rule({"indices": "t.", "context_lens": "t"}, ("t.", "t."), "t"),
    "gather_cache": Rule({}, ("..",), ""),
    "gather_index_cache": Rule({}, ("..", "."), ""),
    "concat_and_cache": Rule({}, (), ""),
    "write_index_cache": Rule({}, (), ""),
    "compress_and_cache": Rule({}, (), ""),
    "build_step_metadata": Rule({}, (), ""),
    "build_compressed_metadata": Rule({}, (), ""),
}
WORDS = {"t": "tokens", "h": "heads"}


def register_sharding_rules() -> None:
    """Registers `RULES` with DTensor. Importing `mla_ops.distributed` does it."""
    for name, rule in RULES.items():
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.mla, base), overload or "default")
        register_sharding(op)(_strategies(name, op, rule))
        _tell_keywords_apart(op)


def _tell_keywords_apart(op: torch._ops.OpOverload) -> None:
    """Makes DTensor's cache of strategies look at where keyword tensors are, which `register_sharding` leaves out."""
    infos = DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    keywords = [a.name for a in op._schema.arguments if a.kwarg_only]
    infos[op] = dataclasses.replace(infos[op], static_kwargkey=keywords or None)


def _strategies(name: str, op: torch._ops.OpOverload, rule: Rule) -> Any:
    tensors = [a for a in op._schema.arguments if "Tensor" in str(a.type)]

    def placements(letter: str | None, dims: str) -> Placement:
        return Replicate() if letter is None or letter not in dims else Shard(dims.index(letter))

    def strategies(*args: Any, **kwargs: Any) -> list[tuple[list[Any], list[Any]]]:
        positional = [a for a in op._schema.arguments if not a.kwarg_only]
        given = {a.name: value for a, value in zip(positional, args, strict=False)} | kwargs
        specs: dict[str, Any] = {a.name: given[a.name] for a in tensors if given.get(a.name) is not None}
        for argument, spec in specs.items():
            _check(name, argument, spec, rule)
        keywords = [a.name for a in tensors if a.kwarg_only and a.name in specs]
        options = [None, *(letter for letter in rule.split if _divides(letter, rule, specs))]
        if keywords:
            # DTensor moves positional arguments between placements, and keyword arguments not
            options = [o for o in options if _suits(o, rule, [specs[k] for k in keywords], keywords)]
            if not options:
                found = ", ".join(f"{k} {specs[k].placements}" for k in keywords)
                raise ValueError(
                    f"{name}: keyword tensors must be sharded alike, or whole where they have neither tokens nor "
                    f"heads that can be sharded, got {found}: redistribute them before the call"
                )
        moved = [a for a in positional if a.name not in {t.name for t in tensors}]
        return [
            (
                [placements(letter, dims) for dims in rule.outputs],
                [
                    None if a in moved or a.name not in specs else placements(letter, rule.inputs.get(a.name, ""))
                    for a in positional[: len(args)]
                ]
                + [placements(letter, rule.inputs.get(k, "")) for k in keywords],
            )
            for letter in options
        ]

    return strategies


def _divides(letter: str, rule: Rule, specs: dict[str, Any]) -> bool:
    """Whether each rank gets heads, and whole groups of them where several of a query share one of the keys.

    A rank may have no token, but DTensor splits no dim that is smaller than the number of ranks.
    """
    dims = {name: rule.inputs[name].index(letter) for name in specs if letter in rule.inputs.get(name, "")}
    sizes = {int(specs[name].shape[dim]) for name, dim in dims.items()}
    ranks = max(_ranks_of(specs[name], dim) for name, dim in dims.items())
    if letter == "t":
        return min(sizes) >= ranks
    if len(sizes) > 1:
        return all(size % ranks == 0 for size in sizes)
    return all(-(-size // ranks) * (ranks - 1) < size for size in sizes)


def _ranks_of(spec: Any, dim: int) -> int:
    """Ranks that a tensor is split over in `dim`; where it is whole, those of the largest dim of the mesh."""
    splits = [spec.mesh.size(i) for i, placement in enumerate(spec.placements) if placement == Shard(dim)]
    return math.prod(splits) if splits else max(spec.mesh.shape)


def _suits(letter: str | None, rule: Rule, specs: Sequence[Any], names: Sequence[str]) -> bool:
    """Whether tensors that DTensor does not move are placed as sharding `letter`, in one mesh dim at least, wants."""

    def allowed(spec: Any, name: str) -> bool:
        dims = rule.inputs.get(name, "")
        wanted = Replicate() if letter is None or letter not in dims else Shard(dims.index(letter))
        return any(placement == wanted for placement in spec.placements)

    return all(allowed(spec, name) for spec, name in zip(specs, names, strict=True))


def _check(op: str, argument: str, spec: Any, rule: Rule) -> None:
    """Refuses what would only run after an all-gather of all that the caller has split."""
    dims = rule.inputs.get(argument, "")
    allowed = {dims.index(letter): letter for letter in rule.split if letter in dims}
    for placement in spec.placements:
        if isinstance(placement, (Replicate, Partial)) or (type(placement) is Shard and placement.dim in allowed):
            continue
        shards = [f"Shard({dim}) ({WORDS[letter]})" for dim, letter in sorted(allowed.items())]
        raise ValueError(
            f"{op}: {argument} must be {' or '.join(['Replicate()', *shards])} in every dim of its mesh, got "
            f"{tuple(spec.placements)}" + ("; mla_ops.distributed.ContextParallel splits contexts" if not dims else "")
        )
