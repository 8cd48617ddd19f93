"""Compiles the library's Triton kernels for GPUs that need not be here, and prints what each takes as JSON.

Run as a program of its own (`test_aot_compile.py` does), because Triton decides at import whether it interprets.

    python tests/aot_jobs.py [substring of variant ids] [compute capabilities]
    python tests/aot_jobs.py --amd      # for AMD's architectures
    python tests/aot_jobs.py --write    # all figures to aot_figures.json

Triton makes the same LLVM IR for all architectures of a family where the constants are the same, but for instructions
that one of them has alone. So it makes it for the first of them, and compiles that for each but twins, which get its
figures. Variants of each kind of instruction are compiled for every architecture from their source, to show that this
is so.

aot_figures.json keeps figures by a hash of what they come from: the sources and constants of a kernel, options,
architectures and Triton's version. Kernels that it has are not compiled again, but for a cheap one on
each architecture.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

# else LLVM IR names its source files, and Triton's cache may hold that of another checkout
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
import triton
from aot_kernels import (
    CAPABILITIES,
    VARIANTS,
    Variant,
    cache_variants,
    dense_attention_variants,
    indexer_variants,
    paged_attention_variants,
    source,
    step_metadata_variants,
    topk_variants,
    two_cache_variants,
)
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import make_backend

from mla_ops.kernels.triton.common import Constant

# architectures with the same LLVM IR, of kernels without products of e4m3 and with them
FAMILIES = ((80, 86, 89), (90,), (100, 103, 120, 121))
E4M3_FAMILIES = ((80, 86, 89), (90,), (100, 103), (120, 121))
# The machine code of one is that of the other but for some registers: of 189 variants none had another stack, of SM86
# and SM80 95 of 104, and none had more than 48 bytes more. Where SM86 has smaller tiles it is no twin.
TWINS = {86: 80, 89: 86, 103: 100, 121: 120}
# products and maxima of float32 across a warp: what SM100 has and not all of its family have
SM100_ALONE = re.compile(r"tcgen05|redux\.sync\.f")
# stores, products, e4m3, a sort
COMPARED = (cache_variants, dense_attention_variants, indexer_variants, topk_variants)
# SM89 has the tiles and the products of SM80 and the e4m3 of SM120, whose tiles and products are the same
LIKE_SM120 = (paged_attention_variants, two_cache_variants)

# Dispatch gives a GPU of AMD the capability (0, 0), and so the tiles of these variants.
AMD, AMD_CAPABILITY = ("gfx942", "gfx950"), 0
# gfx942 has a variant of each kernel; gfx950, whose matrix products are others, that of sparse attention
PRODUCTS = "_attend_kernel"

# The one function that is called, not inlined, and uses shared memory: its caller has none at that time.
CALLED_ALONE = "_attend_walk"
FUNCTION = re.compile(r"^\.(visible \.entry|func) ", re.MULTILINE)

ALWAYS_COMPILED = ("store_fp8[", "store_plain[")
KEPT = Path(__file__).with_name("aot_figures.json")
FIGURES = ("kernel", "shared", "tensor_memory", "llvm_ir", "registers", "stack")


def cubin_usage(cubin: bytes) -> dict[str, int]:
    """Registers a thread and bytes of stack (spills) of the one kernel in a cubin."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return {"registers": int(registers), "stack": int(stack)}


def machine_code(llvm_ir: str, capability: int, options: dict[str, int]) -> bytes:
    """Machine code for an architecture, from LLVM IR that Triton made for another one of its family."""
    backend, stages, metadata = make_backend(GPUTarget("cuda", capability, 32)), {}, {}
    backend.add_stages(stages, backend.parse_options(dict(options)), Language.TRITON)
    return stages["cubin"](stages["ptx"](llvm_ir, metadata), metadata)


def compile_for_amd(variant: Variant, architecture: str) -> dict[str, Any]:
    target = GPUTarget("hip", architecture, 64)
    metadata = triton.compile(source(variant), target=target, options=variant.options).metadata
    return {"kernel": metadata.name, "shared": metadata.shared}


def check_calls(ptx: str) -> None:
    """Raises if shared memory of a called function may lie over its caller's.

    Triton (3.6, 3.7.1) puts that of any such function at the start, whatever its caller has there.
    """
    _, *parts = FUNCTION.split(ptx)
    for kind, function in zip(parts[::2], parts[1::2], strict=True):
        name, _, body = function.partition("{")
        if kind == "func" and "shared" in body and CALLED_ALONE not in name:
            raise RuntimeError(f"a called function uses shared memory: {name[:200]}")


def compile_variant(variant: Variant, *capabilities: int | str) -> list[dict[str, Any]]:
    """Figures of a variant on architectures of one family, by the LLVM IR of the first; or the error that it raised."""
    results: list[dict[str, Any]] = []
    llvm_ir = ""
    try:
        if capabilities[0] in AMD:
            return [compile_for_amd(variant, architecture) for architecture in capabilities]
        for capability in capabilities:
            if TWINS.get(capability) in capabilities:
                results.append(results[capabilities.index(TWINS[capability])])
                continue
            if not results or SM100_ALONE.search(llvm_ir):
                target = GPUTarget("cuda", capability, 32)
                compiled = triton.compile(source(variant), target=target, options=variant.options)
                check_calls(compiled.asm["ptx"])
                llvm_ir, cubin = compiled.asm["llir"], compiled.asm["cubin"]
            else:
                cubin = machine_code(llvm_ir, capability, variant.options)
            figures = {
                "kernel": compiled.metadata.name,
                "shared": compiled.metadata.shared,
                "tensor_memory": compiled.metadata.tmem_size,
                "llvm_ir": hashlib.sha256(llvm_ir.encode()).hexdigest()[:16],
            }
            results.append(figures | cubin_usage(cubin))
    except Exception as error:  # noqa: BLE001 the test reports it with the variant's name
        return [{"error": f"{type(error).__name__}: {error}"[-2000:]}] * len(capabilities)
    return results


