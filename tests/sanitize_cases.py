"""The cases of `sanitize.py`: every Hopper kernel at small shapes, results held against float64.

A case is the only one of its process, so it imports what it needs, and may change modules.
"""

from __future__ import annotations

import itertools
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

DEFINE = "-DEVERY_LANE_ARRIVES"
TOPK = {"memcheck": (0, 70, 200), "racecheck": (100,)}


class Case(NamedTuple):
    """A kernel at small shapes.

    Attributes:
        keys: cache format and width of a key, or "prefill", "parts", "shares", "rows by length", "index scores",
            "topk", "select" or "writes".
        tile: heads.
        splits: CTAs of a cluster. One takes one row after the other where its kernel can.
        wide: a row has a key whose scales float16 does not hold together.
        members: CTAs of a group.
        hasty: these give up at once where others are not there.
        shares: of a row, of which a CTA may take several.
        bits_of: heads of the larger tile whose bits it gives.
    """

    keys: str
    tile: int = 0
    splits: int = 0
    wide: bool = False
    members: int = 1
    hasty: bool = False
    shares: int = 0
    bits_of: int = 0

    def __str__(self) -> str:
        if not self.tile:
            return self.keys
        ctas = "1 CTA" if self.splits == 1 else f"{self.splits} CTAs"
        if self.members > 1:
            ctas = f"a group of {self.members}{', hasty' * self.hasty}"
        of_shares = f", {self.shares} shares" if self.shares else ""
        of_shares += f" with the bits of {self.bits_of} heads" if self.bits_of else ""
        return f"{self.keys}, {self.tile} heads, {ctas}{of_shares}{', wide' * self.wide}"


SPARSE = ("fp8_ds_mla 576", "fp8_ds_mla_v4 512", "bf16 576", "bf16 512")
CASES = {
    str(case): case
    for case in (
        *itertools.starmap(Case, itertools.product(SPARSE, (16, 32, 64), (1, 2))),
        *itertools.starmap(Case, itertools.product(SPARSE[::2], (64,), (3,))),
        *itertools.starmap(Case, itertools.product(SPARSE[:2], (16, 32, 64), (1, 2), (True,))),
        *itertools.starmap(Case, itertools.product(SPARSE[:2], (24,), (1, 2, 3), (False, True))),
        *(Case(keys, 64, 1, members=2) for keys in SPARSE[:2]),
        *(Case(keys, 64, 1, members=3, hasty=True) for keys in SPARSE[:2]),
        *(Case(*row, shares=3) for row in itertools.product(SPARSE[:2], (16, 24, 32, 64), (1, 2), (False, True))),
        *(Case(*row, shares=3, bits_of=32) for row in itertools.product(SPARSE[:2], (16,), (2,), (False, True))),
        Case("prefill"),
        Case("parts"),
        Case("shares"),
        Case("rows by length"),
        Case("index scores"),
        Case("topk"),
        Case("select"),
        Case("writes"),
    )
}


