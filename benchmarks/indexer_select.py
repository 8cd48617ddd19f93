"""Benchmark of the lightning indexer: `select_keys` beside pairs of other projects' scores and top-k.

python -m mla_ops bench indexer_select --peers FOLDER

`two steps` is this library's own: scores, then top-k. `--sweep`: these two alone, over many shapes
(indexer_select_sweep.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

from benchmarks import common, indexer_select_sweep
from benchmarks.indexer_scores import BLOCK_SIZE, DIM, flat_inputs, load_deep_gemm, paged_inputs
from benchmarks.indexer_topk_peers import PEERS, same_values
from mla_ops.registry import describe

TOPK = 2048
FORMAT = "fp8_index"
# requests, query tokens of each, keys
PAGED = tuple((requests, 1, keys) for keys in (4096, 32768, 131072) for requests in (1, 4, 16, 64))
PAGED += ((64, 2, 32768), (128, 1, 32768))
# query tokens, keys; heads
FLAT = ((1024, 32768), (4096, 32768))
HEADS = (64, 32)

Scores = Callable[[int], torch.Tensor]  # takes the number of an input set


def _rows(scores: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Scores with -inf behind each row's end, where kernels leave anything."""
    return torch.where(torch.arange(scores.shape[1], device=scores.device) < ends[:, None], scores, -torch.inf)


def _pairs(
    scores_of: dict[str, Scores], ends: torch.Tensor, num_sets: int, topk: int, folder: Path | None
) -> dict[str, common.Peer]:
    """Every peer's top-k of a peer's scores; each pair is held to the scores it had."""
    pairs: dict[str, common.Peer] = {}
    if folder is None:
        return pairs
    for of_scores, scores in scores_of.items():
        for name, prepare in PEERS.items():
            out = [torch.empty(len(ends), topk, dtype=torch.int32, device=ends.device) for _ in range(num_sets)]
            try:
                launch = prepare(folder, scores(0), ends)

                def run(number: int, scores=scores, launch=launch, out=out) -> None:  # type: ignore[no-untyped-def] # noqa: ANN001
                    launch(scores(number), ends, out[number])

                run(0)
            except Exception as error:  # noqa: BLE001 (whatever a build that is not ours raises)
                print(f"{of_scores}, {name} is not measured: {[type(error).__name__, *str(error).splitlines()][-1]}")
                continue

            def check(scores: Scores = scores, out: list[torch.Tensor] = out) -> list[common.Check]:
                return same_values(_rows(scores(0), ends), out[0])

            runs = [partial(run, number) for number in range(num_sets)]
            pairs[f"{of_scores}, {name}"] = common.Peer(runs, check, poison=partial(out[0].fill_, -7))
    return pairs


def _own_steps(scores: Scores, ends: torch.Tensor, num_sets: int, wanted: torch.Tensor) -> common.Peer:
    """This library's two steps, which the selection equals to the bit."""
    topk = wanted.shape[1]
    outputs, counts = [torch.empty_like(wanted) for _ in range(num_sets)], torch.empty_like(ends)

    def run(number: int) -> None:
        out = {"indices": outputs[number], "valid_counts": counts}
        torch.ops.mla.topk_indices.out(scores(number), topk, row_ends=ends, **out)

    runs = [partial(run, number) for number in range(num_sets)]
    check = partial(common.exact, "indices", outputs[0], wanted)
    return common.Peer(runs, lambda: [check()], poison=partial(outputs[0].fill_, -7))


def _peers(
    own: Scores,
    scores_of: dict[str, Scores],
    ends: torch.Tensor,
    num_sets: int,
    wanted: torch.Tensor,
    folder: Path | None,
) -> dict[str, common.Peer]:
    if not ends.is_cuda:
        return {}
    pairs = _pairs(scores_of, ends, num_sets, wanted.shape[1], folder)
    return {"two steps": _own_steps(own, ends, num_sets, wanted), **pairs}


