"""The Hopper kernels give a deterministic call the same bits on every GPU, and a row the same bits in every batch.

`hopper_bits.json` has hashes of results for inputs that are made of integers on the CPU, so that every machine has the
same ones. They are of one version of NVRTC, which may change how a kernel rounds. On a GPU,
`python tests/test_hopper_bits_gpu.py --write` writes those of the version that is there; run the tests on another kind
of GPU then.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mla_ops
from mla_ops import dispatch
from mla_ops.formats import allocate_cache, planar_views
from mla_ops.kernels.cuda import compiler

pytestmark = pytest.mark.gpu

FILE = Path(__file__).with_name("hopper_bits.json")
NUM_TOKENS, NUM_SLOTS = 512, 40 * 64
SCALE = 576**-0.5
OPS = "paged_sparse_attention", "sparse_attention", "paged_attention", "prefill_attention"

Results = tuple[torch.Tensor, torch.Tensor]
# attention for some rows of a batch, in which the others' queries are as they are or NaN
Attention = Callable[[torch.Tensor, torch.Tensor | None], Results]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs SM90")


def integers(seed: int, *size: int) -> torch.Tensor:
    """From 0 to 2**32 - 1, on the CPU."""
    x = torch.arange(torch.Size(size).numel(), dtype=torch.int64) * 2654435761 + seed * 40503
    for shift, factor in ((16, 0x45D9F3B), (15, 0x2C1B3C6D), (13, 0x297A2D39)):
        x &= 0xFFFFFFFF
        x = (x ^ x >> shift) * factor
    return (x & 0xFFFFFFFF).view(size)


def normal(seed: int, *size: int) -> torch.Tensor:
    """About so, in float32, of variance 1."""
    x = integers(seed, *size)
    return sum((x >> 8 * byte & 255) - 127.5 for byte in range(4)).mul(2.0**-7).float()


def some_queries(num_heads: int, width: int) -> torch.Tensor:
    """Queries of all tokens, some of which have the same."""
    few = normal(2, 32, num_heads, width).bfloat16()
    return few[torch.arange(NUM_TOKENS) * 7 % 31].cuda()


def chosen_rows(values: torch.Tensor, rows: torch.Tensor, sound: torch.Tensor | None) -> torch.Tensor:
    """Rows of a batch; NaN in those that are not `sound`."""
    chosen = values[rows]
    if sound is not None:
        chosen[~sound] = math.nan
    return chosen


def cache_of(cache_format: str, width: int, num_blocks: int, block_size: int, seed: int) -> torch.Tensor:
    size = num_blocks, block_size
    values = normal(seed, *size, 576)
    latents = values[..., :512].mul(64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    rope = values[..., 512:].bfloat16().view(torch.uint8)
    if cache_format == "fp8_ds_mla_v4":
        cache = allocate_cache(cache_format, num_blocks, block_size)
        data, scales = planar_views(cache, cache_format)
        data[..., :448], data[..., 448:] = latents[..., :448], rope
        scales[..., :7] = (120 + integers(seed + 1, *size, 7) % 4).to(torch.uint8)
    elif cache_format == "fp8_ds_mla":
        scales = (8 + integers(seed + 1, *size, 4) % 16).float() / 512
        cache = torch.cat([latents, scales.view(torch.uint8), rope], dim=-1)
    else:
        cache = values[..., :width].bfloat16()
    return cache.cuda()


def indices_of(seed: int, topk: int, num_slots: int) -> torch.Tensor:
    """A sixteenth of them invalid."""
    found = integers(seed, NUM_TOKENS, topk) % (num_slots * 17 // 16)
    return torch.where(found < num_slots, found, -1).to(torch.int32).cuda()


def lengths_of(seed: int, topk: int) -> torch.Tensor:
    lengths = integers(seed, NUM_TOKENS) % (topk + 1)
    lengths[::3], lengths[1] = topk, 0
    return lengths.to(torch.int32).cuda()


def paged(cache_format: str, width: int, num_heads: int, topk: int) -> Attention:
    cache = cache_of(cache_format, width, 40, 64, 1)
    q = some_queries(num_heads, width)
    indices, lengths, sink = indices_of(3, topk, NUM_SLOTS), lengths_of(4, topk), normal(5, num_heads).cuda()

    def attend(rows: torch.Tensor, sound: torch.Tensor | None = None) -> Results:
        given: dict[str, Any] = {"topk_length": lengths[rows], "attn_sink": sink, "deterministic": True}
        return mla_ops.paged_sparse_attention(
            chosen_rows(q, rows, sound), cache, indices[rows], SCALE, cache_format, **given
        )

    return attend


def two_caches(num_heads: int, topk: int, extra_topk: int) -> Attention:
    name, width = "fp8_ds_mla_v4", 512
    cache, extra_cache = cache_of(name, width, 40, 64, 1), cache_of(name, width, 300, 2, 6)
    q = some_queries(num_heads, width)
    indices, extra = indices_of(3, topk, NUM_SLOTS), indices_of(7, extra_topk, 600)
    lengths, extra_lengths = lengths_of(4, topk), lengths_of(8, extra_topk)

    def attend(rows: torch.Tensor, sound: torch.Tensor | None = None) -> Results:
        given: dict[str, Any] = {"topk_length": lengths[rows], "extra_topk_length": extra_lengths[rows]}
        given |= {"extra_kv_cache": extra_cache, "extra_indices": extra[rows], "deterministic": True}
        return mla_ops.paged_sparse_attention(chosen_rows(q, rows, sound), cache, indices[rows], SCALE, name, **given)

    return attend


def flat(width: int, num_heads: int, topk: int) -> Attention:
    kv = normal(1, NUM_SLOTS, width).bfloat16().cuda()
    q = some_queries(num_heads, width)
    indices, lengths = indices_of(3, topk, NUM_SLOTS), lengths_of(4, topk)

    def attend(rows: torch.Tensor, sound: torch.Tensor | None = None) -> Results:
        given: dict[str, Any] = {"topk_length": lengths[rows], "deterministic": True}
        return mla_ops.sparse_attention(chosen_rows(q, rows, sound), kv, indices[rows], SCALE, **given)

    return attend


def dense(cache_format: str, num_heads: int, num_blocks: int) -> Attention:
    """A row alone, of all there are, has a wider table."""
    cache = cache_of(cache_format, 576, 40, 64, 1)
    q = some_queries(num_heads, 576)
    table = (integers(3, NUM_TOKENS, 2 * num_blocks) % 40).to(torch.int32).cuda()
    lengths = lengths_of(4, num_blocks * 64)

    def attend(rows: torch.Tensor, sound: torch.Tensor | None = None) -> Results:
        given = table[rows, : num_blocks * (2 if len(rows) == 1 else 1)], torch.arange(len(rows), device="cuda").int()
        given = *given, lengths[rows], SCALE, cache_format
        return mla_ops.paged_attention(chosen_rows(q, rows, sound), cache, *given, deterministic=True)

    return attend


def prefill(num_heads: int, length: int) -> Attention:
    """Rows are requests of `length` tokens, behind a context."""
    context, width, width_v = 70, 192, 128
    few, sizes = 32, ((1, length, width), (2, length + context, width), (3, length + context, width_v))
    tensors = (normal(seed, few, rows, num_heads, dims) for seed, rows, dims in sizes)
    q, k, v = (tensor.bfloat16()[torch.arange(NUM_TOKENS) * 7 % 31].cuda() for tensor in tensors)

    def attend(rows: torch.Tensor, sound: torch.Tensor | None = None) -> Results:
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device="cuda")
        given = (chosen_rows(each, rows, sound).flatten(0, 1) for each in (q, k, v))
        cuts = starts * length, starts * (length + context)
        out, lse = mla_ops.prefill_attention(*given, *cuts, length, length + context, width**-0.5, causal=True)
        return out.view(len(rows), -1), lse.view(len(rows), -1)

    return attend


CASES: dict[str, Callable[[], Attention]] = {
    "fp8_ds_mla, 16 heads": lambda: paged("fp8_ds_mla", 576, 16, 2048),
    "fp8_ds_mla, 30 heads": lambda: paged("fp8_ds_mla", 576, 30, 2048),
    "fp8_ds_mla, 64 heads": lambda: paged("fp8_ds_mla", 576, 64, 2048),
    "fp8_ds_mla, 128 heads": lambda: paged("fp8_ds_mla", 576, 128, 2048),
    "fp8_ds_mla, 128 heads, 500 keys": lambda: paged("fp8_ds_mla", 576, 128, 500),
    "fp8_ds_mla_v4, two caches, 16 heads": lambda: two_caches(16, 512, 1000),
    "fp8_ds_mla_v4, two caches, 128 heads": lambda: two_caches(128, 128, 2000),
    "bf16, 16 heads": lambda: paged("bf16", 576, 16, 2048),
    "bf16, 32 heads": lambda: paged("bf16", 576, 32, 2048),
    "bf16, 512 dims, 128 heads": lambda: paged("bf16", 512, 128, 2048),
    "flat, 64 heads": lambda: flat(576, 64, 2048),
    "dense, fp8_ds_mla, 16 heads": lambda: dense("fp8_ds_mla", 16, 70),
    "dense, fp8_ds_mla, 128 heads": lambda: dense("fp8_ds_mla", 128, 30),
    "dense, bf16, 128 heads": lambda: dense("bf16", 128, 30),
    "prefill, requests of 3": lambda: prefill(16, 3),
    "prefill, requests of 200": lambda: prefill(4, 200),
}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().cpu().view(torch.uint8)


def results_of(case: str) -> tuple[Attention, Results]:
    attend = CASES[case]()
    return attend, attend(torch.arange(NUM_TOKENS, device="cuda"), None)


def hash_of(results: Results) -> str:
    return hashlib.sha256(b"".join(bits(each).numpy().tobytes() for each in results)).hexdigest()


def version() -> str:
    return ".".join(map(str, compiler.version()))


@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_other_gpus_and_of_other_batches(case: str) -> None:
    """A row has its bits among 0 to 511 others, at any place, and among rows of NaN."""
    known: dict[str, dict[str, str]] = json.loads(FILE.read_text())
    with dispatch.override(**dict.fromkeys(OPS, "hopper")):
        attend, whole = results_of(case)
        everything = list(range(NUM_TOKENS))
        some = everything[3:11], everything[100:36:-1], everything[7:135], everything[300:44:-1], everything[::-1]
        for rows in ([0], [511, 1, 0], *some):
            chosen = torch.tensor(rows, device="cuda")
            for spoils in (False, True):
                sound = torch.arange(len(rows), device="cuda") % 5 == 0 if spoils else None
                for found, wanted in zip(attend(chosen, sound), whole, strict=True):
                    here = slice(None, None, 5 if spoils else 1)
                    assert torch.equal(bits(found[here]), bits(wanted[chosen[here]])), f"{len(rows)} rows"
    assert whole[0].isfinite().all()
    if version() not in known:
        pytest.skip(f"hopper_bits.json has no hashes of NVRTC {version()}")
    assert hash_of(whole) == known[version()][case]


def main(arguments: list[str]) -> None:
    found = {}
    with dispatch.override(**dict.fromkeys(OPS, "hopper")):
        for case in CASES:
            found[case] = hash_of(results_of(case)[1])
    if arguments == ["--write"]:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        FILE.write_text(json.dumps({**known, version(): found}, indent=2) + "\n")
    sys.stdout.write(f"{torch.cuda.get_device_name(0)}, NVRTC {version()}\n{json.dumps(found, indent=2)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
