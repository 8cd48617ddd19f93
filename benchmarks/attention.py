"""Shared by the benchmarks of attention: random choices of keys, the float64 check, what a call has to move."""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch

from benchmarks import common
from benchmarks.cache import fill_cache, query_dtype, raise_keys, scale_keys
from mla_ops import dispatch, formats
from mla_ops.kernels.hopper.launch import Clusters, Group
from mla_ops.kernels.hopper.waves import Wave, override

BLOCK_SIZE = 64
CHECKED_TOKENS = 8  # rows that are compared with the reference, spread over the batch
CACHE_BYTES = 2**30  # least size of a decode's cache on a GPU: many times what any cache or TLB holds


def random_selection(num_tokens: int, topk: int, context: int, generator: torch.Generator) -> torch.Tensor:
    """`[num_tokens, topk]` different indices in [0, context) in random order."""
    rows = [
        torch.rand(min(512, num_tokens - start), context, device=generator.device, generator=generator)
        .topk(topk)
        .indices
        for start in range(0, num_tokens, 512)
    ]
    return torch.cat(rows).to(torch.int32)


def random_block_table(
    num_requests: int, blocks_per_request: int, num_blocks: int, generator: torch.Generator
) -> torch.Tensor:
    """Blocks of each request, none of them twice, anywhere in a cache of `num_blocks`."""
    blocks = torch.randperm(num_blocks, device=generator.device, generator=generator)
    return blocks[: num_requests * blocks_per_request].to(torch.int32).view(num_requests, blocks_per_request)


