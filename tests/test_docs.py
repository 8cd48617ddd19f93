"""The code that readers copy runs: README, every page of docs/, and examples/."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

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
    weights = torch.softmax(torch.einsum("thd,tkd->thk", q.double(), keys) * 576**-0.5, dim=-1)
    expected = torch.einsum("thk,tkd->thd", weights, keys[..., :512])
    # e4m3 has 4 significant bits, so a key is off by at most 1/16; the roundings of 32 keys partly cancel
    assert (out.double() - expected).abs().max() < expected.abs().max() / 16


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


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_captured_decode_loop_is_shown_whole() -> None:
    """A formatter that takes the include for Python breaks it, and mkdocs then shows the broken line."""
    included = re.findall(r'^--8<-- "(.*)"$', (ROOT / "docs" / "compile.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert included == ["examples/captured_decode_loop.py"]