def attend(case: Case, tool: str) -> None:
    """Rows with dead keys, and one without keys between them. The CPU makes them: the tool shall see our kernels."""
    import torch
    from attention_inputs import SCALE, divides_groups, filled_cache, queries, some_indices
    from attention_oracle import assert_close, attention

    from mla_ops.formats import planar_views
    from mla_ops.kernels.hopper import launch, sparse_attention, waves

    cpu = torch.device("cpu")
    cache_format, width = case.keys.split()[0], int(case.keys.split()[1])
    cache = filled_cache(cache_format, 12, 64, cpu, head_dim=width)
    if case.wide and cache_format == "fp8_ds_mla":
        cache[0, 5, 512:528] = torch.tensor([2.0**-30, 2.0**-8, 0.0, 2.0**-20]).view(torch.uint8)
    elif case.wide:
        scales = torch.tensor([90, 120, 0, 119, 60, 118, 119], dtype=torch.uint8)
        planar_views(cache, cache_format)[1][0, 5, :7] = scales
    for topk in (70,) if case.wide else TOPK[tool]:
        q = queries(3, case.tile, torch.bfloat16, cpu, width)
        indices = some_indices(3, topk, 12 * 64, cpu)
        if case.wide:
            indices[0, 3] = 5
        lengths = torch.tensor([topk, 0, topk * 7 // 10], dtype=torch.int32)
        options = {"topk_length": lengths, "operand": torch.bfloat16, "cache_format": cache_format}
        names = set()
        for at_once in (1, 1000):  # CTAs or clusters of the device: which kernel it is, and how many rows one takes
            shape = launch.Clusters(case.tile, case.splits, shares=case.shares, bits_of=case.bits_of)
            if case.members > 1:
                shape = launch.Group(case.members)
            kernel = launch.KERNELS[cache_format, width].kernel(shape, at_once < len(q))
            if tool == "racecheck" and kernel.name in names:
                continue
            names.add(kernel.name)
            launch.clusters_at_once = lambda *_, at_once=at_once: (at_once,) * len(launch.SPLITS)
            out = torch.empty(3, case.tile, 512, dtype=torch.bfloat16, device="cuda")
            lse = torch.empty(3, case.tile, device="cuda")
            with waves.override(waves.Wave(len(q), shape)):
                sparse_attention.paged_sparse_attention(
                    q.cuda(),
                    cache.cuda(),
                    indices.cuda(),
                    SCALE,
                    cache_format,
                    topk_length=lengths.cuda(),
                    out=out,
                    lse=lse,
                )
            expected = attention(q, cache, indices, SCALE, divides=divides_groups([kernel.name]), **options)
            assert_close(out.cpu(), lse.cpu(), expected)


def prefill(tool: str) -> None:
    """Causal requests with long tiles, on two CTAs that take more from the counter, and with short ones."""
    import torch
    from attention_oracle import assert_close
    from dense_oracle import prefill

    from mla_ops.kernels.hopper import prefill_attention

    prefill_attention.num_sms = lambda _: 2
    lens_q, lens_k = [40, 150, 1, 3, 0, 12], [40, 300, 1, 3, 2, 12]
    starts = (torch.tensor([0, *lens]).cumsum(0).int() for lens in (lens_q, lens_k))
    starts, num_tokens, num_kv = tuple(starts), sum(lens_q), sum(lens_k)
    for head_dim, head_dim_v in [(192, 128)] if tool == "racecheck" else prefill_attention.TILE_KEYS:
        q, k, v = (
            torch.randn(tokens, heads, dims).bfloat16()
            for tokens, heads, dims in ((num_tokens, 2, head_dim), (num_kv, 1, head_dim), (num_kv, 1, head_dim_v))
        )
        out = torch.empty(num_tokens, 2, head_dim_v, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(num_tokens, 2, device="cuda")
        scale = head_dim**-0.5
        prefill_attention.prefill_attention(
            *(tensor.cuda() for tensor in (q, k, v, *starts)), 150, 300, scale, out=out, lse=lse
        )
        assert_close(out.cpu(), lse.cpu(), prefill(q, k, v, *starts, scale, causal=True, operand=torch.bfloat16))


def parts(tool: str) -> None:
    """Rows in parts, of which some are empty, as is one row, and the merge that starts beside their kernel."""
    import torch
    from attention_inputs import SCALE, filled_cache, queries
    from attention_oracle import assert_close, attention

    from mla_ops.kernels.hopper import dense_attention, launch, waves

    launch.clusters_at_once = lambda *_: (1000,) * len(launch.SPLITS)
    cpu = torch.device("cpu")
    cache = filled_cache("bf16", 12, 64, cpu)
    table = torch.randperm(12).to(torch.int32).view(3, 4)
    requests, lens = torch.arange(3, dtype=torch.int32), torch.tensor([250, 0, 70], dtype=torch.int32)
    everything = torch.arange(256, dtype=torch.int32).expand(3, -1)
    q = queries(3, 16, torch.bfloat16, cpu)
    expected = attention(
        q,
        cache,
        everything,
        SCALE,
        topk_length=lens,
        block_table=table,
        req_id_per_token=requests,
        operand=torch.bfloat16,
        cache_format="bf16",
    )
    for number in (2, 6) if tool == "memcheck" else (2,):
        out = torch.empty(3, 16, 512, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(3, 16, device="cuda")
        with waves.override(waves.Wave(3, launch.Clusters(16, 2, number))):
            dense_attention.paged_attention(
                *(tensor.cuda() for tensor in (q, cache, table, requests, lens)), SCALE, "bf16", out=out, lse=lse
            )
        assert_close(out.cpu(), lse.cpu(), expected)


def unequal_rows(shapes: dict[str, list[tuple[int, ...]]], **options: bool) -> None:
    """Dense decode of a long row, one without keys and a short one, by format and shape; `options`: of `override`."""
    import torch
    from attention_inputs import SCALE, filled_cache, queries
    from attention_oracle import assert_close, attention

    from mla_ops.kernels.hopper import dense_attention, launch, waves

    launch.clusters_at_once = waves.clusters_at_once = lambda *_: (3,) * len(launch.SPLITS)
    cpu = torch.device("cpu")
    table = torch.stack([torch.randperm(16), torch.randperm(16), torch.randperm(16)]).to(torch.int32)
    requests, lens = torch.arange(3, dtype=torch.int32), torch.tensor([1000, 0, 70], dtype=torch.int32)
    everything = torch.arange(1024, dtype=torch.int32).expand(3, -1)
    q = queries(3, 16, torch.bfloat16, cpu)
    for cache_format, of_format in shapes.items():
        cache = filled_cache(cache_format, 16, 64, cpu)
        expected = attention(
            q,
            cache,
            everything,
            SCALE,
            topk_length=lens,
            block_table=table,
            req_id_per_token=requests,
            operand=torch.bfloat16,
            cache_format=cache_format,
        )
        for shape in of_format:
            out = torch.empty(3, 16, 512, dtype=torch.bfloat16, device="cuda")
            lse = torch.empty(3, 16, device="cuda")
            with waves.override(waves.Wave(3, launch.Clusters(*shape)), **options):
                dense_attention.paged_attention(
                    *(tensor.cuda() for tensor in (q, cache, table, requests, lens)),
                    SCALE,
                    cache_format,
                    out=out,
                    lse=lse,
                )
            assert_close(out.cpu(), lse.cpu(), expected)


def shares(tool: str) -> None:
    """A row that three workers share, one of none and one of a single worker: by the first launch and by one behind."""
    shapes: list[tuple[int, ...]] = [(16, 1), (64, 1), (64, 2)] + [(32, 1)] * (tool == "memcheck")
    unequal_rows({"bf16": shapes, "fp8_ds_mla": shapes}, evenly=True)


def rows_by_length(tool: str) -> None:
    """Rows of several CTAs, or clusters, and of one; by the launch's shape instead; their merge; in shared clusters."""
    from mla_ops.kernels.hopper import waves

    shapes: list[tuple[int, ...]] = [(16, 1), (64, 3), (16, 2, 2), (64, 2, 2)] + [(32, 3)] * (tool == "memcheck")
    unequal_rows({"bf16": shapes, "fp8_ds_mla": shapes}, by_length=True)
    lengths = waves.always_by_length
    waves.always_by_length = lambda *call: (lengths(*call)[0], lengths(*call)[1]._replace(margin=1e9))
    unequal_rows({"bf16": [(16, 2), (64, 3)], "fp8_ds_mla": [(16, 3)]}, by_length=True)
    packed = waves.packed_clusters
    waves.packed_clusters = lambda count, at_once: packed(count, (1,) * len(at_once))
    unequal_rows({"bf16": [(16, 5)], "fp8_ds_mla": [(16, 5)]}, packed=True)


def index_scores(tool: str) -> None:
    """Flat and paged scores on three CTAs: rows of any bounds, blocks that are not there, tokens that share keys."""
    import torch

    from mla_ops.formats import allocate_cache
    from mla_ops.kernels.hopper import indexer_logits
    from mla_ops.kernels.reference import indexer as reference
    from mla_ops.testing.index_scores import exact_scores

    indexer_logits.num_sms = lambda _: 3
    heads = (64,) if tool == "racecheck" else indexer_logits.HEADS

    def int32(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    def compare(run: str, q: torch.Tensor, keys: torch.Tensor, columns: int, *rest: object, **options: object) -> None:
        weights = torch.randn(q.shape[:2])
        expected, found = torch.empty(len(q), columns), torch.empty(len(q), columns + 1, device="cuda")[:, 1:]
        getattr(reference, run)(q, keys, weights, *rest, **options, clean=True, out=expected)
        moved = [x.cuda() if isinstance(x, torch.Tensor) else x for x in (q, keys, weights, *rest)]
        scales = {name: x.cuda() for name, x in options.items()}
        getattr(indexer_logits, run)(*moved, **scales, clean=True, out=found)
        _, bound = exact_scores(q, k, weights, k_scale, e4m3_cores=True)
        difference = torch.where(expected == -torch.inf, 0.0, expected - found.cpu())
        assert torch.equal(found.cpu() == -torch.inf, expected == -torch.inf)
        assert difference.abs().max() <= bound.max()

    for num_heads in heads:
        q = torch.randn(5, num_heads, 128).to(torch.float8_e4m3fn)
        k, k_scale = torch.randn(500, 128).to(torch.float8_e4m3fn), torch.rand(500) + 1
        bounds = int32(0, 7, 131, 500, -9), int32(500, 7, 299, 999, 65)
        compare("indexer_logits", q, k, 500, *bounds, k_scale=k_scale)
        for block_size in (64, 16, 17) if tool == "memcheck" else (16, 17):
            cache = allocate_cache("fp8_index", 40, block_size)
            slots = torch.arange(40 * block_size)
            reference.write_index_cache(torch.randn(len(slots), 128), cache, slots, "fp8_index")
            k, k_scale = reference.read_index_keys(cache, slots, "fp8_index")
            table = torch.randperm(39).view(3, 13)[:, : -(-200 // block_size)].to(torch.int32).contiguous()
            table[1, :2] = int32(-1, 40)
            lengths, requests = int32(200, 199, 65, 9999, 0), int32(0, 0, 1, 2, 2)
            for tokens in (5, 3, 1) if tool == "memcheck" else (5,):
                each = lengths[:tokens], table, requests[:tokens]
                compare("paged_indexer_logits", q[:tokens], cache, 190, *each, 190, "fp8_index")


def best(tool: str) -> None:
    """Top-k of rows in registers, in a CTA and in clusters: some have no sample, or one that misleads."""
    import torch
    from topk_oracle import hard_rows, topk_oracle

    from mla_ops.kernels.hopper import sources, topk

    rows, k = (3, 200) if tool == "memcheck" else (2, 40)
    few, meeting = topk.FEW._replace(gated=2048, sampled=1024, least=1024), topk.MEETINGS[0]._replace(cluster=3)
    plans = {
        1000: topk.SHORT[0],
        9000: topk.SHORT[2],
        9001: topk.FEW,
        9002: topk.MANY._replace(gated=1 << 30),
        20000: few,
        20001: few._replace(cluster=3),
        20002: few._replace(cluster=3, gated=1 << 30),
        12003: topk.MEETINGS[0]._replace(cluster=3),
        16004: topk.MEETINGS[1]._replace(cluster=2),
    }
    if tool == "racecheck":  # the fewest columns that take each way; the last row is the one that registers hold
        plans = {300: topk.SHORT[0], 4200: topk.SHORT[2], 2400: topk.MANY._replace(gated=2048, sampled=1024)}
        plans |= {8300: few, 8301: few._replace(cluster=2), 8302: meeting}
    topk.KERNELS = tuple({plan.kernel for plan in (topk.FEW, *plans.values())})
    with ThreadPoolExecutor(len(topk.KERNELS)) as pool:  # else a third of the time is for the compiler
        list(pool.map(lambda kernel: sources.compile(kernel.source, kernel.name, ()), topk.KERNELS))
    for num_columns, plan in plans.items():
        topk.plan_for = lambda *_, plan=plan, **__: plan
        kinds = ("special", "ascending", "unlike its sample", "equal", "mostly zeros", "ten low bits")
        for kind in kinds if tool == "memcheck" else ("special",):
            scores = hard_rows(kind, rows, num_columns)
            ends = torch.tensor([num_columns, num_columns - 3, 150][-rows:], dtype=torch.int32)
            table, requests = torch.arange(999, dtype=torch.int32)[None], torch.zeros(rows, dtype=torch.int32)
            # rows that a cluster holds are never sorted (`plan_for`)
            sorts = not plan.held and (tool == "memcheck" or plan in (topk.SHORT[0], few))
            for in_order in (False, True) if sorts else (False,):
                indices = torch.zeros(rows, k, dtype=torch.int32, device="cuda")
                counts = torch.zeros(rows, dtype=torch.int32, device="cuda")
                topk.topk_indices(
                    scores.cuda(),
                    k,
                    row_ends=ends.cuda(),
                    block_table=table.cuda(),
                    req_id_per_token=requests.cuda(),
                    block_size=64,
                    sorted=in_order,
                    indices=indices,
                    valid_counts=counts,
                )
                wanted, lengths = topk_oracle(scores, k, row_ends=ends, sorted=in_order)
                assert torch.equal(indices.cpu(), wanted)
                assert torch.equal(counts.cpu(), lengths)


def chosen_by_parts(tool: str) -> None:
    """Keys of rows in blocks that fit no tile, two at one time: top-k through entries, by registers, and by planes."""
    import torch
    from topk_oracle import hard_rows, topk_oracle

    from mla_ops.kernels import selection
    from mla_ops.kernels.hopper import select_keys, topk

    selection.tokens_together = lambda *_: 2
    e4m3, num_blocks, block_size = torch.float8_e4m3fn, 32, 48
    lengths = torch.tensor([1500, 1207, 90, 40, 9999], dtype=torch.int32)
    requests = torch.tensor([0, 0, -1, 0, 0], dtype=torch.int32)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    q, weights = torch.zeros(5, 64, 128), torch.zeros(5, 64)
    q[:, 5, 77], weights[:, 5] = 1, 1
    given = [x.cuda() for x in (weights, lengths, table, requests)]
    for plan in (topk.MANY._replace(gated=400, sampled=256), topk.FEW._replace(cluster=2)):
        topk.plan_for = lambda *_, plan=plan, **__: plan
        for kind in ("special", "ascending", "equal") if tool == "memcheck" else ("ascending",):
            scale = hard_rows(kind, 1, num_blocks * block_size)[0]
            cache = torch.empty(num_blocks, block_size * 132, dtype=torch.uint8)
            cache[:, : block_size * 128] = torch.ones(1).to(e4m3).view(torch.uint8)
            cache[:, block_size * 128 :] = scale.view(num_blocks, block_size).view(torch.uint8)
            indices = torch.zeros(5, 50, dtype=torch.int32, device="cuda")
            counts = torch.zeros(5, dtype=torch.int32, device="cuda")
            rest = cache.view(num_blocks, block_size, 132).cuda(), *given, 50, "fp8_index"
            chosen = {"indices": indices, "valid_counts": counts}
            select_keys.select_keys(q.to(e4m3).cuda(), *rest, translate=True, **chosen)
            wanted, valid = topk_oracle(scale.expand(5, -1), 50, None, lengths.where(requests == 0, 0))
            assert torch.equal(indices.cpu(), wanted)
            assert torch.equal(counts.cpu(), valid)
    topk.takes_planes = lambda *_: True
    keys, starts = torch.ones(1535, 128).to(e4m3).cuda(), torch.tensor([0, 5, 70, 3, 1], dtype=torch.int32)
    rows = keys, weights.cuda(), starts.cuda(), lengths.cuda()
    for plan in topk.ALL_BY_PLANES:
        topk.plan_by_planes = lambda *_, plan=plan: plan._replace(gated=400, sampled=256)
        for kind in ("special", "ascending", "equal") if tool == "memcheck" else ("ascending",):
            scale = hard_rows(kind, 1, len(keys))[0]
            select_keys.select_keys_flat(q.to(e4m3).cuda(), *rows, 50, k_scale=scale.cuda(), **chosen)
            wanted, valid = topk_oracle(scale.expand(5, -1), 50, starts, lengths)
            assert torch.equal(indices.cpu(), wanted)
            assert torch.equal(counts.cpu(), valid)


def writes(tool: str) -> None:
    """Every kernel of the caches' writes, sources at any element, blocks in a larger memory, wild slots."""
    import torch
    from test_hopper_cache import CASES, case, write

    from mla_ops import dispatch

    for parameters in CASES if tool == "memcheck" else CASES[::7]:
        cache_format = parameters.values[0]
        found = case(*parameters.values, 45, "cuda")
        expected = case(*parameters.values, 45)
        write(expected, cache_format)
        with dispatch.override("hopper"):
            write(found, cache_format)
        assert torch.equal(found.memory.cpu(), expected.memory)


def run_case(case: Case, tool: str, shipped: bool, timeout: int) -> None:
    signal.alarm(timeout)  # ends this process, and with it a kernel that waits for ever
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import torch

    from mla_ops.kernels.cuda import compiler

    torch.manual_seed(0)
    compiler.OPTIONS += ("-lineinfo",)
    if tool == "racecheck" and not shipped:
        compiler.OPTIONS += (DEFINE,)
    if case.hasty:
        compiler.OPTIONS += ("-DPATIENCE=0",)
    others = {
        "prefill": prefill,
        "parts": parts,
        "shares": shares,
        "rows by length": rows_by_length,
        "index scores": index_scores,
        "topk": best,
        "select": chosen_by_parts,
        "writes": writes,
    }
    others[case.keys](tool) if case.keys in others else attend(case, tool)
