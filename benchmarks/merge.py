"""Benchmark of `merge_attention_states`: python -m mla_ops bench merge."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops.meta.merge import describe_merge

HEAD_DIM_V = 512


def build_case(num_tokens: int, num_heads: int, arguments: argparse.Namespace) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)

    def state() -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.randn(num_tokens, num_heads, HEAD_DIM_V, device=device, generator=generator).to(torch.bfloat16)
        lse = torch.randn(num_tokens, num_heads, device=device, generator=generator)
        return out, lse

    sets = [(*state(), *state()) for _ in range(common.number_of_sets(arguments))]
    outputs = [(torch.empty_like(out), torch.empty_like(lse)) for out, lse, _, _ in sets]
    runs = [
        partial(torch.ops.mla.merge_attention_states.out, *inputs, out=out, lse=lse)
        for inputs, (out, lse) in zip(sets, outputs, strict=True)
    ]

    def poison() -> None:
        for tensor in outputs[0]:
            tensor.fill_(torch.nan)

    def check() -> list[common.Check]:
        out_a, lse_a, out_b, lse_b = (tensor.double() for tensor in sets[0])
        lse = torch.logaddexp(lse_a, lse_b)
        out = out_a * (lse_a - lse).exp().unsqueeze(-1) + out_b * (lse_b - lse).exp().unsqueeze(-1)
        # one rounding to bfloat16; lse is a few float32 operations
        return [
            common.Check("out", common.max_error(outputs[0][0], out), 2**-8 * float(out.abs().max())),
            common.Check("lse", common.max_error(outputs[0][1], lse), 2**-21 * float(lse.abs().max() + 1)),
        ]

    rows = num_tokens * num_heads
    shape: dict[str, int | str] = {"T": num_tokens, "H": num_heads}
    return common.Case(
        describe_merge(*sets[0]), shape, runs, poison, check, bytes_moved=3 * rows * (2 * HEAD_DIM_V + 4)
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("merge")
    parser.add_argument("--tokens", type=common.integers, default=None)
    parser.add_argument("--heads", type=common.integers, default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 32, 256, 4096] if on_gpu else [1, 16])
    heads = arguments.heads or ([16, 128] if on_gpu else [16])

    def cases() -> Iterator[partial[common.Case]]:
        for num_tokens in tokens:
            for num_heads in heads:
                yield partial(build_case, num_tokens, num_heads, arguments)

    return common.run_benchmark("merge", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
