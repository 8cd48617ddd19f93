"""Writes signatures, docstrings and examples into the pages of docs/, so that they can be read in the repository.

    python scripts/op_reference.py          # writes
    python scripts/op_reference.py --check  # lists pages that differ, exits with 1 if there are any

A page says where: `<!-- reference: mla_ops.gather_cache -->`, then what this script wrote, then `<!-- end -->`. A line
`::: mla_ops.gather_cache` is taken as such a place that is still empty. `mla_ops.StepMetadata(build, check)` shows
these methods of a class only. `file:examples/x.py` stands for a file's text, `file:examples/x.py#part` for what is
between its lines `# [start:part]` and `# [end:part]`. Errors that every op raises are on docs/ops/index.md alone.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
PLACE = re.compile(
    r"^(?:::: (?P<new>[^\n]+)|<!-- reference: (?P<old>[^\n]+) -->\n.*?^<!-- end -->)$", re.MULTILINE | re.DOTALL
)
SECTION = re.compile(r"^(Args|Returns|Raises|Attributes|Yields):$")
TITLES = {"Args": "Arguments"}
OF_EVERY_OP = re.compile(
    r"(TypeError, ValueError: a dtype.* that the contract does not allow(; nothing is written)?"
    r"|NotImplementedError: no lowering can run the call.* requires? grad)\.$"
)
WIDTH = 100


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    stale = []
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        wanted = render_page(text)
        if wanted != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(wanted, encoding="utf-8")
    print("\n".join(stale) or "nothing to do")
    return int(check and bool(stale))


def render_page(text: str) -> str:
    """A page with every place filled."""

    def fill(match: re.Match[str]) -> str:
        name = match["new"] or match["old"]
        filled = shown_file(name.removeprefix("file:")) if name.startswith("file:") else render(name)
        return f"<!-- reference: {name} -->\n\n{filled}\n\n<!-- end -->"

    return PLACE.sub(fill, text)


def shown_file(path: str) -> str:
    """A file, or a part of it, as a block of code."""
    path, _, part = path.partition("#")
    text = (ROOT / path).read_text(encoding="utf-8")
    if part:
        text = text[text.index(f"# [start:{part}]\n") : text.index(f"# [end:{part}]\n")].partition("\n")[2]
    return f"```py\n{text.strip()}\n```"


def render(path: str) -> str:
    """The entry of one function or class."""
    path, _, members = path.partition("(")
    shown = set(members.rstrip(")").split(", ")) if members else None
    target = find(path)
    name = path.rpartition(".")[2]
    lines = [f"## `{name}`", ""]
    if not inspect.isclass(target):
        return "\n".join([*lines, *code(signature(name, target)), *docstring(target)]).rstrip()
    fields = is_record(target)
    if not fields:
        lines += code(signature(name, target.__init__, skip=1, returns=False))
    lines += docstring(target)
    for key, member in vars(target).items():
        bound = isinstance(member, (classmethod, staticmethod))
        function = member.__func__ if bound else member
        if key.startswith("_") or not inspect.isfunction(function) or not function.__doc__:
            continue
        if shown is not None and key not in shown:
            continue
        skip = 0 if isinstance(member, staticmethod) else 1
        lines += [f"### `{name}.{key}`", "", *code(signature(key, function, skip=skip)), *docstring(function)]
    return "\n".join(lines).rstrip()


def find(path: str) -> Any:
    """The object at a dotted path, through modules and their attributes."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            target = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[count:]:
            target = getattr(target, attribute)
        return target
    raise ModuleNotFoundError(path)


def is_record(target: type) -> bool:
    """Whether the fields, which the docstring lists, are the arguments."""
    return dataclasses.is_dataclass(target) or hasattr(target, "_fields")


def signature(name: str, function: Any, *, skip: int = 0, returns: bool = True) -> str:
    """A signature as it would be written, on one line where it fits."""
    described = inspect.signature(function)
    parts, star = [], False
    for parameter in list(described.parameters.values())[skip:]:
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            parts.append("*")
            star = True
        star = star or parameter.kind is parameter.VAR_POSITIONAL
        written = re.sub(r": '([^']*)'", r": \1", str(parameter)).replace("'", '"')
        parts.append(written.replace("torch.Tensor", "Tensor"))
    back = described.return_annotation
    end = "" if not returns or back is inspect.Signature.empty else f" -> {annotation(back)}"
    end = end.replace("torch.Tensor", "Tensor").replace("'", '"')
    line = f"{name}({', '.join(parts)}){end}"
    if len(line) <= WIDTH:
        return line
    body = "".join(f"    {part},\n" for part in parts)
    return f"{name}(\n{body}){end}"


def annotation(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))


def code(text: str) -> list[str]:
    return ["```py", text, "```", ""]


def docstring(target: Any) -> list[str]:
    """A Google docstring as Markdown: its sections are lists, but for what is returned."""
    lines: list[str] = []
    section = listed = False
    for line in without_common_errors(inspect.cleandoc(target.__doc__ or "")).splitlines():
        heading = SECTION.match(line)
        if heading:
            section, listed = True, heading[1] not in ("Returns", "Yields")
            lines += [f"**{TITLES.get(heading[1], heading[1])}**", ""]
        elif not section or not line.startswith("    "):
            section = section and not line
            lines.append(line)
        else:
            text = line.strip()
            opens = listed and heading_of_entry(line[4:])
            lines.append(entry(line[4:]) if opens else f"  {text}" if text and listed else text)
    return [*lines, ""]


def without_common_errors(text: str) -> str:
    """A docstring without the errors that every op raises, and without the section if there are no others."""
    before, found, errors = text.partition("\nRaises:\n")
    if not found:
        return text
    errors, rest = (*errors.split("\n\n", 1), "")[:2]
    entries = re.split(r"\n(?=    \S)", errors)
    kept = [entry for entry in entries if not OF_EVERY_OP.match(" ".join(entry.split()))]
    parts = [before.rstrip(), "Raises:\n" + "\n".join(kept) if kept else "", rest]
    return "\n\n".join(part for part in parts if part)


def heading_of_entry(line: str) -> bool:
    """Whether a line of a section opens an entry, `name: what it is`."""
    return bool(re.match(r"[*\w][\w*, .]*: ", line))


def entry(line: str) -> str:
    names, _, text = line.partition(": ")
    shown = ", ".join(f"`{name.strip()}`" for name in names.split(","))
    return f"- {shown}: {text}"


if __name__ == "__main__":
    sys.exit(main())
