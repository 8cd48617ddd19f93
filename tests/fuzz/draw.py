"""Sizes, values and memory layouts of a case, all from one seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from attention_inputs import INT_MAX, INT_MIN

from mla_ops.formats import CACHE_ALIGNMENT, FORMATS

T = TypeVar("T")
GARBAGE = (INT_MIN, INT_MIN + 1, -123456, -1, INT_MAX - 1, INT_MAX)
LARGE = (65537, 2**20 + 1, 2**30, INT_MAX - 1, INT_MAX)
TOKENS = (0, 1, 1, 2, 3, 5, 8, 17, 40)
OUTPUTS = "outputs"  # stands among the names of tensors for the buffers of an `.out` form
# Triton's attention on a Hopper GPU is what compiles most: one call in eight
LOWERINGS = (*["auto"] * 5, "triton", "hopper", "hopper")
# So many seeds share their forms: see `Draw`.
SWARM = 50_000
# The rows of six in which an option is given. For any two options, a row has both, one has neither, and each has a row
# without the other.
GIVEN = tuple(itertools.combinations(range(1, 6), 3))


class Draw:
    """Choices of one case. `torch.manual_seed` is set as well, for helpers that draw from torch's own generator.

    A form is what Triton compiles a kernel for, which takes 3 s: dtypes, tiles, the optional arguments, the pointers
    that are misaligned. So a swarm of neighbouring seeds has few forms of each kind of call, drawn by the swarm's
    number, and the next swarm has others.

    Attributes:
        lowering: what is asked for.
        few_forms: whether this call may have the swarm's forms only; the Hopper kernels are the same for all.
        misaligned: whether some tensors of the call lie at odd elements of their storages.
        odd_pitches: whether their rows do not lie on multiples of 16 bytes either.
        long: whether rows of attention are long, so that they are cut, and shared by their lengths. The interpreter
            would take minutes, and has another case of the seed.
        expands: whether some tensors have one entry in place of many, by a stride of 0.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.lowering = self.pick(*LOWERINGS)
        self.few_forms = self.lowering != "hopper"
        self.misaligned = self.chance(0.25)
        self.odd_pitches = False
        self.expands = self.chance(0.1)
        self.long = self.chance(0.03) and torch.cuda.is_available()
        torch.manual_seed(seed)

    def swarm(self, *kind: object) -> random.Random:
        """Choices that all seeds of a swarm share, for a kind of call."""
        return random.Random(repr((self.seed // SWARM, *kind)))

    def pick(self, *choices: T) -> T:
        return self.rng.choice(choices)

    def any_alignment(self, op: str, names: list[str]) -> list[str]:
        """The tensors of a call that lie at odd elements of their storages, in rows of odd pitches or dense."""
        if not self.misaligned:
            return []
        source = self.swarm(op) if self.few_forms else self.rng
        self.odd_pitches = source.random() < 0.5
        return [source.choice(names)] if source.random() < 0.5 else names

    def options(self, count: int, *kind: object) -> list[bool]:
        """Whether each of `count` optional arguments is given."""
        if not self.few_forms:
            return [self.chance(0.5) for _ in range(count)]
        row = self.swarm(*kind).randrange(6)
        return [row in given for given in GIVEN[:count]]

    def form(self, kind: str, count: int, *choices: T) -> T:
        """Any of the choices, or of the swarm's `count` among them."""
        return self.pick(*(self.swarm(kind).sample(choices, count) if self.few_forms else choices))

    def maybe_none(self, *counts: int) -> int:
        """One of the counts, or now and then 0: a cache without blocks, a table without requests or columns."""
        return 0 if self.chance(0.04) else self.pick(*counts)

    def size(self, *usual: int) -> int:
        """One of these sizes, or one at which 32 bits end."""
        return self.pick(*LARGE) if self.chance(0.06) else self.pick(*usual)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def between(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def tokens(self) -> int:
        return self.pick(*TOKENS)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16, spread: int = 3) -> torch.Tensor:
        """Normal values times a power of two."""
        return (torch.randn(shape) * 2.0 ** self.between(-spread, spread)).to(dtype)

    def special(self, x: torch.Tensor) -> torch.Tensor:
        """Sometimes NaN, infinities, zeros of both signs and denormals among the values."""
        if self.chance(0.3) and x.numel():
            values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e38]).to(x.dtype)
            where = torch.rand(x.shape) < self.pick(0.01, 0.3)
            x = torch.where(where, values[torch.randint(0, len(values), x.shape)], x)
        return x

    def int32(self, low: int, high: int, *shape: int, garbage: float | None = None) -> torch.Tensor:
        """Uniform in `[low, high)`, with a share of numbers that are nothing."""
        values = torch.randint(low, max(high, low + 1), shape, dtype=torch.int32)
        share = self.pick(0.0, 0.0, 0.05, 0.5) if garbage is None else garbage
        wild = torch.tensor(GARBAGE, dtype=torch.int32)[torch.randint(0, len(GARBAGE), shape)]
        return torch.where(torch.rand(shape) < share, wild, values)

    def garbage(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same, in one call of three with one value in ten out of any range."""
        if not self.chance(1 / 3):
            return tensor
        wild = torch.tensor(GARBAGE)[torch.randint(len(GARBAGE), tensor.shape)]
        return torch.where(torch.rand(tensor.shape) < 0.1, wild, tensor).to(tensor.dtype)

    def starts(self, count: int, total: int, *, past: bool = False) -> torch.Tensor:
        """`[count + 1]`, ascending from 0 to at most `total`; with `past`, now and then beyond it."""
        inner = sorted(self.between(0, total) for _ in range(count))
        if past and count and self.chance(0.1):
            inner[-1] = self.pick(total + 1, 2 * total + 100, INT_MAX)
        return torch.tensor([0, *inner], dtype=torch.int32)


def expanded(draw: Draw, tensor: torch.Tensor) -> torch.Tensor:
    """The first entry of a dim but the last in place of all of them, by a stride of 0."""
    dim = draw.between(0, tensor.dim() - 2)
    return tensor.narrow(dim, 0, 1).clone().expand(tensor.shape) if tensor.shape[dim] else tensor


def relaid(draw: Draw, tensor: torch.Tensor, *, odd: bool = False, aligned: bool = False) -> torch.Tensor:
    """The same values elsewhere: at a storage offset, in rows of another pitch, dims in another order in memory.

    Args:
        draw: chooses.
        tensor: any; its last dim stays dense.
        odd: at an odd offset, and pitches as the draw says, else both are multiples of 16 bytes.
        aligned: dims stay in their order, as caches need, too.
    """
    dense = aligned or not odd
    unit = max(CACHE_ALIGNMENT // tensor.element_size(), 1) if dense else 1
    # an odd offset lies on no multiple of 16 bytes, so that it is one kernel
    offset = unit * draw.pick(0, 0, 1, 2, 3, 8) if dense else draw.pick(1, 3, 2 if tensor.element_size() < 8 else 1)
    strides, pitch = [], 1
    for size in reversed(tensor.shape):
        strides.append(pitch)
        pitch *= max(size, 1)
        if len(strides) < tensor.dim() and (draw.chance(0.4) if dense else draw.odd_pitches):
            pitch = -(-pitch // unit) * unit + (unit * draw.pick(0, 1, 3, 16) if dense else pitch % 2 + draw.pick(1, 3))
        if dense:
            pitch = -(-pitch // unit) * unit if len(strides) < tensor.dim() else pitch
    strides.reverse()
    if tensor.dim() == 3 and draw.chance(0.15) and not aligned:  # heads before tokens in memory
        inner = strides[1]
        strides[0], strides[1] = inner, inner * max(tensor.shape[0], 1)
    needed = offset + 1 + sum(max(size - 1, 0) * stride for size, stride in zip(tensor.shape, strides, strict=True))
    storage = torch.full((needed + draw.pick(0, 5),), 7 if tensor.dtype != torch.bool else 1).to(tensor.dtype)
    view = storage.as_strided(tensor.shape, strides, offset)
    view.copy_(tensor)
    return view


def relaid_cache(draw: Draw, cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """A cache in blocks of another pitch; whole rows stay next to each other within a block."""
    if draw.chance(0.5):
        return cache
    unit = CACHE_ALIGNMENT // cache.element_size()
    flat = cache.flatten(1)
    width = -(-flat.shape[1] // unit) * unit + unit * draw.pick(0, 1, 4)
    offset = unit * draw.pick(0, 1, 5)
    storage = torch.full((offset + width * max(cache.shape[0], 1),), 7).to(cache.dtype)
    view = storage.as_strided(cache.shape, (width, *cache.stride()[1:]), offset)
    view.copy_(cache)
    entry = FORMATS[cache_format]
    if entry.planar and cache.dim() == 2 and draw.chance(0.5):
        size, row = entry.block_size(cache.shape[1]), entry.row_widths[0]
        return view.as_strided((cache.shape[0], size, row), (width, row, 1), offset)
    return view


def spoiled(draw: Draw, arguments: dict[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], str]:
    """The arguments with one thing wrong, and what it is."""
    name = draw.pick(*names)
    value = arguments[name]
    if isinstance(value, torch.Tensor):
        dim = draw.between(0, value.dim() - 1)
        kinds = {
            "another dtype": lambda: value.to(draw.pick(torch.int16, torch.float64, torch.bool)),
            "one element less": lambda: value.narrow(dim, 0, max(value.shape[dim] - 1, 0)),
            "one dim more": lambda: value.unsqueeze(0),
            "None": lambda: None,
            "last dim strided": lambda: torch.stack((value, value), dim=-1)[..., 0],
            "a number": lambda: 3,
        }
    elif isinstance(value, bool):
        kinds = {"a string": lambda: "yes"}
    elif isinstance(value, str):
        kinds = {"another format": lambda: draw.pick("fp8", "", "bf16", "fp8_index", "fp8_ds_mla_v4")}
    else:
        # that a length is above 0 only the CPU can say
        zero = () if name.startswith("max_seqlen_") else (0,)
        numbers = (-1, -(2**31), 2**31, 2**40, 2**62, float("nan"), float("inf"), "8", *zero, None)
        kinds = {"another number": lambda: draw.pick(*numbers)}
    kind = draw.pick(*kinds)
    return {**arguments, name: kinds[kind]()}, f"{name}: {kind}"
