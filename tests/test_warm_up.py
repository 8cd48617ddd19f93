"""`warmup` runs wherever the ops do, and leaves nothing to compile for the steps that it was told of."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

import mla_ops
from mla_ops.testing.checks import record_calls


@pytest.mark.parametrize(
    ("cache_format", "dtype", "head_dim"),
    [
        ("fp8_ds_mla", torch.bfloat16, 576),
        ("fp8_ds_mla_v4", torch.bfloat16, 512),
        ("bf16", torch.bfloat16, 512),
        ("fp32", torch.float32, 576),
    ],
)
def test_warmup_runs_every_op(
    cache_format: str, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = set()
    select = mla_ops.dispatch.select

    def record(call: mla_ops.dispatch.Call) -> mla_ops.dispatch.Lowering:
        called.add(call.op)
        return select(call)

    monkeypatch.setattr(mla_ops.dispatch, "select", record)
    options = {"cache_format": cache_format, "dtype": dtype, "head_dim": head_dim, "deterministic": head_dim == 512}
    mla_ops.warmup(num_heads=3, topk=5, num_tokens=(0, 1, 4), device="cpu", with_sink=True, index_heads=2, **options)
    left_out = {"sparse_attention"}
    if head_dim != 512:
        left_out |= {"compress_and_cache", "paged_sparse_attention.extra"}  # DeepSeek-V4's, whose keys are 512 wide
    if not mla_ops.formats.get_format(cache_format).quantized:
        left_out |= {"quantize_index_query"}  # plain latents go with plain index keys
    assert called == set(mla_ops.dispatch.FAMILIES) - left_out


@pytest.mark.parametrize("q_halves", [False, True])
def test_attention_gets_queries_in_the_form_that_was_announced(q_halves: bool) -> None:
    with record_calls() as calls:
        mla_ops.warmup(
            cache_format="fp8_ds_mla", num_heads=3, topk=5, num_tokens=(1, 4), q_halves=q_halves, device="cpu"
        )
    attention = [named for op, named in calls if op in ("paged_sparse_attention", "paged_attention")]
    given = [(named.get("q_rope") is not None, named["q"].shape[2]) for named in attention]
    assert set(given) == {(True, 512) if q_halves else (False, 576)}


@pytest.mark.parametrize("num_sms", [108, 132])
@pytest.mark.parametrize("num_tokens", [1, 8, 64, 96, 300])
def test_dense_decode_over_other_contexts_takes_the_kernels_that_were_warmed_up(
    num_tokens: int, num_sms: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that share their keys or not, by shape alone or where lengths are looked at."""
    pytest.importorskip("triton")
    from mla_ops.kernels.triton import dense_attention

    seen: set[tuple[object, ...]] = set()

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *args, **constants: seen.add((constants["OPTIONS"], args[6] is None))

    for name in ("_paged_kernel", "_packed_kernel"):
        monkeypatch.setattr(dense_attention, name, Recorded())
    monkeypatch.setattr(dense_attention, "_share_evenly", lambda *_: torch.ones(1))
    monkeypatch.setattr(dense_attention, "merge_parts", lambda *_: None)
    monkeypatch.setattr(dense_attention, "num_sms", lambda _: num_sms)
    with mla_ops.dispatch.override(paged_attention="triton"):
        mla_ops.warmup(cache_format="bf16", num_heads=16, topk=5, num_tokens=(num_tokens,), device=device)
        warmed = seen.copy()
        cache = mla_ops.allocate_cache("bf16", 1, 64, device=device)
        q = torch.zeros(num_tokens, 16, 576, dtype=cache.dtype, device=device)
        lens = torch.zeros(num_tokens, dtype=torch.int32, device=device)
        for together in (1, 2, 4, 8):
            for keys in (64, 832, 2048, 4096, 10000, 32768, 163840):
                shape = max(1, num_tokens // together), -(-keys // 64)
                table = torch.zeros(shape, dtype=torch.int32, device=device)
                mla_ops.paged_attention(q, cache, table, lens, lens, 1.0, "bf16")
    assert seen == warmed


def test_prefill_gets_requests_of_few_tokens_and_of_many() -> None:
    """Each has kernels of its own, on Hopper and in portable Triton."""
    pytest.importorskip("triton")
    from mla_ops.kernels.hopper import prefill_attention
    from mla_ops.kernels.triton import dense_attention

    with record_calls() as calls:
        mla_ops.warmup(cache_format="bf16", num_heads=3, topk=5, num_tokens=(1,), device="cpu")
    prefills = [(named["max_seqlen_q"], named.get("causal", True)) for op, named in calls if op == "prefill_attention"]
    for causal in (True, False):
        lens = [length for length, is_causal in prefills if is_causal == causal]
        assert min(lens) < dense_attention.SHORTEST
        assert max(lens) > prefill_attention.QUERIES


@pytest.mark.parametrize("cache_format", ["fp8_ds_mla_v4", "bf16"])
def test_the_compressor_of_other_steps_takes_the_kernels_that_were_warmed_up(
    cache_format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the token counts that were announced, over rings of a group and over states of whole requests."""
    pytest.importorskip("triton")
    from mla_ops.kernels.triton import compressor

    seen: set[tuple[object, ...]] = set()

    class Recorded:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(*args: object, OPTIONS: object, **_: object) -> None:
                seen.add((self.name, OPTIONS, *(a.dtype for a in args if isinstance(a, torch.Tensor))))

            return launch

    for name in ("_compress_kernel", "_finish_kernel", "_store_state_kernel"):
        monkeypatch.setattr(compressor, name, Recorded(name))
    num_tokens = (8, compressor.MANY_TOKENS)
    with mla_ops.dispatch.override(compress_and_cache="triton"):
        mla_ops.warmup(
            cache_format=cache_format, num_heads=1, topk=1, num_tokens=num_tokens, head_dim=512, device="cpu"
        )
        warmed = seen.copy()
        for (ratio, series, head_dim), count in itertools.product(
            ((4, 2, 512), (128, 1, 512), (4, 2, 128)), num_tokens
        ):
            entry_format = cache_format if head_dim == 512 else mla_ops.formats.index_format_of(cache_format)
            entries = mla_ops.allocate_cache(entry_format, 2, 64, head_dim=head_dim)
            width, window = series * head_dim, ratio * series
            tokens, owners = torch.zeros(count, width, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int32)
            bias, norm = torch.zeros(ratio, width), torch.zeros(head_dim, dtype=torch.bfloat16)
            for capacity in (window, window + count):
                states, table = torch.zeros(3, capacity, 2 * width), torch.zeros(3, 1, dtype=torch.int32)
                caches = torch.zeros(9, 64), states, entries, table
                mla_ops.compress_and_cache(
                    tokens, tokens, bias, norm, *caches, owners, owners, owners.long(), 1e-6, entry_format
                )
    assert seen == warmed


@pytest.mark.parametrize("dtype", [None, torch.float32])
@pytest.mark.parametrize("cache_format", sorted(mla_ops.formats.LATENT_FORMATS))
def test_a_format_alone_is_enough_and_tokens_may_be_wider(cache_format: str, dtype: torch.dtype | None) -> None:
    with record_calls() as calls:
        mla_ops.warmup(
            cache_format=cache_format,
            num_heads=1,
            topk=1,
            num_tokens=iter((3,)),
            dtype=dtype,
            index_heads=1,
            device="cpu",
        )
    usual = mla_ops.formats.PLAIN.get(cache_format, torch.bfloat16)
    assert {named["kv_c"].dtype for op, named in calls if op == "concat_and_cache"} == {dtype or usual}
    assert {named["q"].shape[0] for op, named in calls if op == "select_keys"} == {3}


@pytest.mark.gpu
@pytest.mark.parametrize(("deterministic", "q_halves"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("num_heads", [16, 128])
@pytest.mark.parametrize("cache_format", ["fp8_ds_mla", "bf16"])
def test_a_capture_after_warmup_compiles_nothing(
    cache_format: str, num_heads: int, deterministic: bool, q_halves: bool, kernels_made: list[str]
) -> None:
    """Steps of the token counts that were announced, over another cache, another table and other lengths."""
    device, topk, block_size = torch.device("cuda"), 640, 64
    num_tokens = (1, 8, 40, 300)
    options = {"cache_format": cache_format, "num_heads": num_heads, "deterministic": deterministic}
    mla_ops.warmup(topk=topk, num_tokens=num_tokens, q_halves=q_halves, **options)
    before = list(kernels_made)
    cache = mla_ops.allocate_cache(cache_format, 70, block_size, device=device)
    for count in num_tokens:
        metadata = mla_ops.StepMetadata.allocate(
            max_num_tokens=count,
            max_num_requests=count,
            max_blocks_per_request=13,
            block_size=block_size,
            index_topk=topk,
            device=device,
        )
        starts = torch.arange(count + 1, dtype=torch.int32, device=device)
        seq_lens = torch.randint(1, 13 * block_size, (count,), dtype=torch.int32, device=device)
        table = torch.randint(0, 70, (count, 13), dtype=torch.int32, device=device)
        token = torch.randn(count, 576, device=device).bfloat16()
        q, q_rope = torch.randn(count, num_heads, 576, device=device).bfloat16(), None
        if q_halves:
            q, q_rope = q[..., :512].transpose(0, 1).contiguous().transpose(0, 1), q[..., 512:]
        indices = torch.randint(0, 13 * block_size, (count, topk), dtype=torch.int32, device=device)
        out = torch.empty(count, num_heads, 512, dtype=torch.bfloat16, device=device)
        lse = torch.empty(count, num_heads, device=device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            metadata.build(starts, seq_lens, table)
            mla_ops.concat_and_cache(token[:, :512], token[:, 512:], cache, metadata.slot_mapping, cache_format)
            torch.ops.mla.paged_sparse_attention.out(
                q,
                cache,
                indices,
                576**-0.5,
                cache_format,
                q_rope=q_rope,
                topk_length=metadata.topk_length,
                block_table=metadata.block_table,
                req_id_per_token=metadata.req_id_per_token,
                deterministic=deterministic,
                out=out,
                lse=lse,
            )
        graph.replay()
        assert out.isfinite().all()
    assert kernels_made == before


@pytest.mark.gpu
def test_a_step_of_v4_after_warmup_compiles_nothing(kernels_made: list[str]) -> None:
    """Entries of both ratios and of the indexer, over a ring and over states of whole requests; chunks of a context."""
    device, counts, cache_format = torch.device("cuda"), (1, 8, 600), "fp8_ds_mla_v4"
    mla_ops.warmup(cache_format=cache_format, num_heads=16, topk=128, num_tokens=counts, index_heads=64)
    before = list(kernels_made)
    zeros = functools.partial(torch.zeros, device=device)
    for count, (ratio, series, head_dim) in itertools.product(counts, ((4, 2, 512), (128, 1, 512), (4, 2, 128))):
        entry_format = cache_format if head_dim == 512 else "fp8_index"
        entries = mla_ops.allocate_cache(entry_format, 9, 64, head_dim=head_dim, device=device)
        width, window = series * head_dim, ratio * series
        tokens = torch.randn(count, width, device=device).bfloat16()
        owners, positions = zeros(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32, device=device)
        norm = torch.ones(head_dim, dtype=torch.bfloat16, device=device)
        for capacity in (window, window + count):
            caches = zeros(3, capacity, 2 * width), entries, zeros(1, 1, dtype=torch.int32)
            mla_ops.compress_and_cache(
                tokens,
                tokens,
                zeros(ratio, width),
                norm,
                zeros(1000, 64),
                *caches,
                owners,
                positions,
                positions.long() // ratio,
                1e-6,
                entry_format,
            )
    cache = mla_ops.allocate_cache(cache_format, 9, 64, device=device)
    lens, starts = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([40, 90], [0, 40, 70]))
    mla_ops.gather_cache(cache, zeros(2, 5, dtype=torch.int32), lens, starts, 70, cache_format, gather_lens=lens)
    assert kernels_made == before
