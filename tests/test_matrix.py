"""The matrix of what runs where: its page, its evidence, and dispatch on architectures that are not here."""

from __future__ import annotations

import ast
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_ops import dispatch, matrix
from mla_ops.cli import main
from mla_ops.kernels import flash_mla
from mla_ops.kernels.hopper import sources

ROOT = Path(__file__).resolve().parent.parent
# ops of which several lowerings were timed in one run
COMPARED = {"paged_sparse_attention", "paged_sparse_attention.extra", "sparse_attention"}
COMPARED |= {"paged_attention", "prefill_attention"}


def test_the_page_is_what_doctor_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """`python -m mla_ops doctor --matrix > docs/matrix.md` writes it."""
    assert main(["doctor", "--matrix"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "matrix.md").read_text(encoding="utf-8")


def test_every_lowering_has_a_row_or_a_refusal() -> None:
    page = matrix.markdown().splitlines()
    for line in matrix.lines():
        formats = ", ".join(line.cache_formats)
        row, refusal = f" | {formats} | {line.backend} | ", f" over {formats}: "
        found = [text for text in page if row in text or (refusal in text and text.startswith(f"- {line.backend}, "))]
        assert [text for text in found if re.search(rf"(^\| |, ){re.escape(line.op)}(,| )", text)], line


def test_what_counts_as_measured_has_a_checked_row_in_the_results() -> None:
    found: dict[tuple[str, str], set[str]] = {}
    for path in (ROOT / "docs" / "results").glob("*-h200.json"):
        for family in json.loads(path.read_text(encoding="utf-8")).values():
            for row in family["rows"]:
                if row["op"] in dispatch.FAMILIES and row["lowering"] in dispatch.BACKENDS and row["reason"] is None:
                    assert row["passed"]
                    key = row["lowering"], row["op"]
                    of_indexer = row["op"] in ("paged_indexer_logits", "select_keys")  # they take this format alone
                    usual = "fp8_index" if of_indexer else ""
                    found.setdefault(key, set()).add(row["shape"].get("format", usual))
    assert {key: set(formats) for key, formats in matrix.MEASURED.items()} == found


def call_of_row(op: str, shape: dict[str, Any]) -> dispatch.Call:
    """The call behind a row of `docs/results/`, as far as its shape says; all else is typical."""
    call = dispatch.typical_call(op, matrix.device_of("SM90"))
    names = {"T": "num_tokens", "H": "num_heads", "format": "cache_format", "d": "head_dim"}
    names |= {"keys": "num_keys", "columns": "num_keys", "num_kv": "num_keys", "topk": "topk"}
    changes = {names[name]: value for name, value in shape.items() if name in names and not isinstance(value, str)}
    if "format" in shape:
        call = matrix.call_of(op, shape["format"], call.device)
    if "dims" in shape:
        changes["head_dim"], changes["head_dim_v"] = map(int, shape["dims"].split("/"))
    return call._replace(**changes)


def test_dispatch_takes_the_fastest_of_the_lowerings_that_were_measured_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On Hopper, on every benchmarked shape, within 5 %."""
    monkeypatch.setattr(sources, "reason", lambda: None)
    monkeypatch.setattr(flash_mla, "find_provider", lambda: (None, "not here"))
    dispatch._choose.cache_clear()
    compared, slower = set(), []
    for path in (ROOT / "docs" / "results").glob("*-h200.json"):
        for family in json.loads(path.read_text(encoding="utf-8")).values():
            times: dict[tuple[str, str], dict[str, float]] = {}
            for row in family["rows"]:
                if row["op"] in dispatch.FAMILIES and row["lowering"] in dispatch.BACKENDS and row["reason"] is None:
                    times.setdefault((row["op"], json.dumps(row["shape"])), {})[row["lowering"]] = row["median_us"]
            for (op, shape), by_lowering in times.items():
                if len(by_lowering) > 1:
                    compared.add(op)
                    chosen = dispatch.select_name(call_of_row(op, json.loads(shape)))
                    if by_lowering[chosen] > 1.05 * min(by_lowering.values()):
                        slower.append(f"{path.name}: {op} {shape}: {chosen} of {by_lowering}")
    dispatch._choose.cache_clear()
    assert not slower, "\n".join(slower)
    assert compared == COMPARED


def test_every_line_and_every_state_names_a_test_that_is_there() -> None:
    named = {f"tests/{line.test}" for line in matrix.lines()}
    named |= {part for evidence in matrix.EVIDENCE.values() for part in evidence.split("`")[1::2] if "::" in part}
    for file, _, function in (name.partition("::") for name in sorted(named)):
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in functions, f"{file}::{function}"


def test_what_is_refused_is_refused_for_the_reason_of_its_cell() -> None:
    for line, name in itertools.product(matrix.lines(), matrix.COLUMNS):
        found = line.cells[name]
        for cache_format in line.cache_formats if found.state == matrix.REFUSED else ():
            call = matrix.call_of(line.op, cache_format, matrix.device_of(name))
            with dispatch.override(line.backend), pytest.raises(NotImplementedError) as caught:
                dispatch.select_name(call)
            assert found.reason in str(caught.value)


def test_every_architecture_is_one_that_the_kernels_are_compiled_for() -> None:
    text = (ROOT / "tests" / "aot_kernels.py").read_text(encoding="utf-8")
    numbers = ", ".join(name.removeprefix("SM") for name in matrix.CAPABILITIES)
    assert f"CAPABILITIES = ({numbers})" in text


def test_every_op_has_a_lowering_on_every_architecture() -> None:
    runs = {(line.op, name) for line in matrix.lines() for name, cell in line.cells.items() if cell.state in RUNS}
    assert runs == {(op, name) for op in dispatch.FAMILIES for name in matrix.COLUMNS}


RUNS = {matrix.MEASURED_ON, matrix.TESTED, matrix.INTERPRETED, matrix.COMPILES}

# architecture, op, changes to a typical call, packages that are installed, the lowering
CHOICES = [
    ("SM90", "paged_sparse_attention", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "paged_sparse_attention", {}, {"triton"}, "triton"),
    ("SM90", "paged_sparse_attention", {"dtype": torch.float32, "cache_format": "fp32"}, {"nvrtc", "triton"}, "triton"),
    ("SM90", "paged_attention", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "prefill_attention", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "prefill_attention", {"head_dim": 24, "head_dim_v": 7}, {"nvrtc", "triton"}, "triton"),
    ("SM90", "topk_indices", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "indexer_logits", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "indexer_logits", {"num_heads": 16}, {"nvrtc", "triton"}, "triton"),
    ("SM90", "concat_and_cache", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "concat_and_cache", {}, {"triton"}, "triton"),
    ("SM90", "write_index_cache", {}, {"nvrtc", "triton"}, "hopper"),
    ("SM90", "gather_cache", {}, {"nvrtc", "triton"}, "triton"),
    *(
        (name, op, {}, {"nvrtc", "triton", "flashinfer"}, "triton")
        for name in matrix.CAPABILITIES
        if name != "SM90"
        for op in ("paged_sparse_attention", "paged_attention", "prefill_attention", "topk_indices", "concat_and_cache")
    ),
    ("SM80", "paged_sparse_attention", {}, set(), None),
]


@pytest.mark.parametrize(("architecture", "op", "changes", "installed", "expected"), CHOICES)
def test_dispatch_on_every_architecture(
    architecture: str,
    op: str,
    changes: dict[str, object],
    installed: set[str],
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = None if "nvrtc" in installed else dispatch.Missing("no NVRTC")
    monkeypatch.setattr(sources, "reason", lambda: missing)
    dispatch._choose.cache_clear()
    real = dispatch.is_installed
    monkeypatch.setattr(dispatch, "is_installed", lambda name: name in installed if name == "triton" else real(name))
    call = dispatch.typical_call(op, matrix.device_of(architecture))._replace(**changes)
    try:
        if expected is None:
            with pytest.raises(NotImplementedError, match="no lowering can run this call"):
                dispatch.select_name(call)
        else:
            assert dispatch.select_name(call) == expected
    finally:
        dispatch._choose.cache_clear()
