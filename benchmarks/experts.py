"""Benchmark of a mixture of experts in a step: python -m mla_ops bench experts.

`mla_ops.models` runs the experts of a transformers model by torch's grouped matmul. The peers are transformers' own
ways to run the same module, of `config._experts_implementation`: `grouped_mm` and `batched_mm`. `eager` reads on the
host which experts were chosen, so that it cannot be captured; `deepgemm` and `sonicmoe` need kernels that are
downloaded. All are captured, as they come and as `torch.compile` fuses them. The column `peer` is over the fastest of
transformers'.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks import common
from mla_ops.demo.model import build_small_model
from mla_ops.dispatch import Call
from mla_ops.models.experts import mix_grouped

Mix = Callable[[Any, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Size(NamedTuple):
    """Sizes of one layer's experts."""

    num_experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int


SIZES = {
    "V3": Size(256, 8, 7168, 2048),
    "GLM-5": Size(256, 8, 6144, 2048),
    "Kimi K2": Size(384, 8, 7168, 2048),
    "V3 a share of 8": Size(256, 8, 7168, 256),
}
SMALL = {"small": Size(8, 2, 64, 32)}
UNIT = 2.0**-8  # the largest relative error of a rounding to bfloat16


class Inputs(NamedTuple):
    """Inputs of one call: `[num_tokens, hidden_size]`, and experts and weights `[num_tokens, top_k]`."""

    hidden: torch.Tensor
    routing: torch.Tensor
    weights: torch.Tensor


def make_experts(size: Size, generator: torch.Generator) -> Any:
    """The module of transformers, in bfloat16, with values that neither vanish nor grow."""
    with torch.device("meta"):
        model = build_small_model(
            "DeepseekV3",
            num_layers=2,
            hidden_size=size.hidden_size,
            num_heads=1,
            vocab_size=8,
            n_routed_experts=size.num_experts,
            num_experts_per_tok=size.top_k,
            moe_intermediate_size=size.moe_intermediate_size,
        )
    experts = model.model.layers[1].mlp.experts.bfloat16().to_empty(device=generator.device).requires_grad_(False)
    for weight in experts.parameters():
        for one in weight.data:  # normal numbers of all at once would take twice their memory
            one.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    return experts


def make_inputs(size: Size, num_tokens: int, generator: torch.Generator) -> Inputs:
    """Tokens that choose their experts evenly and independently."""

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=generator.device, generator=generator)

    scores, routing = random(num_tokens, size.num_experts).topk(size.top_k, dim=1)
    hidden = torch.randn(num_tokens, size.hidden_size, device=generator.device, generator=generator)
    return Inputs(hidden.bfloat16(), routing, (scores / scores.sum(1, keepdim=True)).bfloat16())


def exact(experts: Any, inputs: Inputs) -> torch.Tensor:
    """Expert by expert, in float64, from the bfloat16 weights."""
    out = torch.zeros_like(inputs.hidden, dtype=torch.float64)
    for expert in inputs.routing.unique().tolist():
        token, place = torch.where(inputs.routing == expert)
        gate, up = (inputs.hidden[token].double() @ experts.gate_up_proj[expert].double().T).chunk(2, dim=1)
        rows = (torch.nn.functional.silu(gate) * up) @ experts.down_proj[expert].double().T
        out.index_add_(0, token, rows * inputs.weights[token, place].double().unsqueeze(1))
    return out


