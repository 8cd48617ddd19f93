"""Benchmarks run on a CPU, check what they measure, and fail when a lowering is wrong."""

from __future__ import annotations

import importlib
import json
import math
import os
import re
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks/ is no part of the installed package

from benchmarks import (
    attention,
    common,
    figures,
    first_call,
    gather_floor,
    indexer_quality,
    indexer_topk,
    indexer_topk_patterns,
    layer,
    plot,
    portable,
    timing,
)
from benchmarks.cache import fill_cache, read_keys, scale_keys
from mla_ops import dispatch, formats
from mla_ops.kernels.hopper.launch import Clusters, Group
from mla_ops.kernels.hopper.waves import Wave
from mla_ops.kernels.reference.cache import read_slots

FAMILIES = (
    "cache",
    "compressor",
    "dense_attention",
    "index",
    "indexer_scores",
    "indexer_select",
    "indexer_topk",
    "layer",
    "merge",
    "sparse_attention",
    "sparse_attention_extra",
    "step",
    "step_metadata",
)


@pytest.mark.parametrize("family", FAMILIES)
def test_quick_run_passes_its_own_checks_and_writes_json(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--lowerings", "reference,hopper,auto", "--json", str(path)]
    assert importlib.import_module(f"benchmarks.{family}").main(arguments) == 0
    content = json.loads(path.read_text())[family]
    measured = [row for row in content["rows"] if row["reason"] is None]
    refused = [row for row in content["rows"] if row["reason"] is not None]
    assert measured
    assert all(row["checks"] and row["median_us"] > 0 for row in measured)
    assert all((row["floor_us"] == 0) == row["op"].startswith("eager ") for row in measured)  # host time has no floor
    assert {row["lowering"] for row in measured} == {"reference"}
    assert {row["lowering"] for row in refused} == {"hopper"}
    assert 2 * len(refused) == len(measured)  # on a CPU, auto is the reference too
    assert "measured in this run: copy" in capsys.readouterr().out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_lowering_that_writes_nothing_fails(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs are poisoned before the checked run, so stale or missing values cannot pass."""
    module = importlib.import_module(f"benchmarks.{family}")

    def broken(case: common.Case, *rest: object, **options: bool) -> list[common.Row]:
        runs = [lambda: None for _ in case.runs]
        return real(
            common.Case(case.call, case.shape, runs, case.poison, case.check, case.bytes_moved, case.flops),
            *rest,
            **options,
        )

    real = common.measure
    monkeypatch.setattr(common, "measure", broken)
    assert module.main(["--quick", "--device", "cpu"]) == 1


def test_kernels_of_a_layer_count_for_its_parts_once() -> None:
    names = "gemm", "store_fp8_index", "gemm", "indexer_logits<64>", "topk_rows<1>", "sparse_attention_rows", "gemm"
    begins, ends = (0, 10, 12, 20, 28, 40, 50), (10, 12, 20, 30, 35, 50, 65)  # top-k waits beside the scores
    times = layer.parts_of(zip(names, begins, ends, strict=True))
    assert times == {"projections": 18, "cache writes": 2, "selection": 15, "attention": 10, "output": 15}


def test_a_wrong_layer_is_wrong_in_the_table_of_its_parts(capsys: pytest.CaptureFixture[str]) -> None:
    times = dict.fromkeys(layer.KERNEL_WORDS, 1.5)
    right, wrong = common.Check("out", 0.25, 0.5), common.Check("out", 1.0, 0.5)
    assert layer.print_parts({(1, 4096): (times, [right])})
    assert "out 0.25 (0.5)\n" in capsys.readouterr().out
    assert not layer.print_parts({(1, 4096): (times, [right]), (16, 4096): (times, [wrong])})
    assert "out 1 (0.5)  WRONG\n" in capsys.readouterr().out


def test_peers_are_checked_and_compared_with() -> None:
    """A peer's own bytes count for its row, the case's for all others; a wrong peer is a wrong row."""
    made = common.Case(
        dispatch.Call("merge_attention_states", torch.device("cpu"), torch.float32),
        {},
        [lambda: time.sleep(2e-3)],
        lambda: None,
        lambda: [common.Check("out", 0.0, 0.0)],
        bytes_moved=4000,
        flops=10,
        peers={
            "slow": common.Peer([lambda: time.sleep(4e-3)], lambda: [common.Check("out", 1.0, 0.5)]),
            "other work": common.Peer([lambda: time.sleep(1e-3)], lambda: [common.Check("out", 0.0, 0.0)], 1000),
        },
    )
    floors = common.Floors(1e9, 1e3, "float32")
    ours, slow, other = common.measure(made, ["reference"], timing.MINIMUM_TIMINGS, floors)
    assert (ours.lowering, slow.lowering, other.lowering) == ("reference", "slow", "other work")
    assert slow.ratio_to_peer == 1
    assert ours.ratio_to_peer is not None
    assert ours.ratio_to_peer == pytest.approx(ours.median_us / slow.median_us)
    assert ours.ratio_to_peer < 1
    assert (ours.passed, slow.passed) == (True, False)
    assert "WRONG" in common.format_row(slow)
    assert other.bytes_per_second * other.median_us == pytest.approx(1e9)
    assert (ours.floor_us, other.floor_us) == (10**4, 1)


def test_experts_stand_beside_each_way_of_transformers(tmp_path: Path) -> None:
    """Each is checked against float64; one that loses a factor is wrong."""
    pytest.importorskip("transformers")
    module = importlib.import_module("benchmarks.experts")
    path = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--tokens", "1,7", "--json", str(path)]
    assert module.main(arguments) == 0
    rows = json.loads(path.read_text())["experts"]["rows"]
    names = ["mix_grouped", "grouped_mm", "batched_mm"]
    assert [(row["shape"]["T"], row["lowering"]) for row in rows] == [(t, name) for t in (1, 7) for name in names]
    for first in (0, 3):
        ours, *theirs = rows[first : first + 3]
        fastest = min(row["median_us"] for row in theirs)
        assert ours["ratio_to_peer"] == pytest.approx(ours["median_us"] / fastest)
        assert ours["floor_us"] > 0


def test_experts_without_their_weights_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    module = importlib.import_module("benchmarks.experts")
    real = module.mix_grouped
    monkeypatch.setattr(module, "mix_grouped", lambda experts, x, routing, w: real(experts, x, routing, w * 1.05))
    assert module.main(["--quick", "--device", "cpu", "--tokens", "7"]) == 1


@pytest.mark.parametrize("family", ["sparse_attention", "sparse_attention_extra"])
def test_other_ways_to_call_attention_are_checked_and_are_no_peers(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--deterministic", "--json", str(path)]
    arguments += ["--cache-formats", "bf16", "--tokens", "2", "--heads", "16", "--waves", "16,2"]
    module = importlib.import_module(f"benchmarks.{family}")
    assert module.main(arguments) == 0
    rows = [row for row in json.loads(path.read_text())[family]["rows"] if row["op"].startswith("paged")]
    assert [row["lowering"] for row in rows] == ["reference", "ours, deterministic"]
    assert all(row["passed"] and row["ratio_to_peer"] is None for row in rows)
    assert "ours, 16,2: not measured" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["sparse_attention", "dense_attention"])
def test_halves_of_queries_are_checked_and_are_no_peers(family: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--quick", "--device", "cpu", "--q-halves", "--skip", "prefill", "--json", str(path)]
    arguments += ["--cache-formats", "bf16", "--tokens", "2", "--heads", "4"]
    module = importlib.import_module(f"benchmarks.{family}")
    assert module.main(arguments) == 0
    rows = json.loads(path.read_text())[family]["rows"]
    found = [row["lowering"] for row in rows if row["shape"].get("T") == 2]
    assert found == ["reference", "ours, halves", "ours, torch.cat of halves"]
    assert all(row["passed"] and row["ratio_to_peer"] is None for row in rows)


@pytest.mark.parametrize(
    ("cache_format", "mixture", "magnitude"), [("fp8_ds_mla", "fourth", "spread12"), ("bf16", "one", "0.0009765625")]
)
def test_what_users_data_varies_is_an_axis(cache_format: str, mixture: str, magnitude: str, tmp_path: Path) -> None:
    """Dead and popular keys, mixed lengths, small latents: each row with its check, labelled with what is not usual."""
    path = tmp_path / "rows.json"
    arguments = [
        "--quick",
        "--device",
        "cpu",
        "--skip",
        "prefill",
        "--tokens",
        "5",
        "--heads",
        "8",
        "--json",
        str(path),
    ]
    arguments += ["--cache-formats", cache_format, "--iterations", "1", "--patterns", ",".join(attention.PATTERNS)]
    arguments += ["--mixtures", f"full,{mixture}", "--magnitudes", f"1,{magnitude}"]
    module = importlib.import_module("benchmarks.sparse_attention")
    assert module.main(arguments) == 0
    rows = json.loads(path.read_text())["sparse_attention"]["rows"]
    assert all(row["passed"] for row in rows)
    found = {(r["shape"].get("pattern"), r["shape"].get("mixture"), r["shape"].get("magnitude")) for r in rows}
    assert len(found) == len(rows) == len(attention.PATTERNS) * 4
    assert (None, None, None) in found
    assert ("none", mixture, magnitude) in found


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
@pytest.mark.parametrize("magnitude", ["0.125", "spread12", "wild30"])
def test_magnitudes_are_of_keys_and_groups(cache_format: str, magnitude: str) -> None:
    """Decoded keys are the old ones times a factor, one for all or one a key and group."""
    generator = torch.Generator().manual_seed(7)
    kv_cache = formats.allocate_cache(cache_format, 8, 64, device=torch.device("cpu"))
    fill_cache(kv_cache, cache_format, generator)
    slots = torch.arange(8 * 64)
    before = read_keys(kv_cache, slots, cache_format)
    scale_keys(kv_cache, cache_format, magnitude, generator)
    after = read_keys(kv_cache, slots, cache_format)
    width = {"fp8_ds_mla": 128, "fp8_ds_mla_v4": 64, "bf16": 512}[cache_format]
    latent = 448 if cache_format == "fp8_ds_mla_v4" else 512
    ratios = (after / before)[:, :latent].unflatten(1, (-1, width)).nanmedian(-1).values
    if magnitude == "0.125":
        assert (ratios == 0.125).all()
        return
    assert (ratios == 0).double().mean() == pytest.approx(0.25 if magnitude == "wild30" else 0.0, abs=0.08)
    powers = ratios[ratios > 0].log2()
    assert powers.amax() >= {"spread12": 11, "wild30": 28}[magnitude]
    assert powers.amin() <= {"spread12": -11, "wild30": -28}[magnitude]


def test_waves_are_named_by_tokens_heads_and_ctas() -> None:
    assert attention.waves_of("64,8", 9) == (Wave(9, Clusters(64, 8)),)
    assert attention.waves_of("7x64,8+24,16", 9) == (Wave(7, Clusters(64, 8)), Wave(2, Clusters(24, 16)))
    assert attention.waves_of("7x64,8+2x64,2,4", 9) == (Wave(7, Clusters(64, 8)), Wave(2, Clusters(64, 2, 4)))
    assert attention.waves_of("7x64,8+group3", 9) == (Wave(7, Clusters(64, 8)), Wave(2, Group(3)))


def test_host_time_has_neither_floor_nor_rate() -> None:
    calls = []
    made = common.Case(
        dispatch.Call("merge_attention_states", torch.device("cpu"), torch.float32),
        {},
        [lambda: calls.append(0), lambda: calls.append(1)],
        lambda: None,
        lambda: [common.Check("out", 0.0, 0.0)],
        bytes_moved=4000,
        name="eager merge",
        host=True,
    )
    (row,) = common.measure(made, ["auto"], 7, common.Floors(1e9, 1e3, "float32"))
    assert (row.op, row.timings, row.floor_us, row.bytes_per_second) == ("eager merge", 7, 0.0, 0.0)
    assert "eager merge" in common.format_row(row)


def test_only_the_cases_op_is_forced() -> None:
    """The other ops of a step go where dispatch sends them: no backend has all."""
    call = dispatch.Call("paged_sparse_attention.extra", torch.device("cpu"), torch.float32)
    asked = []

    def run() -> None:
        asked.extend(dispatch.explain(dispatch.Call(op, torch.device("cpu"), torch.float32)).forced for op in ops)

    ops = ("paged_sparse_attention", "paged_sparse_attention.extra", "concat_and_cache")
    common._under("triton", call, run)()
    assert asked == [True, True, False]
    assert common._under("reference", call, run) is run  # dispatch chooses it anyway, at no cost
    assert common._under("FlashMLA", call, run) is run


@pytest.mark.parametrize("row_words", [164, 288, 256, 129])
def test_the_gather_sums_every_word_of_every_row(row_words: int, device: torch.device) -> None:
    pytest.importorskip("triton")
    words = torch.randint(-999, 999, (50, row_words), dtype=torch.int32, device=device)
    slots = torch.randint(0, 50, (37,), dtype=torch.int32, device=device)  # the last program has rows to leave out
    sums = torch.empty(3, dtype=torch.int32, device=device)
    gather_floor.gather_sums(words, slots, sums)
    expected = [int(part.sum()) for part in words[slots.long()].split(gather_floor.KEYS_PER_PROGRAM)]
    assert sums.tolist() == expected


@pytest.mark.parametrize("block_size", [64, 3])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "fp8_ds_mla_v4", "bf16"])
def test_benchmarks_read_a_cache_as_the_reference_does(cache_format: str, block_size: int) -> None:
    cache = formats.allocate_cache(cache_format, 9, block_size)
    fill_cache(cache, cache_format, torch.Generator().manual_seed(0), distinct=4)  # the blocks behind are copies
    slots = torch.arange(9 * block_size).flip(0)
    keys = read_keys(cache, slots, cache_format)
    assert torch.equal(keys, read_slots(cache, slots, cache_format).double())
    assert keys.any(1).all()
    assert torch.equal(keys[: -4 * block_size], keys[4 * block_size :])


def test_what_can_be_drawn(tmp_path: Path) -> None:
    """Rows that failed, did not run or are no attention are left out; each op and format has its own panels."""
    shape = {"T": 1, "H": 16, "topk": 2048, "format": "bf16"}
    row = {"op": "paged_sparse_attention", "shape": shape, "lowering": "triton", "reason": None, "passed": True}
    row |= {"median_us": 3.0, "floor_us": 2.0}
    flat = {"T": 4096, "H": 16, "topk": 512, "d": 512, "num_kv": 99}
    rows = [row, {**row, "lowering": "gather alone"}, {**row, "passed": False, "lowering": "hopper"}]
    rows += [{**row, "reason": "none"}, {**row, "op": "merge"}, {**row, "op": "sparse_attention", "shape": flat}]
    table = {"rows": rows, "machine": {"device": "some GPU, SM90", "torch": "2.11"}}
    lines = plot.panel_lines([table])
    assert {title: len(found) for title, found in lines.items()} == {
        "decode over bf16": 2,
        "prefill over flat bf16": 1,
    }
    assert plot.place(rows[-1]) == (4096, "512 keys, d 512")
    pytest.importorskip("matplotlib")
    plot.draw([{"sparse_attention": table}, {"merge": {}}], tmp_path / "picture.svg")
    assert "prefill over flat bf16, 16 heads" in (tmp_path / "picture.svg").read_text()
    with pytest.raises(ValueError, match="nothing can be drawn"):
        plot.draw([{}], tmp_path / "none.svg")


def test_several_families_run_under_one_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.json"
    command = importlib.import_module("benchmarks.__main__").main
    assert command(["merge", "step_metadata", "--quick", "--device", "cpu", "--json", str(path)]) == 0
    assert set(json.loads(path.read_text())) == {"merge", "step_metadata"}
    assert command(["attention", "--quick"]) == 2
    assert "there is no family attention" in capsys.readouterr().err


def test_all_families_take_the_options_of_one_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`bench --json rows.json` names no family, and runs all of these."""
    command = importlib.import_module("benchmarks.__main__")
    assert command.main(["--help"]) == 0
    listed = capsys.readouterr().out
    for family in (*command.FAMILIES, *command.BY_NAME):
        with pytest.raises(SystemExit):
            command.main([family, "--help"])
        shared = {"--device", "--lowerings", "--iterations", "--json"} <= set(
            re.findall(r"--[a-z-]+", capsys.readouterr().out)
        )
        assert shared == (family in command.FAMILIES), family
        assert family in listed


@pytest.mark.parametrize(
    ("family", "option", "value", "expected"),
    [
        ("cache", "--device", "cuda", "there is no CUDA device"),
        ("merge", "--lowerings", "tirton", "there is no tirton, only auto, hopper"),
        ("cache", "--cache-formats", "fp8", "there is no fp8, only "),
        ("merge", "--json", "/no/such/folder/rows.json", "there is no folder /no/such/folder"),
        ("sparse_attention", "--patterns", "dead", "there is no dead, only live"),
        ("sparse_attention", "--mixtures", "half", "there is no half, only full, fourth"),
        ("sparse_attention", "--magnitudes", "spread", "there is no spread, only a number"),
        ("sparse_attention", "--waves", "64", "there is no 64, only 64,8"),
        ("dense_attention", "--mixtures", "4x", "there is no 4x, only 2x100"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_anything_is_measured(
    family: str, option: str, value: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(common, "run_benchmark", lambda *_: pytest.fail("measured"))
    with pytest.raises(SystemExit) as caught:
        importlib.import_module(f"benchmarks.{family}").main(["--quick", option, value])
    assert caught.value.code == 2
    assert expected in capsys.readouterr().err


def test_programs_for_gpus_say_so_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused = common.Row("op", {}, "triton", reason="it runs on a GPU")
    monkeypatch.setattr(common, "measure", lambda *_, **__: [refused])
    for program, expected in (
        (first_call, "there is no CUDA device"),
        (portable, "nothing is measured: it runs on a GPU"),
    ):
        with pytest.raises(SystemExit) as caught:
            program.main(["--quick"] if program is portable else [])
        assert caught.value.code == 2
        assert expected in capsys.readouterr().err


def test_families_of_models_are_named_or_left_out_without_transformers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[str] = []
    every, real = importlib.import_module("benchmarks.__main__"), dispatch.is_installed
    monkeypatch.setattr(dispatch, "is_installed", lambda name: name != "transformers" and real(name))
    monkeypatch.setattr(
        every.importlib, "import_module", lambda name: SimpleNamespace(main=lambda options: run.append(name) or 0)
    )
    assert every.main(["layer", "merge", "--quick"]) == 2
    assert "no layer, which need transformers: pip install" in capsys.readouterr().err
    assert not run
    assert every.main(["--quick"]) == 0
    assert run == [f"benchmarks.{family}" for family in every.FAMILIES if family not in ("experts", "layer")]


def test_max_error_sees_nan_and_ignores_equal_infinities() -> None:
    inf, nan = math.inf, math.nan
    assert common.max_error(torch.tensor([-inf, 1.0]), torch.tensor([-inf, 1.5])) == 0.5
    assert common.max_error(torch.tensor([nan]), torch.tensor([nan])) == 0.0
    assert math.isnan(common.max_error(torch.tensor([nan]), torch.tensor([0.0])))
    assert not common.Check("out", nan, 1.0).passed
    assert common.max_error(torch.tensor([inf]), torch.tensor([0.0])) == inf


def test_floor_is_the_larger_of_memory_and_math() -> None:
    floors = common.Floors(copy_bytes_per_second=1e12, matmul_flops_per_second=1e15, matmul_dtype="bfloat16")
    assert floors.microseconds(10**6, 0) == pytest.approx(1.0)
    assert floors.microseconds(10**6, 5 * 10**9) == pytest.approx(5.0)


def test_figures_stand_between_their_marks_with_ratio_target_and_error(tmp_path: Path) -> None:
    def row(lowering: str, us: float, heads: int, passed: bool = True) -> dict[str, object]:
        shape = {"T": 1, "H": heads, "format": "bf16", "context": 8192}
        checks = [{"name": "out", "error": 1e-3, "bound": 2e-3}]
        return {
            "op": "paged_attention",
            "shape": shape,
            "lowering": lowering,
            "median_us": us,
            "checks": checks,
            "passed": passed,
        }

    table = figures.Table("paged_attention", {"format": "bf16"}, "T, H", {(1, 16): 0.6, (1, 32): 0.4}, ("T", "H"))
    rows = [row(name, us, heads) for heads in (16, 32) for name, us in (("hopper", 50.0), ("FlashMLA", 100.0))]
    lines = figures.table_lines(table, rows)
    assert lines[2:] == [
        "| 1, 16 | 100 | 50 | **0.500** | 0.60 | 1.0e-03 (2.0e-03) |",
        "| 1, 32 | 100 | 50 | 0.500 | 0.40 | 1.0e-03 (2.0e-03) |",
    ]
    with pytest.raises(KeyError):
        figures.table_lines(table, rows[:3])
    with pytest.raises(KeyError, match="did not pass"):
        figures.table_lines(table, [*rows[:3], row("FlashMLA", 100.0, 32, passed=False)])
    assert figures.target_lines({"some": table}, rows)[2:] == [
        "| some | FlashMLA | 0.40 | 0.500 to 0.500 | 0 of 1 |",
        "| some | FlashMLA | 0.60 | 0.500 to 0.500 | 1 of 1 |",
    ]
    several = table._replace(targets={(1, 16): 0.6}, peers=("slow", "quick", "not measured"))
    lines = figures.table_lines(several, [rows[0], row("slow", 200.0, 16), row("quick", 80.0, 16)])
    assert lines[0].startswith("| T, H | fastest peer µs |")
    assert lines[2].startswith("| 1, 16 | 80 | 50 | 0.625 |")
    with pytest.raises(KeyError, match="no peer's time"):
        figures.table_lines(several, rows)
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: dense bf16 -->\nold\n<!-- end -->\nafter\n")
    every = figures.TABLES["dense bf16"].targets
    rows = [
        {**row(name, median, 16), "shape": {"T": tokens, "H": heads, "format": "bf16", "context": context}}
        for context, median in ((8192, 10.0), (131072, 99.0))  # the table has the first alone
        for tokens, heads in every
        for name in ("hopper", "FlashMLA")
    ]
    source = tmp_path / "rows.json"
    source.write_text(json.dumps({"dense_attention": {"rows": rows}}))
    assert figures.main([str(source), str(page)]) == 0
    text = page.read_text()
    assert text.startswith("before\n<!-- figures: dense bf16 -->\n| T, H |")
    assert text.endswith("<!-- end -->\nafter\n")
    assert "old" not in text
    assert "| 4, 128 | 10 | 10 | 1.000 | 0.60 |" in text


def test_mixtures_name_lengths() -> None:
    module = importlib.import_module("benchmarks.dense_attention")
    assert module.lengths_of("1x100+3x7") == [100, 7, 7, 7]
    drawn = module.lengths_of("random3")
    assert drawn == module.lengths_of("random3") != module.lengths_of("random4")
    assert 1 <= len(drawn) <= 256
    assert min(drawn) >= 16
    table = module.block_table([130, 1, 64], 9, torch.Generator().manual_seed(0))
    assert table.shape == (3, 3)
    assert len({*table[0].tolist(), table[1, 0].item(), table[2, 0].item()}) == 5


def test_mixtures_run_beside_rows_of_one_length(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--iterations", "1", "--sets", "1", "--cache-formats", "bf16", "--shapes", "3x8"]
    arguments += ["--topk", "64", "--sparse", "none,one", "--dense-formats", "bf16", "--dense", "1x100+3x7"]
    assert importlib.import_module("benchmarks.mixtures").main(arguments) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == ["format", *["bf16"] * 2] * 2


def test_a_prediction_scales_with_multiprocessors_down_to_what_bytes_and_products_take() -> None:
    gpu = portable.Gpu("of half the rate", 80, 66, portable.CLOCK_GHZ, 1000.0, 100.0)
    assert portable.predicted_us(50.0, 132, gpu, 1000, 1000) == pytest.approx(100.0)
    assert portable.predicted_us(50.0, 132, gpu, 200_000_000, 1000) == pytest.approx(200.0)
    assert portable.predicted_us(50.0, 132, gpu, 1000, 30_000_000_000) == pytest.approx(300.0)


def test_a_portable_row_says_whether_it_is_over_its_bar() -> None:
    check = common.Check("out", 1.0, 2.0)
    ours = common.Row("op", {"T": 8, "format": "bf16"}, "triton", median_us=12.0, ratio_to_peer=1.2, checks=[check])
    theirs = common.Row("op", {"T": 8, "format": "bf16"}, "FlashMLA", median_us=10.0, checks=[check])
    assert portable.bar("bf16", 8, 64) == 1.1
    assert portable.bar("bf16", 128, 64) == 1.4
    assert "over the bar" in portable.line("bf16", [ours, theirs], 1.1)
    assert portable.line("bf16", [ours, theirs], 1.4).split()[-6:] == ["10.0", "1.20", "1.40", "out", "1", "(2)"]
    assert "over" not in portable.line("bf16", [ours, theirs], float("inf"))


def test_portable_kernels_are_compiled_for_the_capability_that_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = [importlib.import_module(f"mla_ops.kernels.triton.{n}") for n in ("sparse_attention", "dense_attention")]
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "")
    for module in modules:
        monkeypatch.setattr(module, "capability", module.capability)
    arguments = ["--capability", "86", "--shapes", "1x2", "--kinds", "bf16,flat", "--iterations", "1", "--quick"]
    arguments.append("--no-peers")
    assert portable.main(arguments) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[0] for row in rows] == ["bf16", "flat"]
    assert not any("WRONG" in row for row in rows)
    assert os.environ["TRITON_OVERRIDE_ARCH"] == "sm86"
    assert [module.capability(torch.device("cpu")) for module in modules] == [(8, 6), (8, 6)]


def test_indexer_quality_measures_what_a_choice_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, num_keys, topk = 6, 96, 16
    query = indexer_quality.Query(
        torch.randn(num_tokens, 4, 128),
        torch.randn(num_tokens, 4),
        128**-0.5,
        torch.randn(3, 32, 128),
        torch.tensor([[2, 0, 1]], dtype=torch.int32),
        torch.zeros(num_tokens, dtype=torch.int32),
        torch.tensor([16, 17, 40, 95, 96, 5], dtype=torch.int32),
        topk,
    )
    for name in ("fp32", *indexer_quality.FORMATS):
        scores, error = query.scores(name)
        assert scores.shape == (num_tokens, num_keys)
        assert 0 < error <= 1
    counts, overlap, gap = indexer_quality.compare_choices(query, "fp32")
    assert counts.tolist() == [17, 40, 95, 96]
    assert (overlap == 1).all()
    assert (gap == 0).all()
    _, overlap, gap = indexer_quality.compare_choices(query, "fp8_index")
    assert (overlap > 0.7).all()
    assert (gap >= 0).all()

    choose = indexer_quality.Query.choose

    def without_the_best(self: indexer_quality.Query, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        chosen, count = choose(self, name)
        if name == "fp32":
            return chosen, count
        seen = torch.arange(num_keys).expand(num_tokens, -1) < self.visible.unsqueeze(1)
        left = self.scores("fp32")[0].scatter(1, chosen.clamp(min=0).long(), torch.inf).masked_fill(~seen, torch.inf)
        chosen[:, 0] = left.argmin(1)
        return chosen, count

    monkeypatch.setattr(indexer_quality.Query, "choose", without_the_best)
    _, overlap, gap = indexer_quality.compare_choices(query, "bf16")
    assert (overlap < 1).all()
    assert (gap > 0).all()


def test_scores_of_every_kind_are_selected_from_and_neighbours_are_alike() -> None:
    arguments = ["--quick", "--device", "cpu", "--lowerings", "reference", "--scores", ",".join(indexer_topk.KINDS)]
    assert indexer_topk.main(arguments) == 0
    scores = indexer_topk.scores_of("neighbours alike", 8, 20000, torch.Generator().manual_seed(0))
    alike = {lag: (scores[:, lag:] * scores[:, :-lag]).mean().item() for lag in (1, indexer_topk_patterns.ALIKE)}
    assert alike[1] > 0.6
    assert abs(alike[indexer_topk_patterns.ALIKE]) < 0.1


@pytest.mark.parametrize("family", ["cache", "dense_attention", "sparse_attention", "sparse_attention_extra"])
def test_every_format_that_an_option_takes_runs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries and keys in the dtype and width of the format; each case is built, described to dispatch and run once."""
    module, cases = importlib.import_module(f"benchmarks.{family}"), []
    monkeypatch.setattr(common, "run_benchmark", lambda _, built, __: cases.extend(case() for case in built) or 0)
    names = getattr(module, "FORMATS", formats.LATENT_FORMATS)
    assert module.main(["--quick", "--device", "cpu", "--cache-formats", ",".join(names)]) == 0
    for case in cases:
        case.runs[0]()
        assert all(check.passed for check in case.check()), case.shape
    assert {case.call.cache_format for case in cases} >= set(names)
