"""Division by a number that a program knows once, as the portable kernels locate keys in blocks."""

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl

from mla_ops.kernels.triton.sparse_attention_keys import divider, quotient


@triton.jit
def _divide_kernel(x, out, divisor: tl.int32, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(out + places, quotient(tl.load(x + places), divider(divisor)))


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 63, 64, 65, 641, 2**20 - 1, 2**24 + 1, 2**30 + 1, 2**31 - 1])
def test_quotients_of_all_sizes(device: torch.device, divisor: int) -> None:
    multiples = torch.arange(-3, 4) * divisor + (2**31 - 1) // divisor * divisor
    edges = torch.cat([torch.arange(64), multiples, multiples - 1, torch.tensor([2**31 - 1, 2**30, 2**24 + 1])])
    x = torch.cat([edges, torch.randint(0, 2**31 - 1, (1024,))])[:1024].clamp(0, 2**31 - 1).to(torch.int32).to(device)
    out = torch.empty_like(x)
    _divide_kernel[(1,)](x, out, divisor, SIZE=1024)
    assert torch.equal(out, x // divisor)
