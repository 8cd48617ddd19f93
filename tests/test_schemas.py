"""The schemas, frozen. A change here is a change of the public contract: saved programs and callers break.

Accept a change with `EXPECTTEST_ACCEPT=1 pytest tests/test_schemas.py`.
"""

from __future__ import annotations

import re
import textwrap

import pytest
import torch

import mla_ops  # noqa: F401  registers the ops
from mla_ops.dispatch import FAMILIES
from mla_ops.testing import functional, op_names, out_overload, output_names
from mla_ops.testing.samples import overload

expecttest = pytest.importorskip("expecttest")


class TestFrozenSchemas(expecttest.TestCase):
    def test_every_schema_is_the_published_one(self) -> None:
        # all of `torch.ops.mla` in one text, so that an op that is added shows up here as well
        schemas = "\n".join(
            textwrap.fill(str(overload(name)._schema), 100, subsequent_indent="    ") for name in op_names()
        )
        self.assertExpectedInline(
            schemas,
            """\
mla::build_compressed_metadata(Tensor positions, Tensor req_id_per_token, Tensor block_table,
    Tensor(a!) block_table_buffer, Tensor(b!) slot_mapping, Tensor(c!) compressed_lens, SymInt
    compress_ratio, SymInt block_size) -> ()
mla::build_step_metadata(Tensor query_start_loc, Tensor seq_lens, Tensor block_table, Tensor(a!)
    query_start_loc_buffer, Tensor(b!) seq_lens_buffer, Tensor(c!) block_table_buffer, Tensor(d!)
    req_id_per_token, Tensor(e!) positions, Tensor(f!) slot_mapping, Tensor(g!) key_lens, Tensor(h!)
    topk_length, SymInt block_size, SymInt index_topk) -> ()
mla::combine_topk_swa_indices(Tensor topk_indices, Tensor positions, Tensor req_id_per_token, Tensor
    seq_lens, Tensor gather_lens, SymInt window, SymInt compress_ratio, SymInt request_stride,
    SymInt window_offset) -> (Tensor, Tensor)
mla::combine_topk_swa_indices.out(Tensor topk_indices, Tensor positions, Tensor req_id_per_token,
    Tensor seq_lens, Tensor gather_lens, SymInt window, SymInt compress_ratio, SymInt
    request_stride, SymInt window_offset, *, Tensor(a!) indices, Tensor(b!) lens) -> ()
mla::compress_and_cache(Tensor kv, Tensor score, Tensor position_bias, Tensor norm_weight, Tensor
    cos_sin, Tensor(a!) state_cache, Tensor(b!) kv_cache, Tensor state_block_table, Tensor
    req_id_per_token, Tensor positions, Tensor slot_mapping, float eps, str cache_format) -> ()
mla::compressed_indices(Tensor positions, Tensor req_id_per_token, Tensor block_table, SymInt
    compress_ratio, SymInt block_size, SymInt width, *, SymInt? num_blocks=None) -> (Tensor, Tensor)
mla::compressed_indices.out(Tensor positions, Tensor req_id_per_token, Tensor block_table, SymInt
    compress_ratio, SymInt block_size, SymInt width, *, SymInt? num_blocks=None, Tensor(a!) indices,
    Tensor(b!) lens) -> ()
mla::compute_global_topk_indices_and_lens(Tensor topk_indices, Tensor req_id_per_token, Tensor
    block_table, SymInt block_size, *, SymInt? num_blocks=None) -> (Tensor, Tensor)
mla::compute_global_topk_indices_and_lens.out(Tensor topk_indices, Tensor req_id_per_token, Tensor
    block_table, SymInt block_size, *, SymInt? num_blocks=None, Tensor(a!) indices, Tensor(b!) lens)
    -> ()
mla::concat_and_cache(Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor slot_mapping, str
    cache_format) -> ()
mla::convert_req_index_to_global_index(Tensor req_id_per_token, Tensor block_table, Tensor
    token_indices, SymInt block_size, *, bool compact=False, SymInt? num_blocks=None) -> (Tensor,
    Tensor)
mla::convert_req_index_to_global_index.out(Tensor req_id_per_token, Tensor block_table, Tensor
    token_indices, SymInt block_size, *, bool compact=False, SymInt? num_blocks=None, Tensor(a!)
    out, Tensor(b!) valid_counts) -> ()
mla::filter_prefill_indices(Tensor indices, Tensor context_lens) -> (Tensor, Tensor)
mla::filter_prefill_indices.out(Tensor indices, Tensor context_lens, *, Tensor(a!) context_indices,
    Tensor(b!) new_indices) -> ()
mla::gather_cache(Tensor(a!) kv_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seq_lens,
    SymInt num_rows, str cache_format, *, Tensor? gather_lens=None, SymInt offset=0) -> Tensor
mla::gather_cache.out(Tensor(a!) kv_cache, Tensor block_table, Tensor seq_lens, Tensor cu_seq_lens,
    SymInt num_rows, str cache_format, *, Tensor? gather_lens=None, SymInt offset=0, Tensor(b!) out)
    -> ()
mla::gather_index_cache(Tensor(a!) index_cache, Tensor block_table, Tensor seq_lens, Tensor
    cu_seq_lens, SymInt num_rows, str cache_format) -> (Tensor, Tensor)
mla::gather_index_cache.out(Tensor(a!) index_cache, Tensor block_table, Tensor seq_lens, Tensor
    cu_seq_lens, SymInt num_rows, str cache_format, *, Tensor(b!) k, Tensor(c!) k_scale) -> ()
mla::indexer_logits(Tensor q, Tensor k, Tensor weights, Tensor row_starts, Tensor row_ends, *,
    Tensor? k_scale=None, bool clean=False) -> Tensor
mla::indexer_logits.out(Tensor q, Tensor k, Tensor weights, Tensor row_starts, Tensor row_ends, *,
    Tensor? k_scale=None, bool clean=False, Tensor(a!) out) -> ()
mla::merge_attention_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor,
    Tensor)
mla::merge_attention_states.out(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, *,
    Tensor(a!) out, Tensor(b!) lse) -> ()
mla::merge_attention_states.stacked(Tensor outs, Tensor lses) -> (Tensor, Tensor)
mla::merge_attention_states.stacked_out(Tensor outs, Tensor lses, *, Tensor(a!) out, Tensor(b!) lse)
    -> ()
mla::merge_topk(Tensor scores, Tensor indices, SymInt topk) -> (Tensor, Tensor)
mla::merge_topk.out(Tensor scores, Tensor indices, SymInt topk, *, Tensor(a!) best_scores,
    Tensor(b!) best_indices) -> ()
mla::paged_attention(Tensor q, Tensor(a!) kv_cache, Tensor block_table, Tensor req_id_per_token,
    Tensor key_lens, float softmax_scale, str cache_format, *, Tensor? q_rope=None, bool
    deterministic=False) -> (Tensor, Tensor)
mla::paged_attention.out(Tensor q, Tensor(a!) kv_cache, Tensor block_table, Tensor req_id_per_token,
    Tensor key_lens, float softmax_scale, str cache_format, *, Tensor? q_rope=None, bool
    deterministic=False, Tensor(b!) out, Tensor(c!) lse) -> ()
mla::paged_indexer_logits(Tensor q, Tensor(a!) index_cache, Tensor weights, Tensor lengths, Tensor
    block_table, Tensor req_id_per_token, SymInt max_length, str cache_format, *, bool clean=False)
    -> Tensor
mla::paged_indexer_logits.out(Tensor q, Tensor(a!) index_cache, Tensor weights, Tensor lengths,
    Tensor block_table, Tensor req_id_per_token, SymInt max_length, str cache_format, *, bool
    clean=False, Tensor(b!) out) -> ()
mla::paged_sparse_attention(Tensor q, Tensor(a!) kv_cache, Tensor indices, float softmax_scale, str
    cache_format, *, Tensor? q_rope=None, Tensor? topk_length=None, Tensor? attn_sink=None, Tensor?
    block_table=None, Tensor? req_id_per_token=None, bool deterministic=False) -> (Tensor, Tensor)
mla::paged_sparse_attention.extra(Tensor q, Tensor(a!) kv_cache, Tensor indices, float
    softmax_scale, str cache_format, Tensor(b!) extra_kv_cache, Tensor extra_indices, str
    extra_cache_format, *, Tensor? topk_length=None, Tensor? extra_topk_length=None, Tensor?
    attn_sink=None, Tensor? block_table=None, Tensor? extra_block_table=None, Tensor?
    req_id_per_token=None, bool deterministic=False) -> (Tensor, Tensor)
mla::paged_sparse_attention.extra_out(Tensor q, Tensor(a!) kv_cache, Tensor indices, float
    softmax_scale, str cache_format, Tensor(b!) extra_kv_cache, Tensor extra_indices, str
    extra_cache_format, *, Tensor? topk_length=None, Tensor? extra_topk_length=None, Tensor?
    attn_sink=None, Tensor? block_table=None, Tensor? extra_block_table=None, Tensor?
    req_id_per_token=None, bool deterministic=False, Tensor(c!) out, Tensor(d!) lse) -> ()
mla::paged_sparse_attention.out(Tensor q, Tensor(a!) kv_cache, Tensor indices, float softmax_scale,
    str cache_format, *, Tensor? q_rope=None, Tensor? topk_length=None, Tensor? attn_sink=None,
    Tensor? block_table=None, Tensor? req_id_per_token=None, bool deterministic=False, Tensor(b!)
    out, Tensor(c!) lse) -> ()
mla::prefill_attention(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
    SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, *, bool causal=True) -> (Tensor,
    Tensor)
mla::prefill_attention.out(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k,
    SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, *, bool causal=True, Tensor(a!)
    out, Tensor(b!) lse) -> ()
mla::quantize_index_query(Tensor q, Tensor weights, float scale) -> (Tensor, Tensor)
mla::quantize_index_query.out(Tensor q, Tensor weights, float scale, *, Tensor(a!) q_fp8, Tensor(b!)
    q_weights) -> ()
mla::select_keys(Tensor q, Tensor(a!) index_cache, Tensor weights, Tensor lengths, Tensor
    block_table, Tensor req_id_per_token, SymInt topk, str cache_format, *, bool translate=False) ->
    (Tensor, Tensor)
mla::select_keys.flat(Tensor q, Tensor k, Tensor weights, Tensor row_starts, Tensor row_ends, SymInt
    topk, *, Tensor? k_scale=None) -> (Tensor, Tensor)
mla::select_keys.flat_out(Tensor q, Tensor k, Tensor weights, Tensor row_starts, Tensor row_ends,
    SymInt topk, *, Tensor? k_scale=None, Tensor(a!) indices, Tensor(b!) valid_counts) -> ()
mla::select_keys.out(Tensor q, Tensor(a!) index_cache, Tensor weights, Tensor lengths, Tensor
    block_table, Tensor req_id_per_token, SymInt topk, str cache_format, *, bool translate=False,
    Tensor(b!) indices, Tensor(c!) valid_counts) -> ()
mla::sliding_window_indices(Tensor positions, Tensor req_id_per_token, Tensor block_table, SymInt
    window, SymInt block_size, *, SymInt? num_blocks=None) -> (Tensor, Tensor)
mla::sliding_window_indices.out(Tensor positions, Tensor req_id_per_token, Tensor block_table,
    SymInt window, SymInt block_size, *, SymInt? num_blocks=None, Tensor(a!) indices, Tensor(b!)
    lens) -> ()
mla::sparse_attention(Tensor q, Tensor kv, Tensor indices, float softmax_scale, *, Tensor?
    topk_length=None, Tensor? attn_sink=None, bool deterministic=False) -> (Tensor, Tensor)
mla::sparse_attention.out(Tensor q, Tensor kv, Tensor indices, float softmax_scale, *, Tensor?
    topk_length=None, Tensor? attn_sink=None, bool deterministic=False, Tensor(a!) out, Tensor(b!)
    lse) -> ()
mla::topk_indices(Tensor scores, SymInt topk, *, Tensor? row_starts=None, Tensor? row_ends=None,
    Tensor? block_table=None, Tensor? req_id_per_token=None, SymInt block_size=0, bool sorted=False)
    -> (Tensor, Tensor)
mla::topk_indices.out(Tensor scores, SymInt topk, *, Tensor? row_starts=None, Tensor? row_ends=None,
    Tensor? block_table=None, Tensor? req_id_per_token=None, SymInt block_size=0, bool sorted=False,
    Tensor(a!) indices, Tensor(b!) valid_counts) -> ()
mla::write_index_cache(Tensor k, Tensor(a!) index_cache, Tensor slot_mapping, str cache_format) ->
    ()""",
        )


