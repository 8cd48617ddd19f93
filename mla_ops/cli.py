"""`python -m mla_ops demo | doctor | bench`."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import __version__, dispatch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the command line without the program's name; `sys.argv` by default.

    Returns:
        Exit status: 0, or 2 for a request that cannot be met, after a message that says why; 141, without a word, if
        nobody reads the output to its end (`| head`).
    """
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["bench"]:  # its options belong to the benchmark
        return _bench(arguments[1:])
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.command == "demo":
        return _demo(options)
    if options.matrix:
        from .matrix import markdown

        print(markdown(), end="")
        return 0
    return _doctor()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m mla_ops", description="Multi-head latent attention, sparse and dense."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="demo | doctor | bench")

    demo = commands.add_parser(
        "demo",
        help="a DeepSeek or GLM model reads a text and continues it through torch.ops.mla.*",
        description="Runs a transformers model twice over the same prompts: as it comes, and through "
        "torch.ops.mla.* from a paged cache. Without options: a small model with fixed random weights over the bytes "
        "of 'Alice's Adventures in Wonderland'.",
    )
    demo.add_argument(
        "--arch",
        default="v3.2",
        choices=("v3", "v3.2", "glm5", "v4"),
        help="architecture of the small model, by default %(default)s; a checkpoint names its own",
    )
    demo.add_argument("--model", metavar="PATH", help="folder of a checkpoint with its tokenizer")
    demo.add_argument(
        "--prompt", metavar="TEXT", help="text to continue, in every request; by default passages of the book"
    )
    demo.add_argument("--prompt-file", metavar="PATH", help="file with the text to continue")
    demo.add_argument(
        "--batch", type=int, default=4, metavar="N", help="requests that run together, by default %(default)s"
    )
    demo.add_argument(
        "--max-new-tokens", type=int, default=12, metavar="N", help="new tokens of each request, by default %(default)s"
    )
    demo.add_argument(
        "--cache",
        choices=("fp8_ds_mla", "fp8_ds_mla_v4", "bf16", "fp32"),
        help="format of the latent cache: by default fp8_ds_mla, for V4 fp8_ds_mla_v4; the model runs in float32 for "
        "fp32, else in bfloat16",
    )
    demo.add_argument("--device", metavar="DEVICE", help="cpu, cuda or cuda:N; by default cuda where there is one")
    demo.add_argument(
        "--tp", type=int, default=1, metavar="N", help="ranks that share heads and experts; start N with torchrun"
    )
    demo.add_argument(
        "--dcp", type=int, default=1, metavar="N", help="ranks that share every context; start N with torchrun"
    )
    demo.add_argument("--no-compile", action="store_true", help="run every op eagerly")
    demo.add_argument("--no-graph", action="store_true", help="do not capture the decode step in a CUDA graph")

    doctor = commands.add_parser("doctor", help="versions, devices, and which lowering of each op can run here")
    doctor.add_argument("--matrix", action="store_true", help="every op, format, architecture and lowering instead")
    commands.add_parser("bench", help="bench [FAMILY ...] [options]: run benchmarks of this checkout", add_help=False)
    return parser


