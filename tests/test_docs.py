"""The code that readers copy runs: README, every page of docs/, and examples/."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import fresh
import pytest
import torch

import mla_ops

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def code_of(page: Path) -> str:
    """The blocks of a page marked `python`, in order; those marked `py` are shown, not run."""
    return "\n".join(FENCE.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "page", [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES if code_of(page)]
)
def test_snippets_of_a_page_run_in_order(page: Path) -> None:
    torch.manual_seed(0)
    exec(compile(code_of(page), str(page), "exec"), {"__name__": "snippet"})


def test_readme_usage_attends_over_what_it_wrote() -> None:
    torch.manual_seed(0)
    scope: dict[str, object] = {}
    exec(code_of(ROOT / "README.md"), scope)
    q, latent, rope, indices, out = (scope[name] for name in ("q", "latent", "rope", "indices", "out"))
    keys = torch.cat((latent, rope), dim=1)[indices.long()].double()
    weights = torch.softmax(torch.einsum("thd,tkd->thk", q.double(), keys) * 192**-0.5, dim=-1)
    expected = torch.einsum("thk,tkd->thd", weights, keys[..., :512])
    # e4m3 has 4 significant bits, so a key is off by at most 1/16; the roundings of 32 keys partly cancel
    assert (out.double() - expected).abs().max() < expected.abs().max() / 16


def test_readme_has_the_figures_of_its_run() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    run = (ROOT / "docs" / "results" / "sparse_attention-readme-h200.txt").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (\d+), (\d+) \| ([\d.]+) \| ([\d.]+) \| (\S+) \((\S+)\) \|$", readme, re.MULTILINE)
    assert len(shown) == 5
    ratios = []
    for tokens, heads, peer, ours, error, bound in shown:
        rows = dict(
            re.findall(rf"^\S+ T={tokens} H={heads} topk=2048 format=fp8_ds_mla +(\w+) +(.*)$", run, re.MULTILINE)
        )
        assert rows["FlashMLA"].split()[0] == peer
        assert rows["hopper"].split()[0] == ours
        figures = [f"{float(figure):.1e}".replace("e-0", "e-") for figure in re.findall(r"[\d.]+", rows["hopper"])[-2:]]
        assert figures == [error, bound]
        ratios.append(float(peer) / float(ours))
    assert f"are {min(ratios):.1f} to {max(ratios):.1f} times as fast as FlashMLA" in readme


def test_no_row_of_the_readme_is_slower_than_before() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "results" / "sparse_attention-before-after-h200.txt").read_text(encoding="utf-8")
    measured = {}
    for tokens, heads, before, after in re.findall(r"^ +(\d+) +(\d+) +row +([\d.]+) +([\d.]+) ", page, re.MULTILINE):
        measured[tokens, heads] = float(after) / float(before)
    assert set(measured) == set(re.findall(r"^\| (\d+), (\d+) \|", readme, re.MULTILINE))
    assert max(measured.values()) <= 1.02


def test_quick_start_shows_the_slots_that_come_out(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "quickstart.md"
    exec(compile(code_of(page), str(page), "exec"), {})
    shown = re.search(r"slot_mapping\.tolist\(\)\)  # (.*)", page.read_text(encoding="utf-8"))
    assert shown is not None
    assert shown[1] in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["--compile"]], ids=["eager", "compiled"])
def test_captured_decode_loop_equals_plain_steps(
    arguments: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / "examples" / "captured_decode_loop.py"
    spec = importlib.util.spec_from_file_location("captured_decode_loop", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    assert module.main(arguments) == 0
    assert "largest difference" in capsys.readouterr().out


COPIED = [*PAGES, *(path for folder in ("examples", "benchmarks", "mla_ops") for path in (ROOT / folder).rglob("*.py"))]


def test_nothing_that_users_copy_scales_by_the_width_after_absorption() -> None:
    """No model does. A line that warns of it says 'Not'."""
    wrong = re.compile(r"(?<!Not `)(?<!\d)(576|HEAD_DIM) ?\*\* ?-0?\.5")
    found = [path.name for path in COPIED if wrong.search(path.read_text(encoding="utf-8"))]
    assert not found


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {name}, which is not there"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            anchors = {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in headings}
            assert anchor in anchors, f"{page.name} links to {name}#{anchor}, which is not there"


def test_files_that_a_page_names_exist() -> None:
    names = {path.name for path in ROOT.rglob("*.*") if "." not in {part[:1] for part in path.relative_to(ROOT).parts}}
    for page in PAGES:
        for name in re.findall(r"`(?:[\w/]+/)?(\w+\.(?:py|cuh?|cpp|json))\b", page.read_text(encoding="utf-8")):
            assert name in names, f"{page.name} names {name}, which is not there"


def test_results_are_linked_and_name_no_machine() -> None:
    """A path or a warning of the machine that ran a benchmark is no result."""
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    for path in sorted((ROOT / "docs" / "results").iterdir()):
        assert path.suffix == ".json" or f"{path.name})" in pages, f"no page links to {path.name}"
        lines = path.read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if re.search(r"(^|[ \"])/\w+/|site-packages|Warning:", line)], path.name


def test_pages_show_the_docstrings_and_examples_of_today() -> None:
    """`python scripts/op_reference.py` writes them; a page can be read without a site."""
    script = ROOT / "scripts" / "op_reference.py"
    done = fresh.run(str(script), "--check", cwd=ROOT)
    assert done.returncode == 0, f"run python scripts/op_reference.py: {done.stdout}{done.stderr}"


def test_the_reference_has_every_public_op_with_its_signature() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    ops = {name for name in vars(mla_ops.ops) if callable(getattr(mla_ops.ops, name)) and not name.startswith("_")}
    missing = [name for name in sorted(ops) if f"\n## `{name}`\n" not in text]
    assert not missing
    assert "gather_cache(\n    kv_cache: Tensor,\n" in text
    assert re.search(r"\*\*Raises\*\*\n\n- `TypeError`: `prompt` is no sequence", text)
    assert text.count("that the contract does not allow") == 1, "docs/ops/index.md says it for every op"


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_no_page_needs_a_site_to_say_something(page: Path) -> None:
    """An include of measured results is a block in a page that has words of its own and a link to the file."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^:::", text, re.MULTILINE)
    assert not re.search(r'^--8(?!<-- "docs/results/)', text, re.MULTILINE)
    for included in re.findall(r'^--8<-- "docs/(.*)"$', text, re.MULTILINE):
        assert f"]({included})" in text, f"{page.name} shows {included} on a site only: link to it as well"
    assert re.search(r"^[A-Z|`-].{40}", text, re.MULTILINE)


KERNEL_PAGES = sorted((ROOT / "docs" / "kernels").glob("*.md"))


@pytest.mark.parametrize("page", KERNEL_PAGES, ids=lambda path: path.stem)
def test_a_kernel_page_is_short_and_says_what_to_run(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert len(text.split()) <= 800
    named = set(re.findall(r"(?:tests/)?(test_\w+\.py)", text))
    assert named
    missing = [name for name in sorted(named) if not (ROOT / "tests" / name).exists()]
    assert not missing
    if page.stem != "index":
        for part in ("```\n", "## Invariants", "## What bounds it", "## If you change it"):
            assert part in text, part


def test_pages_give_the_shared_memory_of_the_kernels_of_today() -> None:
    figures = json.loads((ROOT / "tests" / "hopper_resources.json").read_text(encoding="utf-8"))
    known, shown = {figure["shared_bytes"] for figure in figures}, 0
    for page in KERNEL_PAGES:
        for pair in re.findall(r"\| ([\d,]+) / ([\d,]+) B \|", page.read_text(encoding="utf-8")):
            shown += 1
            assert {int(number.replace(",", "")) for number in pair} <= known, f"{page.name}: {pair}"
    assert shown
