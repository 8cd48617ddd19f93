"""Sparse and dense decode over rows of unequal lengths, beside as many keys in rows of one length.

python -m benchmarks.mixtures --peers

A mixture should take little more than its keys do in full rows: sparse decode at most 1.15 of that and 10 us, dense
decode 1.15, and 0.95 of FlashMLA (0.90 with 16 heads); over `fp8_ds_mla`, for which FlashMLA has no dense kernel, 0.95
and 0.90 of a copy of the keys' bytes. `none` is a sparse call without lengths, `full` with lengths that are all the
same: their ratio is what it costs to follow lengths. Every line is held against float64 in the same run. Captured
graphs are replayed; the L2 cache is flushed in between. A line ends with what it misses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import torch

from benchmarks import common, dense_attention, sparse_attention
from benchmarks.attention import Kind, mixed_lengths, shapes
from mla_ops import formats

SPARSE_SHAPES = ((32, 128), (64, 128), (128, 128), (128, 16), (512, 16))
SPARSE_MIXTURES = ("none", "full", "fourth", "one", "lognormal", "256")
NAMED_MIXTURES = ("1x131072+31x512", "2x65536+126x128", "4x32768", "128x100", "1x131072")
DENSE_MIXTURES = (*NAMED_MIXTURES, *(f"random{seed}" for seed in range(30)))
SPARSE_BAR, SPARSE_BAR_US, DENSE_BAR = 1.15, 10.0, 1.15
PEER_BARS = {16: 0.90, 128: 0.95}
SPARSE_HEADER = (
    f"{'format':<14} {'T':>4} {'H':>4} {'lengths':<10} {'us':>8} {'rows':>5} {'full':>8} {'bar':>8} {'ratio':>6} "
    f"{'error':>6}"
)
DENSE_HEADER = (
    f"{'format':<12} {'H':>4} {'lengths':<16} {'us':>8} {'alike':>11} {'us':>8} {'bar':>8} {'ratio':>6} {'peer us':>8} "
    f"{'bar':>8} {'ratio':>6} {'error':>6}"
)


def time_of(case: common.Case, iterations: int) -> tuple[dict[str, float], float]:
    """Microseconds by lowering or peer, and the largest error over its bound."""
    rows = common.measure(case, ["auto"], iterations, common.Floors(1e12, 1e15, "bfloat16"))
    times = {("ours" if index == 0 else row.lowering): row.median_us for index, row in enumerate(rows)}
    return times, max(check.severity for row in rows[:1] for check in row.checks)


def sparse_lines(arguments: argparse.Namespace) -> Iterator[str]:
    full_rows: dict[tuple[str, int, int], float] = {}
    plain = {"request_local": False, "peers": False, "deterministic": False, "waves": ()}

    def case(cache_format: str, num_tokens: int, num_heads: int, mixture: str) -> common.Case:
        kind = Kind(mixture="full" if mixture == "none" else mixture)
        options = argparse.Namespace(**{**vars(arguments), **plain, "topk_length": mixture != "none"})
        return sparse_attention.build_paged(
            num_tokens, num_heads, arguments.topk, cache_format, 4 * arguments.topk, kind, options
        )

    for cache_format in arguments.cache_formats:
        for num_tokens, num_heads in arguments.shapes:
            for mixture in arguments.sparse:
                named = "full" if mixture == "none" else mixture
                lens = mixed_lengths(named, num_tokens, arguments.topk, torch.device("cpu"))
                rows = max(1, -(-int(lens.sum()) // arguments.topk))
                times, error = time_of(case(cache_format, num_tokens, num_heads, mixture), arguments.iterations)
                key = cache_format, num_heads, rows
                if mixture == "none":
                    full_rows[key] = times["ours"]
                elif key not in full_rows:
                    alike, _ = time_of(case(cache_format, rows, num_heads, "none"), arguments.iterations)
                    full_rows[key] = alike["ours"]
                bar = SPARSE_BAR * full_rows[key] + SPARSE_BAR_US
                if mixture in ("none", "full"):
                    bar = 1.02 * full_rows[key]
                ours, alike_us = times["ours"], full_rows[key]
                yield (
                    f"{cache_format:<14} {num_tokens:>4} {num_heads:>4} {mixture:<10} {ours:>8.1f} {rows:>5} "
                    f"{alike_us:>8.1f} {bar:>8.1f} {ours / alike_us:>6.2f} {error:>6.2f}{verdict(ours <= bar, error)}"
                )


def verdict(within_bar: bool, error: float, missed: str = "over") -> str:
    return "  WRONG" if error > 1 else "" if within_bar else f"  {missed}"


def copy_peer(num_bytes: int) -> common.Peer:
    """A copy of as many bytes."""
    source, target = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    return common.Peer([lambda: target.copy_(source)], lambda: [common.exact("copy", target[:1], source[:1])])


def equal_lengths(lengths: list[int]) -> list[int]:
    """Rows of one length with as many keys together: about as many rows, but at most 128 and at least 16."""
    rows = min(128, max(16, len(lengths)))
    return [max(1, -(-sum(lengths) // rows))] * rows


def dense_lines(arguments: argparse.Namespace) -> Iterator[str]:
    for cache_format in arguments.dense_formats:
        for num_heads in (128, 16):
            for mixture in arguments.dense:
                lengths = dense_attention.lengths_of(mixture)
                alike = equal_lengths(lengths)
                label: dict[str, int | str] = {"lengths": mixture}
                case = dense_attention.build_paged(lengths, label, num_heads, cache_format, arguments)
                case.peers.pop("FlashMLA, with plan", None)
                if arguments.peers and not case.peers and arguments.device.startswith("cuda"):
                    case.peers["copy"] = copy_peer(sum(lengths) * formats.FORMATS[cache_format].bytes_per_token())
                times, error = time_of(case, arguments.iterations)
                del case
                own = argparse.Namespace(**{**vars(arguments), "peers": False})
                even_case = dense_attention.build_paged(alike, label, num_heads, cache_format, own)
                even, _ = time_of(even_case, arguments.iterations)
                del even_case
                ours, alike_us = times.pop("ours"), even["ours"]
                bar, peer = DENSE_BAR * alike_us, next(iter(times.values()), None)
                missed = ["equal rows"] if ours > bar else []
                columns = f"{'-':>8} {'-':>8} {'-':>6}"
                if peer is not None:
                    peer_bar = PEER_BARS[num_heads] * peer
                    missed += [next(iter(times))] if ours > peer_bar else []
                    columns = f"{peer:>8.1f} {peer_bar:>8.1f} {ours / peer:>6.2f}"
                yield (
                    f"{cache_format:<12} {num_heads:>4} {mixture:<16} {ours:>8.1f} {f'{len(alike)}x{alike[0]}':>11} "
                    f"{alike_us:>8.1f} {bar:>8.1f} {ours / alike_us:>6.2f} {columns} {error:>6.2f}"
                    f"{verdict(not missed, error, 'over ' + ', '.join(missed))}"
                )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status, 1 if a result was wrong."""
    parser = common.argument_parser("mixtures")
    parser.add_argument("--cache-formats", type=common.cache_formats, default=["fp8_ds_mla", "bf16"])
    parser.add_argument("--dense-formats", type=common.cache_formats, default=["bf16", "fp8_ds_mla"])
    parser.add_argument("--shapes", type=shapes, default=SPARSE_SHAPES, help="tokens x heads, e.g. 128x16,32x128")
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--sparse", type=common.names, default=SPARSE_MIXTURES)
    parser.add_argument("--dense", type=dense_attention.mixtures, default=DENSE_MIXTURES)
    parser.add_argument("--peers", action="store_true", help="time FlashMLA's dense decode or a copy as well")
    parser.set_defaults(q_halves=False, deterministic=False, waves=())
    arguments = parser.parse_args(argv)
    torch.manual_seed(arguments.seed)
    machine = common.describe_machine(torch.device(arguments.device))
    print(f"{machine['device']}, torch {machine['torch']}; us; error: the largest over its bound")
    wrong = False
    for header, lines in ((SPARSE_HEADER, sparse_lines), (DENSE_HEADER, dense_lines)):
        print(header)
        for line in lines(arguments):
            print(line, flush=True)
            wrong |= line.endswith("WRONG")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