def implementation(name: str) -> Mix:
    """One of transformers' ways to run its module."""

    def mix(experts: Any, hidden: torch.Tensor, routing: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        experts.config._experts_implementation = name
        return experts(hidden, routing, weights)

    return mix


class Layer:
    """One layer's experts with the inputs of a step, and what each way to run them wrote."""

    def __init__(self, size: Size, num_tokens: int, arguments: argparse.Namespace) -> None:
        generator = common.generator(arguments)
        self.experts = make_experts(size, generator)
        self.sets = [make_inputs(size, num_tokens, generator) for _ in range(common.number_of_sets(arguments))]
        self.expected = exact(self.experts, self.sets[0])

    def peer(self, mix: Mix, count: int, *, compiled: bool = False, ours: bool = False) -> common.Peer:
        """One way to run it, over the first `count` sets."""
        sets = self.sets[:count]
        outputs = [torch.empty_like(inputs.hidden) for inputs in sets]

        def run(out: torch.Tensor, inputs: Inputs) -> None:
            out.copy_(mix(self.experts, *inputs))

        def check() -> list[common.Check]:
            error = float((outputs[0] - self.expected).norm() / self.expected.norm())
            # gate, up, the activation, their product, the second product, the factor, a partial sum and the sum: a walk
            return [common.Check("out, relative", error, UNIT * 8**0.5)]

        if compiled:
            torch._dynamo.reset()  # a graph of its own
            run = torch.compile(run, fullgraph=True, dynamic=False)
        runs = [partial(run, out, inputs) for out, inputs in zip(outputs, sets, strict=True)]
        return common.Peer(runs, check, poison=partial(outputs[0].fill_, torch.nan), ours=ours)


def build_case(name: str, size: Size, num_tokens: int, arguments: argparse.Namespace) -> common.Case:
    layer = Layer(size, num_tokens, arguments)
    peers = {}
    for compiled in (False, True) if num_tokens in arguments.compiled else (False,):
        suffix, sets = ", compiled" * compiled, len(layer.sets)
        peers["mix_grouped" + suffix] = layer.peer(mix_grouped, sets, compiled=compiled, ours=True)
        peers["grouped_mm" + suffix] = layer.peer(implementation("grouped_mm"), sets, compiled=compiled)
        # it copies the weights of each token's experts
        copied = 2 * num_tokens * size.top_k * 3 * size.hidden_size * size.moe_intermediate_size
        sets = sets if copied * sets <= 2**35 else int(copied <= 2**36 and not compiled)
        if sets:
            peers["batched_mm" + suffix] = layer.peer(implementation("batched_mm"), sets, compiled=compiled)
    chosen = layer.sets[0].routing.unique().numel()
    row_elements = 3 * size.hidden_size * size.moe_intermediate_size
    return common.Case(
        Call("experts", torch.device(arguments.device), torch.bfloat16, num_tokens=num_tokens),
        {"layer": name, "T": num_tokens, "chosen": f"{chosen} of {size.num_experts}"},
        [],
        lambda: None,
        list,
        2 * chosen * row_elements,
        2 * num_tokens * size.top_k * row_elements,
        peers=peers,
        against_fastest=True,
    )


def main(argv: list[str] | None = None) -> int:
    """Runs the benchmark; returns the exit status."""
    parser = common.argument_parser("experts")
    parser.add_argument("--layers", type=common.names, default=None, help=f"of {', '.join(SIZES)}")
    parser.add_argument("--tokens", type=common.integers, default=None)
    parser.add_argument(
        "--compiled", type=common.integers, default=[], help="of these tokens, also as torch.compile fuses it"
    )
    arguments = parser.parse_args(argv)
    arguments.lowerings = []  # none of our operators runs here
    on_gpu = arguments.device.startswith("cuda") and not arguments.quick
    sizes = SIZES if on_gpu else SMALL
    layers = arguments.layers or (["V3"] if on_gpu else list(sizes))
    if not set(layers) <= set(sizes):
        parser.error(f"--layers must be of {', '.join(sizes)}, got {', '.join(layers)}")
    tokens = arguments.tokens or ([1, 8, 64, 512] if on_gpu else [1, 7])
    cases = (partial(build_case, name, sizes[name], count, arguments) for name in layers for count in tokens)
    return common.run_benchmark("experts", cases, arguments)


if __name__ == "__main__":
    sys.exit(main())