def dead_unless(alive: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return torch.where(alive, slots, -1)


def _random_share(share: float) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    def keep(slots: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        return dead_unless(torch.rand(slots.shape, device=slots.device, generator=generator) < share, slots)

    return keep


def _first_repeated(count: int | None) -> Callable[[torch.Tensor, torch.Generator], torch.Tensor]:
    def repeat(slots: torch.Tensor, _: torch.Generator) -> torch.Tensor:
        num_tokens, topk = slots.shape
        first = slots[:1, :count]
        return first.repeat(num_tokens, -(-topk // first.shape[1]))[:, :topk].contiguous()

    return repeat


# Each makes a pattern of slots `[num_tokens, topk]` out of different live ones.
PATTERNS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "live": lambda slots, _: slots,
    "7/8": _random_share(7 / 8),
    "1/2": _random_share(1 / 2),
    "1/8": _random_share(1 / 8),
    "tail": lambda slots, _: dead_unless(
        torch.arange(slots.shape[1], device=slots.device) < slots.shape[1] // 2, slots
    ),
    "none": lambda slots, _: torch.full_like(slots, -1),
    "same": _first_repeated(None),
    "same 100": _first_repeated(100),
    "same 1": _first_repeated(1),
}
FEW_KEYS = 64  # keys of a mixture's short rows

SCORES = ("usual", "growing", "large", "sinks")
GROWTH = 128.0  # nats that scores rise along a row
LARGE = 2.0**20
SINK = 64.0  # above what scores of unit normals reach
TOP_KEY = 64.0  # the first RoPE value of a row's last key, where scores rise


class Kind(NamedTuple):
    """The kind of a batch's keys: names of `PATTERNS`, `mixed_lengths`, `cache.magnitude_factors` and `SCORES`.

    Scores are "growing" along each row, "large" by queries of 2^20, or below "sinks" by 64.
    """

    pattern: str = "live"
    mixture: str = "full"
    magnitude: str = "1"
    scores: str = "usual"

    def label(self) -> dict[str, int | str]:
        """The label of a row besides its shape: whatever is not usual."""
        usual = Kind()
        return {name: str(value) for name, value in self._asdict().items() if value != getattr(usual, name)}


def rise(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """The first RoPE values of a row's keys whose scores rise by `GROWTH`."""
    return torch.linspace(0.0, TOP_KEY, count, device=device).to(dtype)


def shape_queries(q: torch.Tensor, scores: str, softmax_scale: float) -> torch.Tensor:
    """Queries, in place, that give a kind of scores."""
    if scores == "growing":
        q[..., -formats.ROPE_DIM] = GROWTH / (TOP_KEY * softmax_scale)
    elif scores == "large":
        q.mul_(LARGE)
    return q


def sinks(kind: Kind, num_heads: int, device: torch.device) -> torch.Tensor | None:
    return torch.full((num_heads,), SINK, device=device) if kind.scores == "sinks" else None


def mixed_lengths(mixture: str, num_tokens: int, topk: int, device: torch.device) -> torch.Tensor:
    """`[num_tokens]` keys of each token.

    Args:
        mixture: "full"; every "fourth" row full and the others short, or only "one" full; "lognormal"; or a number of
            keys that all have.
        num_tokens: rows.
        topk: keys of a full row.
        device: of the result.
    """
    if mixture.isdigit():
        return torch.full((num_tokens,), min(int(mixture), topk), dtype=torch.int32, device=device)
    if mixture == "lognormal":
        drawn = random.Random(num_tokens)
        keys = [min(topk, max(1, int(drawn.lognormvariate(5.5, 1.5)))) for _ in range(num_tokens)]
        return torch.tensor(keys, dtype=torch.int32, device=device)
    lens = torch.full((num_tokens,), topk, dtype=torch.int32, device=device)
    if mixture != "full":
        step = {"fourth": 4, "one": num_tokens}[mixture]
        lens[torch.arange(num_tokens, device=device) % step != 0] = min(FEW_KEYS, topk)
    return lens


# Type of an option.
mixtures = common.names_of(
    lambda name: mixed_lengths(name, 1, 1, torch.device("cpu")), "full", "fourth", "one", "lognormal", "a number"
)


def shapes(value: str) -> list[tuple[int, int]]:
    """Type of an option like `128x16,32x128`: tokens and heads."""
    pairs = [part.split("x") for part in value.split(",") if part]
    return [(int(tokens), int(heads)) for tokens, heads in pairs]


def to_slots(local: torch.Tensor, block_table: torch.Tensor) -> torch.Tensor:
    """Slots of indices into each token's own request; token i is request i."""
    blocks = block_table.gather(1, (local // BLOCK_SIZE).long())
    return blocks * BLOCK_SIZE + local % BLOCK_SIZE


def cache_blocks(needed: int, block_bytes: int, on_gpu: bool) -> int:
    """Blocks of a cache that holds `needed` ones, and is large enough for a figure."""
    return max(needed, -(-CACHE_BYTES // block_bytes)) if on_gpu else needed


def filled_cache(
    cache_format: str, num_blocks: int, kind: Kind, generator: torch.Generator, head_dim: int | None = None
) -> torch.Tensor:
    """A cache of keys of the kind's magnitude."""
    device = generator.device
    kv_cache = formats.allocate_cache(cache_format, num_blocks, BLOCK_SIZE, head_dim=head_dim, device=device)
    fill_cache(kv_cache, cache_format, generator)
    if kind.magnitude != "1":
        scale_keys(kv_cache, cache_format, kind.magnitude, generator)
    return kv_cache


def paged_keys(
    num_requests: int,
    tokens_of_each: int,
    cache_format: str,
    kind: Kind,
    arguments: argparse.Namespace,
    generator: torch.Generator,
    head_dim: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with requests of whole blocks, and their block table; scores of the kind grow along each request."""
    device, blocks = generator.device, -(-tokens_of_each // BLOCK_SIZE)
    block_bytes = BLOCK_SIZE * formats.FORMATS[cache_format].bytes_per_token(head_dim)
    num_blocks = cache_blocks(num_requests * blocks, block_bytes, device.type == "cuda" and not arguments.quick)
    kv_cache = filled_cache(cache_format, num_blocks, kind, generator, head_dim)
    block_table = random_block_table(num_requests, blocks, num_blocks, generator)
    if kind.scores == "growing":
        positions = torch.arange(blocks * BLOCK_SIZE, device=device).expand(num_requests, -1)
        values = rise(positions.shape[1], query_dtype(cache_format), device).expand_as(positions)
        raise_keys(kv_cache, cache_format, to_slots(positions, block_table), values)
    return kv_cache, block_table


def random_queries(
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    scores: str,
    softmax_scale: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Unit normals, shaped for a kind of scores."""
    q = torch.randn(num_tokens, num_heads, head_dim, device=generator.device, generator=generator).to(dtype)
    return shape_queries(q, scores, softmax_scale)


def check_attention(
    q: torch.Tensor,
    keys_of: Callable[[int], torch.Tensor],
    softmax_scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    attn_sink: torch.Tensor | None = None,
) -> list[common.Check]:
    """Compares some rows with attention in float64.

    Args:
        q: `[num_tokens, num_heads, head_dim]`.
        keys_of: the keys that a token attends to, `[n, head_dim]` float64.
        softmax_scale: factor of the scores.
        out, lse: what the kernel wrote.
        attn_sink: `[num_heads]`, or None.
    """
    num_tokens = q.shape[0]
    chosen = sorted({i * (num_tokens - 1) // max(1, CHECKED_TOKENS - 1) for i in range(CHECKED_TOKENS)})
    worst: dict[str, common.Check] = {}
    for token in chosen:
        keys = keys_of(token)
        if not len(keys):
            for name, found, wanted in (("out", out[token], 0.0), ("lse", lse[token], -torch.inf)):
                empty = common.exact(name, found, torch.full_like(found, wanted))
                worst[name] = max(worst.get(name, empty), empty, key=lambda check: check.severity)
            continue
        scores = q[token].double() @ keys.T * softmax_scale
        expected_lse = torch.logsumexp(scores, dim=-1)
        weights = (scores - expected_lse.unsqueeze(-1)).exp()
        if attn_sink is not None:
            weights = weights * torch.sigmoid(expected_lse - attn_sink.double()).unsqueeze(-1)
        values = keys[:, : formats.LATENT_DIM]
        expected = weights @ values
        # Unit roundoff of 8 significant bits. Rounding the query and the keys moves a score, rounding a probability
        # its share of the output; random signs make such sums grow as their root mean square, and four of those is
        # the bound. The output itself is rounded once. float32 sums add next to nothing.
        unit = 2.0**-8
        moved_score = float((q[token].double().square() @ keys.square().T).sqrt().max()) * unit * softmax_scale
        # Keys that are the same are rounded alike.
        kinds, kind = scores[0].unique(return_inverse=True)
        together = torch.zeros(len(weights), len(kinds), dtype=weights.dtype, device=q.device)
        together.index_add_(1, kind, weights)
        of_kinds = values.new_zeros(len(kinds), values.shape[1]).index_copy_(0, kind, values)
        moved_output = float((together.square() @ of_kinds.square()).sqrt().max()) * (unit**2 + moved_score**2) ** 0.5
        out_bound = unit * float(expected.abs().max()) + 4 * moved_output
        checks = (
            common.Check("out", common.max_error(out[token], expected), out_bound),
            common.Check("lse", common.max_error(lse[token], expected_lse), 4 * moved_score),
        )
        if moved_score > 1:
            of_heads = values.expand(len(scores), -1, -1)
            largest = among_the_largest(out[token], expected, scores, of_heads, 4 * moved_score)
            checks = (largest, checks[1])
        for check in checks:
            if check.name not in worst or check.severity > worst[check.name].severity:
                worst[check.name] = check
    return list(worst.values())


def among_the_largest(
    out: torch.Tensor,
    expected: torch.Tensor,
    scores: torch.Tensor,
    values: torch.Tensor,
    moved: float,
) -> common.Check:
    """Compares outputs of scores that rounding moves by more than 1: each is a mean of values with the largest scores.

    Args:
        out, expected: `[num_heads, head_dim_v]`.
        scores: `[num_heads, num_keys]` float64.
        values: `[num_heads, num_keys, head_dim_v]` float64.
        moved: what rounding may move a score by.
    """
    rest = 24.0  # nats: all keys so far below the largest score weigh less than the rounding of a result
    head, key = (scores >= scores.amax(dim=-1, keepdim=True) - 2 * moved - rest).nonzero(as_tuple=True)
    chosen = values[head, key]
    reach = torch.zeros_like(expected)
    reach.scatter_reduce_(0, head[:, None].expand_as(chosen), (chosen - expected[head]).abs(), "amax")
    bound = reach + 2.0**-7 * float(chosen.abs().max())
    error = torch.nan_to_num((out.double() - expected).abs(), nan=torch.inf)
    worst = int((error / bound).argmax())
    return common.Check("out", float(error.flatten()[worst]), float(bound.flatten()[worst]))


def attention_flops(num_tokens: int, num_heads: int, num_keys: int, head_dim: int) -> int:
    return 2 * num_tokens * num_heads * num_keys * (head_dim + formats.LATENT_DIM)


def attention_bytes(num_tokens: int, num_heads: int, num_keys: int, head_dim: int, row_bytes: int) -> int:
    queries_and_outputs = num_tokens * num_heads * (2 * head_dim + 2 * formats.LATENT_DIM + 4)
    return num_tokens * num_keys * (row_bytes + 4) + queries_and_outputs


def make_outputs(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    num_tokens, num_heads, _ = q.shape
    out = torch.empty(num_tokens, num_heads, formats.LATENT_DIM, dtype=q.dtype, device=q.device)
    return out, torch.empty(num_tokens, num_heads, dtype=torch.float32, device=q.device)


class Attend(Protocol):
    """One call of ours for an input set, into these outputs, deterministic or not."""

    def __call__(
        self,
        number: int,
        out: torch.Tensor,
        lse: torch.Tensor,
        *,
        deterministic: bool = False,
    ) -> None: ...


def add_halves_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--q-halves",
        action="store_true",
        help="time decode over queries in two tensors as well (`q_rope`), and over these joined by `torch.cat` first",
    )


def add_variant_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--deterministic", action="store_true", help="time decode with `deterministic=True` as well")
    parser.add_argument(
        "--waves",
        type=common.names_of(lambda text: waves_of(text, 2**20), "64,8", "7x64,8+24,16", "group8", separator=";"),
        default=[],
        help="ours for Hopper also in other launches than it chooses: '64,8;7x64,8+24,16' is all tokens by clusters of "
        "8 CTAs with 64 heads each, and 7 of them so, the others by 16 with 24 heads (a third number: parts of a row; "
        "a fourth: shares, of which a CTA takes several; 'group8' is a group of 8 CTAs)",
    )


def shape_of(text: str) -> Clusters | Group:
    """A launch as `--waves` names it: tile, splits and parts of clusters, or `group` and its members."""
    if text.startswith("group"):
        return Group(int(text.removeprefix("group")))
    return Clusters(*common.integers(text))


def waves_of(text: str, num_tokens: int) -> tuple[Wave, ...]:
    """Launches as `--waves` names them, of a call with so many tokens; the last has those that no other has."""
    parts = [part.rpartition("x") for part in text.split("+")]
    counts = [int(count) for count, _, _ in parts if count]
    if len(counts) < len(parts):
        counts.append(num_tokens - sum(counts))
    return tuple(Wave(count, shape_of(shape)) for count, (_, _, shape) in zip(counts, parts, strict=True))


def variants(
    arguments: argparse.Namespace,
    attend: Attend,
    queries: Sequence[torch.Tensor],
    compare: Callable[[torch.Tensor, torch.Tensor], list[common.Check]],
) -> dict[str, common.Peer]:
    """Other ways to call ours, under the lowering that dispatch chooses, or in launches that `--waves` names.

    Args:
        arguments: parsed options, with those of `add_variant_options`.
        attend: the call.
        queries: of each input set.
        compare: checks the outputs of the first.
    """

    def variant(label: str, waves: tuple[Wave, ...], deterministic: bool = False) -> common.Peer | None:
        outputs = [make_outputs(q) for q in queries]

        def run(number: int) -> None:
            with dispatch.override("hopper") if waves else contextlib.nullcontext(), override(*waves):
                attend(number, *outputs[number], deterministic=deterministic)

        try:
            run(0)
        except NotImplementedError as error:
            print(f"{label}: not measured: {error}")
            return None
        return common.Peer(
            [partial(run, number) for number in range(len(outputs))],
            lambda: compare(*outputs[0]),
            poison=lambda: poison(outputs[0]),
            ours=True,
        )

    made = {}
    if arguments.deterministic:
        made["ours, deterministic"] = variant("ours, deterministic", (), deterministic=True)
    for text in arguments.waves:
        label = f"ours, {text}"
        made[label] = variant(label, waves_of(text, len(queries[0])))
    return {label: peer for label, peer in made.items() if peer is not None}


def in_halves(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A query as a layer has it: the latent dims heads first, as a batched product leaves them; RoPE behind others."""
    latent = q[..., : formats.LATENT_DIM].transpose(0, 1).contiguous().transpose(0, 1)
    projected = q.new_zeros(*q.shape[:2], 192)
    projected[..., -formats.ROPE_DIM :] = q[..., formats.LATENT_DIM :]
    return latent, projected[..., -formats.ROPE_DIM :]


def halves_peers(
    queries: Sequence[torch.Tensor],
    attend: Callable[[int, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor], None],
    compare: Callable[[torch.Tensor, torch.Tensor], list[common.Check]],
) -> dict[str, common.Peer]:
    """Ours over queries in two halves, and over what `torch.cat` joins of them first.

    Args:
        queries: whole, of each input set.
        attend: the call: number of the input set, `q`, `q_rope`, outputs.
        compare: checks the outputs of the first.
    """
    halves = [in_halves(q) for q in queries]

    def peer(join: bool) -> common.Peer:
        outputs = [make_outputs(q) for q in queries]

        def run(number: int) -> None:
            q, q_rope = (torch.cat(halves[number], dim=-1), None) if join else halves[number]
            attend(number, q, q_rope, *outputs[number])

        return common.Peer(
            [partial(run, number) for number in range(len(outputs))],
            lambda: compare(*outputs[0]),
            poison=lambda: poison(outputs[0]),
            ours=True,
        )

    return {"ours, halves": peer(False), "ours, torch.cat of halves": peer(True)}


def poison(outputs: Sequence[torch.Tensor]) -> None:
    for tensor in outputs:
        tensor.fill_(torch.nan)
