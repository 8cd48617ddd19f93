"""The tiles that the portable attention kernels could take on an architecture, and what the compiler says of each.

Needs no GPU. Prints Markdown; the tile that the library chooses is in bold. `docs/results/tiles.md` holds its output.

    python tests/aot_tiles.py [compute capabilities]
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
import triton
from aot_jobs import compile_variant
from aot_kernels import Variant, dense_attention_variants, sparse_attention_variants

from mla_ops.kernels.triton import sparse_attention

CAPABILITIES = (80, 120)
REGISTERS_PER_SM = 64 * 1024
REGISTER_UNIT = 256  # registers are given to a warp in this many
SHARED_PER_SM = {80: 164 * 1024, 89: 100 * 1024, 90: 228 * 1024, 120: 100 * 1024}
SHARED_PER_PROGRAM = 1024  # bytes of each block's shared memory that the system takes
THREADS_PER_SM = {80: 2048, 89: 1536, 90: 2048, 120: 1536}
# each kernel, and the name of its variant in `aot_kernels.py`
SPARSE = {
    "fp8_ds_mla": "attend[fp8_ds_mla, q bf16, 576, 16 heads, slots]",
    "fp8_ds_mla_v4": "attend[fp8_ds_mla_v4, q bf16, 512, 16 heads, slots]",
    "bf16": "attend[bf16, q bf16, 576, 16 heads, slots]",
}
# heads, keys, warps
SPARSE_TILES = ((16, 32, 4), (16, 32, 8), (16, 64, 4), (16, 64, 8), (32, 32, 4), (32, 32, 8), (32, 64, 8), (64, 32, 8))
PREFILL = ("prefill[bf16, 192/128, causal]", "prefill[bf16, 256/256, causal]")
LEGEND = """Compiled, not measured. Rows are heads (the caches' formats) or queries (prefill, head dims of
keys / values); the tile that the library chooses is in bold. Stages are tiles of keys that are on their way or in use.
Programs an SM: by shared memory, registers and threads, 0 where it does not fit."""
HEADER = "| kernel | tile | warps | stages | shared, bytes | registers | stack, bytes | programs an SM |"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One tile of one kernel: rows are heads (sparse) or queries (prefill)."""

    kernel: str
    rows: int
    keys: int
    chosen: bool
    variant: Variant


def sparse_candidates(capability: int) -> Iterator[Candidate]:
    variants = {variant.name: variant for variant in sparse_attention_variants(capability)}
    for (kernel, name), (rows, keys, warps), ahead in itertools.product(SPARSE.items(), SPARSE_TILES, (1, 2)):
        own = variants[name]
        mode = sparse_attention.operand_mode(torch.bfloat16, kernel)
        half = mode == "fp8" and rows == 32
        apart = half or (mode == "plain" and (rows, keys) == (32, 32))
        tile = sparse_attention.Tile(rows, keys, warps, ahead, half=half, apart=apart, early=half)
        options = own.constants["OPTIONS"]
        operands = options.keys.with_operands("fp8_half" if half else mode)
        looks = sparse_attention.looks_at_indices(operands, tile, partial=False, has_length=False)
        steady = sparse_attention.is_steady(tile, operands, torch.bfloat16, 2048, 1)
        device = (capability // 10, capability % 10)
        chosen = {sparse_attention.tile(device, heads, mode) for heads in (16, 128)}
        variant = dataclasses.replace(
            own,
            constants={"OPTIONS": dataclasses.replace(options, tile=tile, keys=operands, looks=looks, steady=steady)},
            options={"num_warps": warps, "num_stages": ahead + 1},
        )
        yield Candidate(kernel, rows, keys, tile in chosen, variant)


def prefill_candidates(capability: int) -> Iterator[Candidate]:
    variants = {variant.name: variant for variant in dense_attention_variants(capability)}
    for name, rows, keys, stages in itertools.product(PREFILL, (64, 128), (32, 64), (2, 3)):
        own = variants[name]
        options = own.constants["OPTIONS"]
        present = (options.block_m, options.block_n, own.options["num_stages"])
        constants = {"OPTIONS": dataclasses.replace(options, block_m=rows, block_n=keys)}
        variant = dataclasses.replace(own, constants=constants, options={"num_warps": 8, "num_stages": stages})
        yield Candidate(name.split(", ", 1)[1][:7], rows, keys, (rows, keys, stages) == present, variant)


def programs_per_sm(capability: int, shared: int, registers: int, warps: int) -> int:
    """Programs that fit beside one another on an SM; 0 where one alone asks for more than there is."""
    registers_per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    return min(
        SHARED_PER_SM[capability] // (shared + SHARED_PER_PROGRAM),
        REGISTERS_PER_SM // (registers_per_warp * warps),
        THREADS_PER_SM[capability] // (32 * warps),
    )


def row(job: tuple[int, int]) -> str:
    """One line of the table: the candidate with this number on this architecture."""
    capability, number = job
    candidate = candidates(capability)[number]
    options = candidate.variant.options
    (found,) = compile_variant(candidate.variant, capability)
    tile = f"{candidate.rows} x {candidate.keys}"
    cells: list[Any] = [candidate.kernel, f"**{tile}**" if candidate.chosen else tile]
    cells += [options["num_warps"], options["num_stages"]]
    if "error" in found:
        cells += ["does not compile: " + found["error"].splitlines()[-1][:80], "", "", 0]
    else:
        cells += [found["shared"], found["registers"], found["stack"]]
        cells.append(programs_per_sm(capability, found["shared"], found["registers"], options["num_warps"]))
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def candidates(capability: int) -> list[Candidate]:
    return [*sparse_candidates(capability), *prefill_candidates(capability)]


def main() -> None:
    chosen = [int(argument) for argument in sys.argv[1:]] or CAPABILITIES
    print(f"# Tiles of the portable attention kernels\n\nTriton {triton.__version__}. {LEGEND}")
    with ProcessPoolExecutor(max_workers=2) as pool:
        for capability in chosen:
            print(f"\n## SM{capability}\n\n{HEADER}\n|{'---|' * HEADER.count(' | ')}---|")
            for line in pool.map(row, [(capability, number) for number in range(len(candidates(capability)))]):
                print(line, flush=True)


if __name__ == "__main__":
    main()