def _demo(options: argparse.Namespace) -> int:
    if dispatch.is_installed("transformers"):
        try:
            from transformers import DeepseekV4ForCausalLM, DeepseekV32ForCausalLM  # noqa: F401
        except ImportError:
            print(
                f"demo needs a transformers with DeepSeek-V3.2 and V4 (5.17 or later), {_version('transformers')} is "
                "installed: pip install --upgrade transformers",
                file=sys.stderr,
            )
            return 2
    else:
        print("demo needs transformers: pip install 'mla-ops[models]'", file=sys.stderr)
        return 2
    from .demo import DemoOptions, run_demo

    try:
        return run_demo(
            DemoOptions(
                arch=options.arch,
                model=options.model,
                prompt=options.prompt,
                prompt_file=options.prompt_file,
                batch=options.batch,
                max_new_tokens=options.max_new_tokens,
                cache=options.cache,
                compile=not options.no_compile,
                graph=not options.no_graph,
                device=options.device,
                tp=options.tp,
                dcp=options.dcp,
            )
        )
    except (FileNotFoundError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _doctor() -> int:
    print(f"mla_ops {__version__}")
    print(f"  python            {platform.python_version()} on {platform.system()} {platform.machine()}")
    cuda = torch.version.cuda or torch.version.hip
    print(f"  torch             {torch.__version__}" + (f" (built for {cuda})" if cuda else " (built for CPU only)"))
    for package, purpose in (
        ("triton", "the Triton lowerings"),
        ("cuda-bindings", "the Hopper lowerings"),
        ("transformers", "the demo and mla_ops.models"),
        ("sgl-flash-mla", "the flash_mla lowerings on Hopper: pip install 'mla-ops[flash-mla]'"),
        ("flash-attn", "the flash_attn lowering of prefill"),
        ("flashinfer-python", "the flashinfer lowerings from SM80 on: pip install 'mla-ops[flashinfer]'"),
    ):
        print(f"  {package:17} {_version(package):14} {purpose}")

    print("\nDevices")
    print(f"  cpu           {torch.get_num_threads()} threads")
    devices = [torch.device("cpu")]
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        kind = "" if torch.version.hip else f", compute capability {properties.major}.{properties.minor}"
        print(f"  cuda:{index}        {properties.name}{kind}, {properties.total_memory / 2**30:.0f} GiB")
        devices.append(torch.device("cuda", index))
    if len(devices) == 1:
        print("  cuda          none: " + _why_no_cuda())

    tables: dict[tuple[str, ...], list[str]] = {}
    for device in devices:
        tables.setdefault(tuple(_lowerings(device)), []).append(str(device))
    for table, names in tables.items():
        print(f"\nLowerings on {', '.join(names)}, by a typical call of each op")
        print("\n".join(table))
    print(
        "\nruns: chosen. available: after the one that runs; with a number, on request. no: not on this device. "
        "-: there is none."
    )
    print(f"A lowering can be forced with mla_ops.dispatch.override(...) or {dispatch.ENVIRONMENT_VARIABLE}=NAME.")
    return 0


def _lowerings(device: torch.device) -> list[str]:
    """Lines of a table: what each lowering does for each op. Notes are what a user can change, or ask for."""
    notes: list[str] = []

    def number(note: str) -> int:
        if note not in notes:
            notes.append(note)
        return notes.index(note) + 1

    cells: dict[str, list[str]] = {}
    for entry in dispatch.report(device):
        if not entry.exists:
            cell = "-"
        elif entry.reason is None:
            cell = "runs" if entry.runs else "available"
            why = dispatch.ON_REQUEST.get((entry.backend, entry.op))
            if why is not None and not entry.runs:
                cell += f" ({number(f'on request only: {why}')})"
        elif isinstance(entry.reason, dispatch.Missing):
            cell = f"no ({number(entry.reason)})"
        else:
            cell = "no"
        cells.setdefault(entry.op, []).append(cell)
    lines = [f"  {'op':36}" + "".join(f"{backend:>14}" for backend in dispatch.BACKENDS)]
    lines += [f"  {op:36}" + "".join(f"{cell:>14}" for cell in row) for op, row in cells.items()]
    return lines + [f"  ({place}) {note}" for place, note in enumerate(notes, 1)]


def _why_no_cuda() -> str:
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is a CPU build: install the one that pytorch.org's 'Get started' page gives for your GPU"
    return "torch finds no GPU; check nvidia-smi and the driver's version"


def _bench(arguments: list[str]) -> int:
    if not (BENCHMARKS / "__main__.py").exists():
        print(f"bench runs from a checkout of the project, there are no benchmarks in {BENCHMARKS}", file=sys.stderr)
        return 2
    root = str(BENCHMARKS.parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return int(importlib.import_module("benchmarks.__main__").main(arguments))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