every_op = pytest.mark.parametrize("name", op_names())
computing_ops = pytest.mark.parametrize("name", [name for name in op_names() if out_overload(name) in op_names()])


def test_every_op_has_a_family_and_every_family_an_op() -> None:
    assert {functional(name) for name in op_names()} == set(FAMILIES)


@every_op
def test_no_written_argument_is_optional_or_a_list(name: str) -> None:
    # `Tensor(a!)?` given None passes opcheck and crashes Inductor (tests/test_hazards.py)
    for argument in overload(name)._schema.arguments:
        if argument.alias_info is not None:
            assert str(argument.type) == "Tensor", f"{name}: {argument.name} is written and of type {argument.type}"


@every_op
def test_nothing_returned_aliases_an_argument(name: str) -> None:
    for returned in overload(name)._schema.returns:
        assert returned.alias_info is None
        assert str(returned.type) == "Tensor", "a fixed number of tensors, never a list or an optional"


@every_op
def test_an_op_that_writes_into_buffers_returns_nothing(name: str) -> None:
    schema = overload(name)._schema
    if name != functional(name) or not schema.returns:
        assert not schema.returns
        assert any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)


@every_op
def test_a_cache_is_declared_written_by_readers_too(name: str) -> None:
    # declared read-only, an independent read before a write makes Inductor clone the whole cache
    for argument in overload(name)._schema.arguments:
        if argument.name.endswith("_cache"):
            assert argument.alias_info is not None
            assert argument.alias_info.is_write