@functools.cache
def set_up_llvm() -> None:
    """Compiles something: it sets LLVM's options, on which machine code depends. Reading Triton's cache does not."""
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.always_compile = True
        compile_variant(next(step_metadata_variants(80)), 80)


class Job(NamedTuple):
    """One variant for architectures of a family that share its LLVM IR.

    Attributes:
        name: of the variant.
        capabilities: those that get machine code of the first one's LLVM IR, or the figures of their twin; of AMD, the
            name of an architecture.
        compared_with: an architecture whose LLVM IR is the same.
    """

    name: str
    capabilities: tuple[int | str, ...]
    compared_with: int | None = None


def jobs(chosen: Container[int]) -> Iterator[Job]:
    for variants in VARIANTS:
        for each in E4M3_FAMILIES if variants is indexer_variants else FAMILIES:
            left_out = 89 if variants in LIKE_SM120 else None
            family = tuple(capability for capability in each if capability in chosen and capability != left_out)
            yield from jobs_of(variants, family)


def jobs_of(variants: Callable[[int], Iterator[Variant]], family: tuple[int, ...]) -> Iterator[Job]:
    if family:
        for number, alike in enumerate(zip(*(list(variants(capability)) for capability in family), strict=True)):
            names = {variant.name for variant in alike}
            assert len(names) == 1, f"architectures of a family have variants in the same order, got {names}"
            for first in range(len(family)):
                if alike[first] in alike[:first]:
                    continue
                same = tuple(c for c, variant in zip(family, alike, strict=True) if variant == alike[first])
                yield Job(*names, same)
                if number == 0 and variants in COMPARED:
                    yield from (Job(*names, (capability,), same[0]) for capability in same[1:])


def amd_jobs() -> Iterator[Job]:
    """The first variant of each kernel."""
    first: dict[str, str] = {}
    for variants in VARIANTS:
        for variant in variants(AMD_CAPABILITY):
            first.setdefault(variant.kernel.__name__, variant.name)
    for kernel, name in first.items():
        yield from (Job(name, (each,)) for each in AMD[: 1 + (kernel == PRODUCTS)])


source_of_class = functools.cache(inspect.getsource)  # which parses the whole file


def constant_classes(value: Any) -> set[type]:
    """The classes of a constant and of its fields."""
    if not isinstance(value, Constant):
        return set()
    return {type(value)}.union(*(constant_classes(field) for field in vars(value).values()))


def key_of(variant: Variant, capabilities: tuple[int | str, ...]) -> str:
    """Triton's hash has the functions that a kernel calls, but not methods of its constants."""
    classes = {kind for value in variant.constants.values() for kind in constant_classes(value)}
    everything = triton.__version__, source(variant).hash(), sorted(variant.options.items()), capabilities
    everything += tuple(sorted(map(source_of_class, classes)))
    return hashlib.sha256(repr(everything).encode()).hexdigest()[:32]


@functools.cache
def kept() -> dict[str, list[dict[str, Any]]]:
    """Figures of each job, by key."""
    return {row["key"]: row["figures"] for row in json.loads(KEPT.read_text())}


@functools.cache
def variants_of(capability: int) -> dict[str, Variant]:
    return {variant.name: variant for variants in VARIANTS for variant in variants(capability)}


def variant_of(job: Job) -> Variant:
    return variants_of(AMD_CAPABILITY if job.capabilities[0] in AMD else job.capabilities[0])[job.name]


def is_always_compiled(job: Job) -> bool:
    """Whether kept figures are checked by this job."""
    return job.name.startswith(ALWAYS_COMPILED) and bool(job.compared_with or job.capabilities[0] in AMD)


def run(job: Job) -> list[dict[str, Any]]:
    variant = variant_of(job)
    known = kept().get(key_of(variant, job.capabilities))
    found = known
    if known is None or is_always_compiled(job):
        set_up_llvm()
        found = compile_variant(variant, *job.capabilities)
        if known not in (None, found):
            found = [{"error": f"kept figures are {known}, those of a compilation {found}"}] * len(found)
    return [
        {"name": job.name, "capability": capability, "compared_with": job.compared_with, **figures}
        for capability, figures in zip(job.capabilities, found, strict=True)
    ]


def write(every: list[Job], found: list[list[dict[str, Any]]]) -> None:
    """A job a line, without those that failed."""
    rows = []
    for job, results in zip(every, found, strict=True):
        figures = [{name: value for name, value in result.items() if name in FIGURES} for result in results]
        if all(figures):
            rows.append({"name": job.name, "key": key_of(variant_of(job), job.capabilities), "figures": figures})
    KEPT.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


def main() -> None:
    writes, amd = sys.argv[1:] == ["--write"], sys.argv[1:] == ["--amd"]
    wanted = sys.argv[1] if len(sys.argv) > 1 and not writes and not amd else ""
    capabilities = [int(c) for c in sys.argv[2:]] or CAPABILITIES
    every = [] if amd else [job for job in jobs(capabilities) if wanted in job.name]
    every, found = every + list(amd_jobs() if amd or writes else ()), []
    with ProcessPoolExecutor(max_workers=2) as pool:
        for results in pool.map(run, every):
            found.append(results)
            for result in results:
                print(json.dumps(result), flush=True)
    if writes:
        write(every, found)


if __name__ == "__main__":
    main()