def _outputs(num_tokens: int, topk: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    indices = torch.empty(num_tokens, topk, dtype=torch.int32, device=device)
    return indices, torch.empty(num_tokens, dtype=torch.int32, device=device)


def build_paged(
    num_requests: int, tokens_each: int, num_keys: int, num_heads: int, arguments: argparse.Namespace
) -> common.Case:
    """Requests of `num_keys`, for whose last `tokens_each` keys are chosen."""
    device, num_tokens, topk = torch.device(arguments.device), num_requests * tokens_each, min(TOPK, num_keys // 2)
    cache, table, requests, lengths, sets = paged_inputs(num_requests, tokens_each, num_keys, num_heads, arguments)
    rest = lengths, table, requests
    indices, counts = _outputs(num_tokens, topk, device)
    op = partial(torch.ops.mla.select_keys.out, indices=indices, valid_counts=counts)
    runs = [partial(op, q, cache, weights, *rest, topk, FORMAT) for q, weights in sets]

    def own(number: int) -> torch.Tensor:
        q, weights = sets[number]
        return torch.ops.mla.paged_indexer_logits(q, cache, weights, *rest, num_keys, FORMAT)

    wanted = torch.ops.mla.topk_indices(own(0), topk, row_ends=lengths)[0]
    scores_of: dict[str, Scores] = {}
    if (deep_gemm := load_deep_gemm(arguments.peers)) is not None:
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        each, pages = lengths.view(num_requests, tokens_each), cache.view(cache.shape[0], BLOCK_SIZE, 1, 132)

        def peer(number: int) -> torch.Tensor:
            q, weights = sets[number]
            schedule = deep_gemm.get_paged_mqa_logits_metadata(each, BLOCK_SIZE, num_sms)
            q = q.view(num_requests, tokens_each, num_heads, DIM)
            return deep_gemm.fp8_paged_mqa_logits(q, pages, weights, each, table, schedule, num_keys)

        scores_of["DeepGEMM"] = peer
    return common.Case(
        describe("select_keys", sets[0][0], cache, sets[0][1], *rest, topk, FORMAT),
        {"keys": num_keys, "B": num_requests, "next_n": tokens_each, "H": num_heads},
        runs,
        partial(indices.fill_, -7),
        lambda: [common.exact("indices", indices, wanted)],
        num_requests * num_keys * (DIM + 4) + num_tokens * (num_heads * (DIM + 4) + 4 * topk),
        flops=2 * int(lengths.long().sum()) * num_heads * DIM,
        peers=_peers(own, scores_of, lengths, len(sets), wanted, arguments.peers),
    )


def build_flat(num_tokens: int, num_keys: int, num_heads: int, arguments: argparse.Namespace) -> common.Case:
    """The last `num_tokens` of a sequence of `num_keys`, causal."""
    device, topk = torch.device(arguments.device), min(TOPK, num_keys // 2)
    starts, ends, sets = flat_inputs(num_tokens, num_keys, num_heads, arguments)
    indices, counts = _outputs(num_tokens, topk, device)
    op = partial(torch.ops.mla.select_keys.flat_out, indices=indices, valid_counts=counts)
    runs = [partial(op, *given[:3], starts, ends, topk, k_scale=given[3]) for given in sets]

    def own(number: int) -> torch.Tensor:
        q, k, weights, k_scale = sets[number]
        return torch.ops.mla.indexer_logits(q, k, weights, starts, ends, k_scale=k_scale)

    wanted = torch.ops.mla.topk_indices(own(0), topk, row_ends=ends)[0]
    scores_of: dict[str, Scores] = {}
    if (deep_gemm := load_deep_gemm(arguments.peers)) is not None:

        def peer(number: int) -> torch.Tensor:
            q, k, weights, k_scale = sets[number]
            return deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, starts, ends, False)

        scores_of["DeepGEMM"] = peer
    return common.Case(
        describe("select_keys.flat", *sets[0][:3], starts, ends, topk, k_scale=sets[0][3]),
        {"keys": num_keys, "T": num_tokens, "H": num_heads},
        runs,
        partial(indices.fill_, -7),
        lambda: [common.exact("indices", indices, wanted)],
        num_tokens * (num_heads * (DIM + 4) + 4 * topk) + num_keys * (DIM + 4),
        flops=2 * int(ends.long().sum()) * num_heads * DIM,
        peers=_peers(own, scores_of, ends, len(sets), wanted, arguments.peers),
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("indexer_select")
    parser.add_argument("--heads", type=common.integers, default=None)
    parser.add_argument("--peers", type=Path, help="folder of other projects' builds, to be measured beside")
    parser.add_argument("--sweep", action="store_true", help="beside this library's own two steps, over many shapes")
    parser.add_argument("--kinds", type=common.names, default=["flat", "paged"], help="of --sweep: flat, paged")
    arguments = parser.parse_args(argv)
    if arguments.sweep:
        return indexer_select_sweep.run(arguments)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick

    def cases() -> Iterator[partial[common.Case]]:
        for num_heads in arguments.heads or (HEADS if on_gpu else (32,)):
            for paged in PAGED if on_gpu else ((2, 2, 130),):
                yield partial(build_paged, *paged, num_heads, arguments)
            for flat in FLAT if on_gpu else ((3, 200),):
                yield partial(build_flat, *flat, num_heads, arguments)

    return common.run_benchmark("indexer_select", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