@every_op
def test_sizes_are_symbolic(name: str) -> None:
    # a schema `int` fed from a shape fails under dynamic shapes
    assert not re.search(r"\bint\b", str(overload(name)._schema))


@computing_ops
def test_out_overload_appends_one_buffer_for_each_result(name: str) -> None:
    plain, out = overload(name)._schema, overload(out_overload(name))._schema
    appended = output_names(overload(out_overload(name)))
    assert len(appended) == len(plain.returns)
    assert [a.name for a in out.arguments] == [a.name for a in plain.arguments] + appended

    shared, _, _ = str(plain).removeprefix(f"mla::{name}").partition(") -> ")
    assert str(out).startswith(f"mla::{out_overload(name)}{shared}, "), (
        "everything but the buffers is the same, defaults too"
    )


@every_op
def test_each_backend_and_the_fake_are_registered(name: str) -> None:
    qualified = f"mla::{name}"
    for key in ("CPU", "CUDA", "Meta"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key), f"{qualified} has no {key} kernel"
    # it would hide that a backend is missing
    assert not torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd")


@every_op
def test_ops_are_tagged_as_traceable_and_keep_their_strides(name: str) -> None:
    tags = overload(name).tags
    assert torch.Tag.pt2_compliant_tag in tags
    for relaxed in ("flexible_layout", "needs_fixed_stride_order"):
        assert getattr(torch.Tag, relaxed) not in tags, "Inductor would change strides that the kernels check"
