"""Every attention kernel over keys, indices and scores that are not usual, beside the usual case.

python -m benchmarks.unusual

The usual case is keys and queries of unit normals, all indices alive, all rows full. A line is a kernel and a shape:
its time in the usual case, then the ratio to it of each kind of `benchmarks.attention.Kind`, and the largest error of
all over its bound. Dense decode's patterns are of the blocks of a request. Lines at the end name what takes more than
1.25, or is wrong, and why. All kernels of a shape run in one process; captured graphs are replayed, and L2 is
overwritten in between.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks import attention, common, dense_attention, sparse_attention, sparse_attention_extra
from benchmarks.attention import Kind

BAR = 1.25
PATTERNS = tuple(Kind(pattern) for pattern in attention.PATTERNS if pattern != "live")
MIXTURES = tuple(Kind(mixture=mixture) for mixture in ("fourth", "one", "lognormal"))
MAGNITUDES = tuple(Kind(magnitude=magnitude) for magnitude in ("0.01", "1048576", "spread12", "wild30"))
SCORES = tuple(Kind(scores=scores) for scores in attention.SCORES if scores != "usual")
KINDS = (*PATTERNS, *MIXTURES, *MAGNITUDES, *SCORES)
NAMES = {
    "1048576": "2^20",
    "lognormal": "logn",
    "spread12": "spread",
    "same 100": "s 100",
    "same 1": "s 1",
    "growing": "grow",
}
RUNNING_MAX = "running maxima of 64 heads move in most turns"
WIDE = "wide turns: scales of a key span more than float16 holds"
SMALL = "rows of one CTA divide groups far below their key's largest; else wide turns"
BLOCKS = "keys of a block that a table has not got keep their place in a turn, and warps clear it by stores"
# Why a kind takes more than `BAR`, or is wrong: by its lowering and kernel, or how these begin.
WHY = {
    "hopper": {"2^20": RUNNING_MAX, "grow": RUNNING_MAX, "large": RUNNING_MAX, "spread": SMALL, "wild30": WIDE},
    "hopper dense": {"7/8": BLOCKS, "1/2": BLOCKS, "1/8": BLOCKS, "tail": BLOCKS, "none": BLOCKS},
    "triton": {
        "s 1": "all SMs read the same lines of L2",
        "wild30": "the second walk, with scales outside operands: no unit holds them",
    },
}


def why(lowering: str, name: str, kind: Kind) -> str:
    """The reason that is known for the longest beginning of a line."""
    found = [reasons for start, reasons in sorted(WHY.items()) if f"{lowering} {name}".startswith(start)]
    return next((reasons[name_of(kind)] for reasons in reversed(found) if name_of(kind) in reasons), "not explained")


def name_of(kind: Kind) -> str:
    found = str(next(iter(kind.label().values()), "usual"))
    return NAMES.get(found, found)


def paged(cache_format: str, num_tokens: int, num_heads: int, arguments: argparse.Namespace, kind: Kind) -> common.Case:
    return sparse_attention.build_paged(
        num_tokens, num_heads, arguments.topk, cache_format, 4 * arguments.topk, kind, arguments
    )


def two_caches(num_tokens: int, num_heads: int, arguments: argparse.Namespace, kind: Kind) -> common.Case:
    topk = arguments.topk // 4
    return sparse_attention_extra.build_case(
        num_tokens, num_heads, topk, 4 * arguments.topk, "fp8_ds_mla_v4", arguments, kind
    )


def flat(num_tokens: int, num_heads: int, arguments: argparse.Namespace, kind: Kind) -> common.Case:
    prefill = sparse_attention.Prefill(num_tokens, num_heads, arguments.topk, 576)
    return sparse_attention.build_flat(prefill, 8 * arguments.topk, arguments, kind)


def dense(cache_format: str, num_tokens: int, num_heads: int, arguments: argparse.Namespace, kind: Kind) -> common.Case:
    lengths = [4 * arguments.topk] * num_tokens
    return dense_attention.build_paged(lengths, {"T": num_tokens}, num_heads, cache_format, arguments, kind)


def expanded(num_tokens: int, num_heads: int, arguments: argparse.Namespace, kind: Kind) -> common.Case:
    dims = 192, 128
    return dense_attention.build_prefill([num_tokens], {"T": num_tokens}, num_heads, dims, arguments, kind)


Build = Callable[[int, int, argparse.Namespace, Kind], common.Case]
DECODE = ((8, 128), (128, 16), (128, 128))
WITHOUT_SINKS = tuple(kind for kind in SCORES if kind.scores != "sinks")
# what a kernel is called, its cases, the shapes and the kinds that it has
KERNELS: dict[str, tuple[Build, tuple[tuple[int, int], ...], tuple[Kind, ...]]] = {
    "sparse fp8_ds_mla": (partial(paged, "fp8_ds_mla"), DECODE, KINDS),
    "sparse fp8_ds_mla_v4": (partial(paged, "fp8_ds_mla_v4"), DECODE[1:], KINDS),
    "sparse two caches": (two_caches, ((128, 64),), KINDS),
    "sparse bf16": (partial(paged, "bf16"), DECODE[1:], KINDS),
    "sparse flat": (flat, ((1024, 64),), (*PATTERNS, *MAGNITUDES, *SCORES)),
    "dense fp8_ds_mla": (partial(dense, "fp8_ds_mla"), ((32, 16), (32, 128)), (*PATTERNS, *MAGNITUDES, *WITHOUT_SINKS)),
    "dense bf16": (partial(dense, "bf16"), ((32, 16), (32, 128)), (*PATTERNS, *MAGNITUDES, *WITHOUT_SINKS)),
    "prefill attention": (expanded, ((4096, 16),), (*MAGNITUDES, *WITHOUT_SINKS)),
}
HEADER = f"{'lowering':<9} {'kernel':<21} {'T x H':<9} {'usual us':>8} " + " ".join(
    f"{name_of(kind):>6}" for kind in KINDS
)


def lines(arguments: argparse.Namespace) -> Iterator[str]:
    over: list[str] = []
    for name, (build, shapes, kinds) in KERNELS.items():
        if not name.startswith(arguments.kernel):
            continue
        for tokens, heads in arguments.shapes or shapes:
            times: dict[str, dict[Kind, float]] = {}
            errors: dict[str, float] = {}
            for kind in (Kind(), *kinds):
                case = build(tokens, heads, arguments, kind)
                for row in common.measure(
                    case, arguments.lowerings, arguments.iterations, common.Floors(1e12, 1e15, "-")
                ):
                    if row.reason is None:
                        times.setdefault(row.lowering, {})[kind] = row.median_us
                        worst = max(check.severity for check in row.checks)
                        errors[row.lowering] = max(errors.get(row.lowering, 0.0), worst)
                        if not row.passed:
                            said = f"{name_of(kind)}: {worst:.2f}, {why(row.lowering, name, kind)}"
                            over.append(f"WRONG: {row.lowering} {name} {tokens} x {heads} {said}")
                del case
            for lowering, taken in times.items():
                usual = taken[Kind()]
                ratios = {kind: taken[kind] / usual for kind in kinds}
                columns = " ".join(f"{ratios[kind]:>6.2f}" if kind in ratios else f"{'-':>6}" for kind in KINDS)
                shape = f"{tokens} x {heads}"
                yield f"{lowering:<9} {name:<21} {shape:<9} {usual:>8.1f} {columns} {errors[lowering]:>6.2f}"
                for kind, ratio in ratios.items():
                    if ratio > BAR:
                        said = f"{name_of(kind)}: {ratio:.2f}, {why(lowering, name, kind)}"
                        over.append(f"{lowering} {name} {shape} {said}")
    yield f"\nOver {BAR}:"
    yield from over


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, 1 if a result was wrong."""
    parser = common.argument_parser("unusual")
    parser.add_argument("--kernel", default="", help=f"how it begins: {', '.join(KERNELS)}")
    parser.add_argument("--shapes", type=attention.shapes, default=None, help="tokens x heads, e.g. 128x16,32x128")
    parser.add_argument("--topk", type=int, default=2048)
    plain = {"request_local": False, "topk_length": False, "deterministic": False, "waves": (), "q_halves": False}
    parser.set_defaults(lowerings=["hopper", "triton"], iterations=20, sets=1, peers=False, **plain)
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    machine = common.describe_machine(torch.device(arguments.device))
    print(f"{machine['device']}, torch {machine['torch']}; ratios to the usual case; error: the largest over its bound")
    print(HEADER + f" {'error':>6}", flush=True)
    wrong = False
    with torch.no_grad():
        for line in lines(arguments):
            print(line, flush=True)
            wrong |= line.startswith("WRONG")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
