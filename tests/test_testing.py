"""The checks of `mla_ops.testing` find what they are for: each is shown an op that is wrong in just that way."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import mla_ops
from mla_ops.testing import Sample, op_names, sample_inputs, tolerances
from mla_ops.testing.checks import (
    check_compiled,
    check_fake,
    check_repeatable,
    clone_sample,
    large_allocations,
    record_calls,
    run_without_recompiling,
)

ROWS = 64


@pytest.fixture(scope="module")
def wrong() -> Iterator[Any]:
    """Ops that break one promise each."""
    library = torch.library.Library("mla_wrong", "FRAGMENT")

    def define(schema: str, real: Any, fake: Any) -> None:
        name = schema.partition("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, real, "CPU")
        torch.library.register_fake(f"mla_wrong::{name}", fake, lib=library)

    def count_calls(cache: torch.Tensor, calls: list[int] = []) -> None:  # noqa: B006  the state is the fault
        calls.append(1)
        cache.fill_(len(calls))

    define("remembers(Tensor(a!) cache) -> ()", count_calls, lambda cache: None)
    define("transposes(Tensor x) -> Tensor", lambda x: x.t().contiguous().t(), torch.empty_like)
    define("writes_unasked(Tensor x) -> Tensor", lambda x: x.add_(1).clone(), torch.empty_like)
    define("reads(Tensor cache) -> Tensor", lambda cache: cache.sum().view(1), lambda cache: cache.new_empty(1))
    define("writes(Tensor(a!) cache, Tensor x) -> ()", lambda cache, x: (cache.add_(x), None)[1], lambda cache, x: None)
    yield torch.ops.mla_wrong
    library._destroy()


def test_a_write_that_depends_on_hidden_state_is_found(wrong: Any) -> None:
    sample = Sample("", (torch.zeros(4),), {}, wrong.remembers.default)
    torch.library.opcheck(sample.op, sample.args)
    with pytest.raises(AssertionError, match=r"cache: .* bytes differ"):
        check_compiled([sample])
    with pytest.raises(AssertionError, match="second call against the first: cache"):
        check_repeatable(sample)


def test_a_fake_with_other_strides_is_found(wrong: Any) -> None:
    with pytest.raises(AssertionError, match=r"fake stride \(3, 1\), real \(1, 2\)"):
        check_fake(Sample("", (torch.zeros(2, 3),), {}, wrong.transposes.default))


def test_an_undeclared_write_is_found(wrong: Any) -> None:
    with pytest.raises(AssertionError, match="an argument that is only read: x"):
        check_repeatable(Sample("", (torch.zeros(2, 3),), {}, wrong.writes_unasked.default))


def test_a_copy_of_a_cache_is_found(wrong: Any) -> None:
    # the reason why readers declare a cache as written: this one does not, and Inductor clones
    def read_write_read(cache: torch.Tensor, x: torch.Tensor) -> Any:
        before = wrong.reads(cache)
        wrong.writes(cache, x)
        # Inductor moves a read next to where its result is used, below the write: that is what makes it clone
        return before * 2 + wrong.reads(cache)

    cache, x = torch.ones(ROWS, 576), torch.ones(1)
    _, codes = run_and_get_code(torch.compile(read_write_read, fullgraph=True), cache, x)
    assert large_allocations(codes, ROWS * 576)
    assert not large_allocations(codes, ROWS * 576 + 1), "a smaller allocation does not count"


def test_a_recompile_is_found() -> None:
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    calls = [(torch.ones(n),) for n in (3, 4)]
    run_without_recompiling(doubled, calls, unbacked=lambda x: [(x, 0)])
    with pytest.raises(Exception, match=r"[Rr]ecompil"):
        run_without_recompiling(doubled, [(torch.ones(n),) for n in (3, 4)], unbacked=lambda x: [])


def test_a_clone_keeps_padding_and_sharing() -> None:
    pool = torch.arange(24.0).view(4, 6)
    sample = clone_sample(Sample("", (pool[1:3, :4], pool[3]), {}, None))
    view, row = sample.args
    assert view.stride() == (6, 1)
    assert view.storage_offset() == 6
    assert view.untyped_storage().data_ptr() == row.untyped_storage().data_ptr()
    view.zero_()
    assert pool[1, 0] == 6


def test_record_calls_sees_the_callers_memory() -> None:
    sample = sample_inputs("concat_and_cache", "cpu")[0]
    with record_calls() as calls:
        sample.op(*sample.args, **sample.kwargs)
    [(op, arguments)] = calls
    assert op == "concat_and_cache"
    assert arguments["kv_cache"].data_ptr() == sample.args[2].data_ptr()


@pytest.mark.parametrize("name", op_names())
def test_samples_are_small(name: str) -> None:
    for sample in sample_inputs(name, "cpu"):
        for value in (*sample.args, *sample.kwargs.values()):
            assert not isinstance(value, torch.Tensor) or value.untyped_storage().nbytes() < 2**18


# Bounds hold for what they bound, and are not so wide that they say nothing.


def attention(q: torch.Tensor, kv: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.einsum("hd,kd->hk", q, kv) * scale
    return torch.einsum("hk,kd->hd", scores.softmax(-1), kv[:, :512]), scores.logsumexp(-1)


@pytest.mark.parametrize("topk", [1, 17, 2048])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_attention_bound_holds_and_is_tight_enough_to_tell_a_lost_key(topk: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(topk)
    q, kv = (torch.randn(n, 576, generator=generator).to(dtype).double() for n in (4, topk))
    scale = 576**-0.5
    out, lse = attention(q, kv, scale)
    score_magnitude = float((q.abs() @ kv.abs().T).max() * scale)
    bound = tolerances.attention_out(dtype, 576, topk, score_magnitude, float(kv.abs().max()))
    lse_bound = tolerances.attention_lse(576, topk, score_magnitude)

    actual, actual_lse = attention(q.float(), kv.float(), scale)
    torch.testing.assert_close(actual.to(dtype).double(), out, rtol=bound.rtol, atol=bound.atol)
    torch.testing.assert_close(actual_lse.double(), lse, rtol=lse_bound.rtol, atol=lse_bound.atol)
    if topk > 1:
        # one key of 17, or one in a hundred, since one of 2048 moves an lse less than float32 can promise
        _, lost_lse = attention(q, kv[: topk - max(1, topk // 100)], scale)
        assert not torch.allclose(lost_lse, lse, rtol=lse_bound.rtol, atol=lse_bound.atol)


def test_bounds_grow_with_length_and_shrink_with_precision() -> None:
    assert tolerances.gamma(100) < tolerances.gamma(1000)
    assert tolerances.unit_roundoff(torch.bfloat16) == 2.0**-8
    assert tolerances.unit_roundoff(torch.float16) == 2.0**-11
    assert tolerances.rounding(torch.float32).rtol < tolerances.rounding(torch.float16).rtol
    with pytest.raises(ValueError, match="no bound"):
        tolerances.gamma(1000, torch.bfloat16)


def test_merge_bound_holds() -> None:
    generator = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn(64, 4, 512, generator=generator) for _ in range(2))
    lse_a, lse_b = (torch.randn(64, 4, generator=generator) * 10 for _ in range(2))
    out, lse = torch.ops.mla.merge_attention_states(out_a, lse_a, out_b, lse_b)
    weights = torch.stack((lse_a, lse_b)).double().softmax(0).unsqueeze(-1)
    bound = tolerances.merge(torch.float32, float(torch.stack((lse_a, lse_b)).abs().max()), float(out_a.abs().max()))
    torch.testing.assert_close(out.double(), weights[0] * out_a + weights[1] * out_b, rtol=bound.rtol, atol=bound.atol)
    assert bound.atol < 1e-4
    assert not lse.isnan().any()


@pytest.mark.parametrize("amax", [1e-6, 0.3, 448.0, 449.0, 3e4])
def test_e4m3_bound_holds_for_a_written_row(amax: float) -> None:
    latent = torch.linspace(-amax, amax, 512).view(1, -1)
    cache = mla_ops.allocate_cache("fp8_ds_mla", 1, 1)
    torch.ops.mla.concat_and_cache(latent, torch.zeros(1, 64), cache, torch.tensor([0]), "fp8_ds_mla")
    arguments = [torch.tensor(values, dtype=torch.int32) for values in ([[0]], [1], [0, 1])]
    row = torch.ops.mla.gather_cache(cache, *arguments, 1, "fp8_ds_mla")[:, :512]
    bound, rounded = tolerances.e4m3(amax), tolerances.rounding(torch.bfloat16)
    torch.testing.assert_close(row.float(), latent, rtol=bound.rtol + rounded.rtol, atol=bound.atol + rounded.atol)
    assert math.isfinite(bound.atol)


@pytest.mark.parametrize("name", ["sparse_atention", "merge_attention_states.in", ""])
def test_an_unknown_op_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match=rf"one of .*gather_cache, gather_cache.out, .*; got '{name}'"):
        sample_inputs(name)
