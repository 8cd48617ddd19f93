"""The fuzzer finds what is wrong, and goes on: `make fuzz`."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuzz.__main__ import add_to, drive, page_of, without_waiting
from fuzz.compilations import BusyError, Compilations
from fuzz.run import ABSENT, RAN, REFUSED, describe, draw_call, run_case

from mla_ops import dispatch
from mla_ops.testing.checks import assert_same_bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_cases_of_every_kind_pass() -> None:
    outcomes = [run_case(seed, DEVICE)[2] for seed in range(2, 16)]
    assert outcomes.count(RAN) > 8
    assert REFUSED in outcomes
    assert set(outcomes) <= {RAN, REFUSED, ABSENT}


def test_a_seed_is_one_case() -> None:
    assert describe(7) == describe(7)
    first, second = draw_call(7).arguments, draw_call(7).arguments
    for name, value in first.items():
        if torch.is_tensor(value):
            assert_same_bits(value, second[name], name)


def first_seed_of(op: str, **wanted: Any) -> int:
    for seed in range(0, 300_000, 97):  # seeds of several swarms
        call = draw_call(seed)
        if call.op_name == op and not call.wrong and all(call.arguments[n] == v for n, v in wanted.items()):
            tensors = [value for value in call.arguments.values() if isinstance(value, torch.Tensor)]
            if all(tensor.numel() for tensor in tensors):
                return seed
    raise AssertionError(f"no case of {op}")


def _wrong_value(arguments: dict[str, Any]) -> None:
    arguments["lse"].nan_to_num_(neginf=0.0).add_(1.0)


def _stray_write(arguments: dict[str, Any]) -> None:
    arguments["q"][0, 0, 0] += 1


def _refusal(arguments: dict[str, Any]) -> None:
    raise ValueError("no")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [(_wrong_value, "lse: .* beyond their bound"), (_stray_write, ": q: .* bytes differ"), (_refusal, "CPU does not")],
)
def test_a_lowering_that_is_wrong_is_found(
    spoil: Callable[[dict[str, Any]], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = first_seed_of("paged_attention", cache_format="fp32")
    select = dispatch.select

    def wrong(call: dispatch.Call) -> dispatch.Lowering:
        lowering = select(call)
        if dispatch.select_name(call) == "reference":
            return lowering

        def run(*args: Any, **kwargs: Any) -> None:
            lowering.run(*args, **kwargs)
            spoil({"q": args[0], **kwargs})

        return replace(lowering, run=run, compute=None)

    run_case(seed, DEVICE)
    monkeypatch.setattr(dispatch, "select", wrong)
    with pytest.raises(AssertionError, match=message):
        run_case(seed, DEVICE)


# A child that dies in its third case.
DIES = """
import json, os, sys
first, last, step, device = sys.argv[-1].split(",")
assert os.environ["TAKEN"] == str(int(first) % 2)
for seed in range(int(first), int(last), int(step)):
    print(json.dumps({"begins": seed}), flush=True)
    if seed == 2:
        os._exit(9)
    print(json.dumps({"seed": seed, "op": "x", "lowering": "auto", "outcome": "ran"}), flush=True)
"""


def test_a_case_that_kills_its_process_is_a_finding_and_the_others_run(tmp_path: Path) -> None:
    environments = [{"TAKEN": "0"}, {"TAKEN": "1"}]
    counts, findings, done = drive(0, 6, 2, "cpu", 60.0, environments, str(tmp_path), [sys.executable, "-c", DIES])
    assert counts == {("x", "auto", "ran"): 5}
    assert findings == ["seed 2: its process died with status 9"]
    assert done == 6
    page = page_of(counts, findings, 1.0, "from 0", "a machine", "abc")
    assert page.runs == ["6 cases in 1 s, 1 findings; seeds from 0; a machine; commit abc"]
    assert page.text().rstrip().endswith("seed 2: its process died with status 9")


def test_runs_on_one_page_add_up(tmp_path: Path) -> None:
    counts = Counter({("merge", "auto", RAN): 2, ("merge", "triton", REFUSED): 1, ("topk", "hopper", ABSENT): 3})
    for commit in ("abc", "def"):
        add_to(tmp_path / "page.txt", page_of(counts, ["seed 9: wrong"], 1.0, "from 0", "a machine", commit))
    text = (tmp_path / "page.txt").read_text()
    assert text.count("run: 7 cases in 1 s, 1 findings; seeds from 0; a machine; commit ") == 2
    assert "all: 14 cases, 2 findings" in text
    assert re.search(r"^merge +4 +2 +0$", text, re.MULTILINE)
    assert re.search(r"^topk +0 +0 +6$", text, re.MULTILINE)


def test_children_that_cannot_begin_are_a_finding(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise ImportError"]
    counts, findings, done = drive(0, 6, 2, "cpu", 60.0, [{}], str(tmp_path), command)
    assert not counts
    assert not done
    assert findings == ["a child ended with status 1 before its first case"] * 2


def test_children_find_the_package_of_this_checkout(tmp_path: Path) -> None:
    root = str(Path(__file__).resolve().parents[1])
    command = [sys.executable, "-c", f"import sys; sys.exit(0 if {root!r} in sys.path else 7)"]
    assert drive(0, 1, 1, "cpu", 60.0, [{}], str(tmp_path), command) == (Counter(), [], 0)


def test_one_child_compiles_a_kernel_and_the_others_go_on(tmp_path: Path) -> None:
    one, other = Compilations(tmp_path), Compilations(tmp_path)
    kernel = SimpleNamespace(module="merge", name="_merge_kernel")
    one.take(key=("bf16",), fn=kernel)
    with pytest.raises(BusyError):
        other.take(key=("bf16",), fn=kernel)
    other.take(key=("fp32",), fn=kernel)
    one.release()
    other.take(key=("bf16",), fn=kernel)


def test_a_case_that_is_put_off_comes_behind_others() -> None:
    order = []
    for seed, put_off in without_waiting(range(4)):
        if seed == 1 and seed not in order:
            put_off()
        order.append(seed)
    assert order == [0, 1, 2, 3, 1]
