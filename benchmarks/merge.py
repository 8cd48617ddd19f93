"""Benchmark of `merge_attention_states`, of two parts and of more: python -m mla_ops bench merge."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import common
from mla_ops.registry import describe


def build_case(
    num_parts: int, num_tokens: int, num_heads: int, head_dim_v: int, arguments: argparse.Namespace
) -> common.Case:
    generator = common.generator(arguments)
    device = torch.device(arguments.device)

    def states() -> tuple[torch.Tensor, torch.Tensor]:
        shape = num_parts, num_tokens, num_heads
        outs = torch.randn(*shape, head_dim_v, device=device, generator=generator).to(torch.bfloat16)
        return outs, torch.randn(*shape, device=device, generator=generator)

    sets = [states() for _ in range(common.number_of_sets(arguments))]
    outputs = [(torch.empty_like(outs[0]), torch.empty_like(lses[0])) for outs, lses in sets]

    def pairs(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return outs[0], lses[0], outs[1], lses[1]

    op = torch.ops.mla.merge_attention_states
    runs = [
        partial(op.out, *pairs(*states), out=out, lse=lse)
        if num_parts == 2
        else partial(op.stacked_out, *states, out=out, lse=lse)
        for states, (out, lse) in zip(sets, outputs, strict=True)
    ]

    def poison() -> None:
        for tensor in outputs[0]:
            tensor.fill_(torch.nan)

    def check() -> list[common.Check]:
        outs, lses = (tensor.double() for tensor in sets[0])
        lse = torch.logsumexp(lses, dim=0)
        out = (outs * (lses - lse).exp().unsqueeze(-1)).sum(0)
        # one rounding to bfloat16; lse is a few float32 operations a part
        return [
            common.Check("out", common.max_error(outputs[0][0], out), 2**-8 * float(out.abs().max())),
            common.Check("lse", common.max_error(outputs[0][1], lse), num_parts * 2**-22 * float(lse.abs().max() + 1)),
        ]

    rows = num_tokens * num_heads
    shape: dict[str, int | str] = {"parts": num_parts, "T": num_tokens, "H": num_heads, "d": head_dim_v}
    call = (
        describe("merge_attention_states", *pairs(*sets[0]))
        if num_parts == 2
        else describe("merge_attention_states.stacked", *sets[0])
    )
    bytes_moved = (num_parts + 1) * rows * (2 * head_dim_v + 4)
    return common.Case(call, shape, runs, poison, check, bytes_moved=bytes_moved)


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("merge")
    parser.add_argument("--parts", type=common.integers, default=[2, 4])
    parser.add_argument("--tokens", type=common.integers, default=None)
    parser.add_argument("--heads", type=common.integers, default=None)
    parser.add_argument("--head-dims", type=common.integers, default=None)
    arguments = parser.parse_args(argv)
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    tokens = arguments.tokens or ([1, 32, 256, 4096] if on_gpu else [1, 16])
    heads = arguments.heads or ([16, 128] if on_gpu else [16])
    head_dims = arguments.head_dims or ([128, 512] if on_gpu else [128])

    def cases() -> Iterator[partial[common.Case]]:
        for num_parts in arguments.parts:
            for head_dim_v in head_dims:
                for num_heads in heads:
                    for num_tokens in tokens:
                        yield partial(build_case, num_parts, num_tokens, num_heads, head_dim_v, arguments)

    return common.run_benchmark("merge", cases(), arguments)


if __name__ == "__main__":
    sys.exit(main())
