"""The compressor beside float64: requests with their states and caches, and the entries of whole sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

import mla_ops
from mla_ops.formats import allocate_cache
from mla_ops.kernels.reference.cache import read_slots
from mla_ops.testing import tolerances

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6


@dataclass(frozen=True)
class Geometry:
    """ratio, series a token has, channels of an entry."""

    ratio: int
    series: int
    head_dim: int

    @property
    def width(self) -> int:
        return self.series * self.head_dim

    @property
    def window(self) -> int:
        return self.ratio * self.series


CSA, HCA, INDEXER = Geometry(4, 2, 512), Geometry(128, 1, 512), Geometry(4, 2, 128)
ODD, LONG_OVERLAP = Geometry(3, 1, 128), Geometry(6, 2, 128)


@dataclass
class Weights:
    """A layer's weights, and angles that no pair shares."""

    geometry: Geometry
    device: str | torch.device = DEVICE
    max_positions: int = 700
    bias: torch.Tensor = field(init=False)
    norm: torch.Tensor = field(init=False)
    cos_sin: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        shape = self.geometry.ratio, self.geometry.width
        self.bias = torch.randn(*shape, device=self.device)
        self.norm = 1 + 0.2 * torch.randn(self.geometry.head_dim, device=self.device)
        angles = torch.arange(self.max_positions).unsqueeze(1) * 0.9 ** torch.arange(32)
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(self.device)


class Engine:
    """Requests with states and entries in caches of their own blocks, as an engine would keep them."""

    def __init__(
        self,
        weights: Weights,
        num_requests: int,
        max_entries: int,
        *,
        cache_format: str = "fp32",
        state_blocks: int = 2,
        state_block_size: int | None = None,
    ) -> None:
        geometry, device = weights.geometry, weights.device
        self.weights, self.cache_format, self.max_entries = weights, cache_format, max_entries
        block_size = state_block_size or -(-geometry.window // state_blocks)
        blocks = torch.randperm(num_requests * state_blocks)
        self.table = blocks.to(torch.int32).view(num_requests, state_blocks).to(device)
        # states that nobody wrote are NaN, since nobody may read them
        self.states = torch.full((len(blocks) + 1, block_size, 2 * geometry.width), math.nan, device=device)
        head_dim = geometry.head_dim
        self.cache = allocate_cache(cache_format, num_requests, max_entries, head_dim=head_dim, device=device)

    def step(self, kv: torch.Tensor, score: torch.Tensor, requests: list[int], positions: list[int]) -> None:
        """One call: rows of `kv` and `score` belong to these requests and positions; request -1 is padding."""
        ratio, device = self.weights.geometry.ratio, self.weights.device
        slots = [
            request * self.max_entries + position // ratio if request >= 0 and (position + 1) % ratio == 0 else -1
            for request, position in zip(requests, positions, strict=True)
        ]
        mla_ops.compress_and_cache(
            kv,
            score,
            self.weights.bias,
            self.weights.norm,
            self.weights.cos_sin,
            self.states,
            self.cache,
            self.table,
            torch.tensor(requests, dtype=torch.int32, device=device),
            torch.tensor(positions, dtype=torch.int32, device=device),
            torch.tensor(slots, dtype=torch.int64, device=device),
            EPS,
            self.cache_format,
        )

    def entries(self, request: int, count: int) -> torch.Tensor:
        slots = request * self.max_entries + torch.arange(count, device=self.cache.device)
        return read_slots(self.cache, slots, self.cache_format)


def history(geometry: Geometry, length: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    kv = torch.randn(length, geometry.width, device=DEVICE).to(dtype)
    return kv, (2 * torch.randn(length, geometry.width, device=DEVICE)).to(dtype)


def oracle(weights: Weights, kv: torch.Tensor, score: torch.Tensor) -> tuple[torch.Tensor, dict[str, float], float]:
    """Entries of one request's whole history, in float64, one group and one state at a time; and their magnitudes.

    The last number is how far, at least, the pooled row would move if a state were left out, in units of its root mean
    square.
    """
    geometry = weights.geometry
    ratio, dim = geometry.ratio, geometry.head_dim
    bias, norm, table = (t.double().cpu() for t in (weights.bias, weights.norm, weights.cos_sin))
    kv, score = kv.double().cpu(), score.double().cpu()
    biased = score + bias.repeat(len(kv) // ratio + 1, 1)[: len(kv)]
    entries, smallest_rms, entry_magnitude, value_magnitude, one_state = [], math.inf, 0.0, 0.0, math.inf
    for group in range(len(kv) // ratio):
        members = []
        for series in range(geometry.series):
            # the last series is the group's own tokens, the one before it the group before's
            first = (group - (geometry.series - 1 - series)) * ratio
            channels = slice(series * dim, (series + 1) * dim)
            members += [(kv[t, channels], biased[t, channels]) for t in range(first, first + ratio) if t >= 0]
        weight = torch.stack([b for _, b in members]).exp()
        weight /= weight.sum(0)
        keys = torch.stack([k for k, _ in members])
        pooled = (keys * weight).sum(0)
        value_magnitude = max(value_magnitude, float((keys.abs() * weight).sum(0).max()))
        rms = pooled.square().mean().sqrt()
        without = (pooled - keys) * weight / (1 - weight)
        one_state = min(one_state, float(without.abs().amax(1).min() / rms))
        row = (pooled / (rms**2 + EPS).sqrt() * norm).tolist()
        entry_magnitude = max(entry_magnitude, *map(abs, row))
        smallest_rms = min(smallest_rms, float(rms))
        for pair in range(32):
            at = dim - 64 + 2 * pair
            turn = complex(table[group * ratio, pair], table[group * ratio, 32 + pair])
            turned = complex(row[at], row[at + 1]) * turn
            row[at], row[at + 1] = turned.real, turned.imag
        entries.append(torch.tensor(row, dtype=torch.float64))
    magnitudes = {
        "score_magnitude": float(biased.abs().max()),
        "value_magnitude": value_magnitude,
        "smallest_rms": smallest_rms,
        "weight_magnitude": float(norm.abs().max()),
        "entry_magnitude": entry_magnitude,
    }
    return torch.stack(entries), magnitudes, one_state


def assert_equals_oracle(
    found: torch.Tensor, weights: Weights, kv: torch.Tensor, score: torch.Tensor, dtype: torch.dtype = torch.float32
) -> None:
    expected, magnitudes, one_state = oracle(weights, kv, score)
    bound = tolerances.compressed_entry(dtype, weights.geometry.window, weights.geometry.head_dim, **magnitudes)
    assert 10 * bound.atol < one_state, "the bound would hardly see a state left out"
    torch.testing.assert_close(found.double().cpu(), expected, rtol=bound.rtol, atol=bound.atol)
