"""One capture of attention, replayed a thousand times with other lengths, keys and live rows: the bits of eager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from attention_inputs import SCALE, filled_cache, queries

import mla_ops
from mla_ops import dispatch

pytestmark = pytest.mark.gpu

REPLAYS = 1000


@pytest.fixture(params=["triton", "hopper"])
def lowering(request: pytest.FixtureRequest) -> Iterator[str]:
    with dispatch.override(paged_sparse_attention=request.param):
        yield request.param


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(1, 16), (9, 128), (64, 16), (33, 64)])
def test_a_thousand_replays_give_the_bits_of_eager(
    num_tokens: int, num_heads: int, deterministic: bool, lowering: str
) -> None:
    device, topk = torch.device("cuda"), 2048
    cache = filled_cache("fp8_ds_mla", 200, 64, device)
    q = queries(num_tokens, num_heads, torch.bfloat16, device)
    indices = torch.zeros(num_tokens, topk, dtype=torch.int32, device=device)
    lengths = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    options = {"topk_length": lengths, "deterministic": deterministic}

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        return mla_ops.paged_sparse_attention(q, cache, indices, SCALE, "fp8_ds_mla", **options)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    different = torch.zeros((), dtype=torch.int64, device=device)
    attended = torch.zeros((), dtype=torch.int64, device=device)
    for _ in range(REPLAYS):
        lengths.random_(0, topk + 1)
        lengths.masked_fill_(torch.rand(num_tokens, device=device) < 0.2, 0)  # rows of padding
        indices.random_(-2, 200 * 64 + 2)
        q.normal_()
        for tensor in captured:
            tensor.fill_(float("nan"))
        graph.replay()
        for found, expected in zip(captured, step(), strict=True):
            different += (found != expected).sum()
        attended += captured[1].isfinite().sum()
    assert int(different) == 0
    assert int(attended) > REPLAYS * num_tokens * num_heads // 2
