"""Benchmark of the lightning indexer: `topk_indices` beside torch's and other projects' top-k.

python -m mla_ops bench indexer_topk --peers FOLDER

`--patterns`: scores that are not usual, beside normal ones (indexer_topk_patterns.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import common, indexer_topk_patterns, indexer_topk_peers
from benchmarks.indexer_topk_patterns import best_columns
from mla_ops.registry import describe

TOPK = 2048

# rows and columns: decode, prefill, one long context
TOPK_SHAPES = (
    *((rows, columns) for columns in (4096, 32768, 131072) for rows in (1, 4, 16, 64, 128)),
    (1, 2**20),
    (4096, 32768),
    (4096, 131072),
)
# those whose gate a sample gives, or a part of the row: it says less where neighbours score alike
ALIKE_SHAPES = ((1, 131072), (16, 131072), (64, 131072), (128, 131072), (512, 32768), (512, 131072), (4096, 32768))
QUICK_TOPK_SHAPES = ((1, 300), (3, 300))
KINDS = ("normal", "neighbours alike", "ten low bits", "mostly zeros")
WITHOUT_TIES = KINDS[:2]  # a peer may choose any of equal scores, so it has no right answer to be held to elsewhere


def scores_of(kind: str, num_tokens: int, num_columns: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of scores of a kind.

    They are normal; alike in near columns, as near tokens score; different in their ten lowest bits; or 99 % zeros, as
    relu leaves them.
    """
    shape, device = (num_tokens, num_columns), generator.device
    if kind == "ten low bits":
        bits = torch.randint(0, 1024, shape, device=device, generator=generator, dtype=torch.int32)
        return bits.bitwise_or_(0x3F900000).view(torch.float32)
    scores = torch.randn(shape, device=device, generator=generator)
    if kind == "neighbours alike":
        return indexer_topk_patterns.alike(scores, generator)
    return scores.sub_(2.2).relu_() if kind == "mostly zeros" else scores


def build_topk(kind: str, num_tokens: int, num_columns: int, topk: int, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)
    topk = min(topk, num_columns)
    lengths = torch.full((num_tokens,), num_columns, dtype=torch.int32, device=device)
    sets = [
        (scores_of(kind, num_tokens, num_columns, generator), lengths) for _ in range(common.number_of_sets(arguments))
    ]
    outputs = [(torch.empty(num_tokens, topk, dtype=torch.int32, device=device), lengths.clone()) for _ in sets]
    op = torch.ops.mla.topk_indices.out
    runs = [
        partial(op, scores, topk, row_ends=ends, indices=indices, valid_counts=counts)
        for (scores, ends), (indices, counts) in zip(sets, outputs, strict=True)
    ]

    def poison() -> None:
        for tensor in outputs[0]:
            tensor.fill_(-7)

    def check() -> list[common.Check]:
        return [
            common.exact("indices", outputs[0][0], best_columns(sets[0][0], topk)),
            common.exact("valid_counts", outputs[0][1], torch.full_like(lengths, topk)),
        ]

    peers: dict[str, common.Peer] = {}
    if arguments.peers is not None:
        peers = indexer_topk_peers.topk_peers(arguments.peers, sets, topk) if kind in WITHOUT_TIES else {}
        peers |= indexer_topk_peers.torch_peer(sets, topk)
    shape: dict[str, int | str] = {"T": num_tokens, "columns": num_columns, "topk": topk, "scores": kind}
    call = describe("topk_indices", sets[0][0], topk, row_ends=lengths)
    bytes_moved = 4 * num_tokens * (num_columns + topk + 2)
    return common.Case(call, shape, runs, poison, check, bytes_moved, peers=peers, against_fastest=True)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("indexer_topk")
    parser.add_argument("--topk", type=int, default=None)
    parser.add_argument("--scores", type=common.names, default=None, help=f"of {', '.join(KINDS)}; the first two")
    parser.add_argument("--patterns", action="store_true", help="the ratio of unusual scores to normal ones")
    parser.add_argument("--regimes", default="", help="of --patterns: what their names hold, e.g. 'x 128k'")
    parser.add_argument("--peers", type=Path, help="folder of other projects' builds, to be measured beside")
    arguments = parser.parse_args(argv)
    if arguments.patterns:
        return indexer_topk_patterns.run(arguments)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    topk = arguments.topk or (TOPK if on_gpu else 100)
    shapes = {"normal": TOPK_SHAPES, "neighbours alike": ALIKE_SHAPES}
    if arguments.scores is not None:
        shapes = dict.fromkeys(arguments.scores, TOPK_SHAPES)

    def cases() -> Iterator[partial[common.Case]]:
        for kind, of_kind in shapes.items():
            for num_tokens, num_columns in of_kind if on_gpu else QUICK_TOPK_SHAPES:
                yield partial(build_topk, kind, num_tokens, num_columns, topk, arguments)

    return common.run_benchmark("indexer_topk", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
