"""Random calls of attention and of the merge, held against float64."""

from __future__ import annotations

import math

import attention_oracle
import dense_oracle
import torch
from attention_inputs import filled_cache, operand, poison_unused

from mla_ops.formats import FORMATS, LATENT_FORMATS, PLAIN, geometry

from .case import BLOCK_SIZES, Arguments, Case, Judge
from .draw import TOKENS, Draw

WORK = 300_000  # tokens * heads * keys of an attention call
TOKENS_CHECKED = 4
LONG_WORK = 12_000_000  # the same of a call with long rows
LONG_KEYS = (2048, 5000, 16384, 60000, 150000)
SMALL_DIMS = ((24, 7), (1, 1), (100, 33), (255, 256))  # of heads that only portable kernels take
HEADS = (1, 2, 7, 8, 16, 17, 32, 64, 65, 127, 128)


def _some(draw: Draw, num_tokens: int) -> list[int]:
    count = 1 if draw.long else TOKENS_CHECKED
    return sorted({draw.between(0, num_tokens - 1) for _ in range(count)}) if num_tokens else []


def _heads_and_keys(draw: Draw, num_tokens: int, widest: int) -> tuple[int, int]:
    heads = draw.form("heads", 3, *HEADS)
    if draw.long:
        return heads, min(draw.pick(*LONG_KEYS), LONG_WORK // (max(num_tokens, 1) * heads))
    room = max(WORK // (max(num_tokens, 1) * heads), 1)
    return heads, min(draw.pick(0, 1, 5, 63, 64, 65, 128, 200, widest), room)


def attention_cache(draw: Draw, cache_format: str, head_dim: int = 0) -> torch.Tensor:
    blocks, block_size = draw.maybe_none(1, 2, 7), draw.form("block size", 3, *BLOCK_SIZES)
    cache = filled_cache(cache_format, blocks, block_size, torch.device("cpu"), head_dim=head_dim or 576)
    if cache_format == "fp8_ds_mla" and draw.chance(0.2):  # writers without a least scale store small keys so
        scales = cache[..., 512:528].contiguous().view(torch.float32) * 2.0 ** draw.between(-20, 6)
        cache[..., 512:528] = scales.view(torch.uint8)
    return cache


def _poisoned(draw: Draw, arguments: Arguments, indices: torch.Tensor, length: str, prefix: str = "") -> torch.Tensor:
    """In one call of four a cache with NaN in every slot that no token attends to; else as it is."""
    cache, cache_format = arguments[f"{prefix}kv_cache"], arguments[f"{prefix}cache_format"]
    blocks, block_size, _, _ = geometry(cache, cache_format)
    if draw.expands or draw.long or not blocks or not draw.chance(0.25):
        return cache
    table, lengths, used = arguments[f"{prefix}block_table"], arguments[length], set()
    for token, row in enumerate(indices.tolist()):
        columns = None
        if table is not None:
            request = int(arguments["req_id_per_token"][token])
            columns = table[request].tolist() if 0 <= request < table.shape[0] else []
        count = None if lengths is None else int(lengths[token])
        used.update(attention_oracle.valid_slots(row, blocks, block_size, count, columns))
    slots = torch.tensor([block * block_size + offset for block, offset in used], dtype=torch.int64)
    return poison_unused(cache, slots, cache_format)


def _format_and_dtype(draw: Draw, kind: str, *formats: str) -> tuple[str, torch.dtype]:
    """A format of keys and a dtype of queries. Hopper's kernels take bfloat16, half of what dispatch chooses for."""
    both = [(name, dtype) for name in formats for dtype in ([PLAIN[name]] if name in PLAIN else PLAIN.values())]
    if draw.chance({"auto": 0.5, "hopper": 0.9, "triton": 0.0}[draw.lowering]):
        draw.few_forms = False
        return draw.pick(*(pair for pair in both if pair[1] == torch.bfloat16))
    return draw.form(kind, 2, *both)


def _halved(arguments: Arguments) -> Arguments:
    """The query in two tensors, where keys have RoPE dims behind the 512th; else as it is."""
    q = arguments["q"]
    if q.shape[2] == 512:
        return arguments
    latent, rope = (half.contiguous() for half in q.split((512, 64), dim=2))
    return {**arguments, "q": latent, "q_rope": rope}


def _sink(draw: Draw, heads: int) -> torch.Tensor:
    sink = torch.randn(heads)
    if draw.chance(0.3):
        sink[torch.rand(heads) < 0.3] = draw.pick(math.inf, -math.inf, 50.0, -50.0)
    return sink


def _judge_attention(tokens: list[int], *, formats: tuple[str, ...] = ("",)) -> Judge:
    def judge(before: Arguments, after: Arguments, outputs: tuple[torch.Tensor, ...], lowering: str) -> None:
        q, q_rope = before["q"], before.get("q_rope")
        if q_rope is not None:
            q = torch.cat((q, q_rope), dim=-1)
        operands = [operand(lowering, name, q.dtype) for name in formats]
        divides = lowering in ("auto", "hopper")  # its launch is not known here
        options = {name: before.get(name) for name in ("topk_length", "attn_sink", "block_table", "req_id_per_token")}
        extra = None
        if "extra_kv_cache" in before:
            extra = attention_oracle.Source(
                before["extra_kv_cache"],
                before["extra_cache_format"],
                before["extra_indices"],
                before.get("extra_topk_length"),
                before.get("extra_block_table"),
                divides,
            )
        if "key_lens" in before:
            table, block_size = before["block_table"], geometry(before["kv_cache"], before["cache_format"]).block_size
            options["topk_length"] = before["key_lens"]
            indices = torch.arange(table.shape[1] * block_size, dtype=torch.int32).expand(q.shape[0], -1)
        else:
            indices = before["indices"]
        cache = before["kv"].unsqueeze(1) if "kv" in before else before["kv_cache"]
        expected = attention_oracle.attention(
            q,
            cache,
            indices,
            before["softmax_scale"],
            operand=None if None in operands else operands[0],
            tokens=tokens,
            cache_format=before.get("cache_format", ""),
            extra=extra,
            divides=divides,
            **options,
        )
        attention_oracle.assert_close(*outputs, expected)
        assert not outputs[1].isnan().any(), "lse has NaN"

    return judge


def _scale(draw: Draw, width: int) -> float:
    """A scale of either sign, each of which has kernels of its own; one in nine makes scores act as argmax."""
    sign = draw.form("sign of scales", 1, 1.0, 1.0, 1.0, -1.0)
    return sign * width**-0.5 * 2.0 ** draw.pick(-2, -1, *[0] * 5, 1, 20)


def paged_sparse_attention(draw: Draw) -> Case:
    cache_format, dtype = _format_and_dtype(draw, "paged", *LATENT_FORMATS)
    width = FORMATS[cache_format].head_dims[0]
    cache = attention_cache(draw, cache_format)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    num_tokens = draw.tokens()
    heads, topk = _heads_and_keys(draw, num_tokens, 700)
    local, with_length, with_sink, halved, with_extra_length = draw.options(5, "paged", cache_format, dtype)
    requests, columns = draw.maybe_none(1, 3), draw.maybe_none(1, 5)
    slots = columns * block_size if local else blocks * block_size
    arguments: Arguments = {
        "q": draw.normal(num_tokens, heads, width, dtype=dtype, spread=2),
        "kv_cache": cache,
        "indices": draw.int32(0, slots, num_tokens, topk),
        "softmax_scale": _scale(draw, width),
        "cache_format": cache_format,
        "topk_length": draw.int32(0, topk + 2, num_tokens) if with_length else None,
        "attn_sink": _sink(draw, heads) if with_sink else None,
        "block_table": draw.int32(0, blocks, requests, columns) if local else None,
        "req_id_per_token": draw.int32(0, requests, num_tokens) if local else None,
        "deterministic": draw.chance(0.2),
    }
    arguments["kv_cache"] = _poisoned(draw, arguments, arguments["indices"], "topk_length")
    tokens = _some(draw, num_tokens)
    judge = _judge_attention(tokens, formats=(cache_format,))
    if draw.chance(0.75):
        arguments = _halved(arguments) if halved else arguments
        return Case("paged_sparse_attention", arguments, judge, {"kv_cache": cache_format})
    same_width = [
        name for name in LATENT_FORMATS if width in FORMATS[name].head_dims and name in (cache_format, *PLAIN)
    ]
    extra_formats = [name for name in same_width if PLAIN.get(name, dtype) == dtype]
    extra_format = draw.form(f"extra {cache_format} {dtype}", 1, *extra_formats)
    extra = attention_cache(draw, extra_format, width)
    extra_blocks, extra_size, _, _ = geometry(extra, extra_format)
    extra_topk = draw.pick(0, 1, 64, 130)
    rows = columns * extra_size if local else extra_blocks * extra_size
    arguments |= {
        "extra_kv_cache": extra,
        "extra_indices": draw.int32(0, rows, num_tokens, extra_topk),
        "extra_cache_format": extra_format,
        "extra_topk_length": draw.int32(0, extra_topk + 2, num_tokens) if with_extra_length else None,
        "extra_block_table": draw.int32(0, extra_blocks, requests, columns) if local else None,
    }
    arguments["extra_kv_cache"] = _poisoned(draw, arguments, arguments["extra_indices"], "extra_topk_length", "extra_")
    judge = _judge_attention(tokens, formats=(cache_format, extra_format))
    caches = {"kv_cache": cache_format, "extra_kv_cache": extra_format}
    return Case("paged_sparse_attention.extra", arguments, judge, caches)


def sparse_attention(draw: Draw) -> Case:
    name, dtype = _format_and_dtype(draw, "flat", *PLAIN)
    width = draw.form("flat width", 1, 576, 512)
    num_tokens, num_kv = draw.tokens(), draw.pick(0, 1, 63, 500)
    heads, topk = _heads_and_keys(draw, num_tokens, 700)
    with_length, with_sink = draw.options(2, "flat", dtype)
    arguments: Arguments = {
        "q": draw.normal(num_tokens, heads, width, dtype=dtype, spread=2),
        "kv": draw.normal(num_kv, width, dtype=dtype, spread=1),
        "indices": draw.int32(0, num_kv, num_tokens, topk),
        "softmax_scale": _scale(draw, width),
        "topk_length": draw.int32(0, topk + 2, num_tokens) if with_length else None,
        "attn_sink": _sink(draw, heads) if with_sink else None,
        "deterministic": draw.chance(0.2),
    }
    return Case("sparse_attention", arguments, _judge_attention(_some(draw, num_tokens), formats=(name,)))


def paged_attention(draw: Draw) -> Case:
    cache_format, dtype = _format_and_dtype(draw, "dense", *LATENT_FORMATS)
    width = FORMATS[cache_format].head_dims[0]
    cache = attention_cache(draw, cache_format)
    blocks, block_size, _, _ = geometry(cache, cache_format)
    num_tokens, requests = draw.tokens(), draw.maybe_none(1, 3)
    heads, keys = _heads_and_keys(draw, num_tokens, 400)
    (halved,) = draw.options(1, "dense", cache_format, dtype)
    columns = draw.maybe_none(max(-(-keys // block_size), 1) if block_size > 3 else draw.pick(1, 9))
    arguments: Arguments = {
        "q": draw.normal(num_tokens, heads, width, dtype=dtype, spread=2),
        "kv_cache": cache,
        "block_table": draw.int32(0, blocks, requests, columns),
        "req_id_per_token": draw.int32(0, requests, num_tokens),
        "key_lens": draw.int32(0, columns * block_size + 1, num_tokens),
        "softmax_scale": _scale(draw, width),
        "cache_format": cache_format,
        "deterministic": draw.chance(0.2),
    }
    positions = torch.arange(columns * block_size).expand(num_tokens, -1)
    arguments["kv_cache"] = _poisoned(draw, arguments, positions, "key_lens")
    judge = _judge_attention(_some(draw, num_tokens), formats=(cache_format,))
    arguments = _halved(arguments) if halved else arguments
    return Case("paged_attention", arguments, judge, {"kv_cache": cache_format})


def prefill_attention(draw: Draw) -> Case:
    requests = draw.pick(0, 1, 3)
    num_tokens, num_kv = draw.pick(*TOKENS), draw.pick(0, 1, 40, 130)
    kv_heads = draw.pick(1, 2, 4)
    heads = kv_heads * draw.pick(1, 1, 4)
    draw.few_forms &= draw.lowering == "triton" or draw.chance(0.4)
    dims = draw.form("dims", 2, (192, 128), (128, 128), (256, 256), (64, 64), *(SMALL_DIMS if draw.few_forms else []))
    dtype = draw.form("prefill", 2, *PLAIN.values()) if draw.few_forms else draw.pick(torch.bfloat16, torch.float16)
    (causal,) = draw.options(1, "prefill", dtype, dims)
    arguments: Arguments = {
        "q": draw.normal(num_tokens, heads, dims[0], dtype=dtype, spread=1),
        "k": draw.normal(num_kv, kv_heads, dims[0], dtype=dtype, spread=1),
        "v": draw.normal(num_kv, kv_heads, dims[1], dtype=dtype, spread=1),
        "cu_seqlens_q": draw.starts(requests, num_tokens, past=True),
        "cu_seqlens_k": draw.starts(requests, num_kv, past=True),
        "max_seqlen_q": draw.size(num_tokens),
        "max_seqlen_k": draw.size(num_kv),
        "softmax_scale": abs(_scale(draw, dims[0])),
        "causal": causal,
    }
    tokens = _some(draw, num_tokens)

    def judge(before: Arguments, after: Arguments, outputs: tuple[torch.Tensor, ...], lowering: str) -> None:
        rounded = None if lowering == "reference" or dtype == torch.float32 else dtype
        names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "softmax_scale")
        given = [before[name] for name in names]
        given[3:5] = given[3].clamp(max=num_tokens), given[4].clamp(max=num_kv)
        expected = dense_oracle.prefill(*given, causal=causal, operand=rounded, tokens=tokens)
        attention_oracle.assert_close(*outputs, expected)

    return Case("prefill_attention", arguments, judge)


def merge_attention_states(draw: Draw) -> Case:
    dtype, parts = draw.form("merge", 2, *PLAIN.values()), draw.pick(2, 2, 0, 1, 5)
    num_tokens, heads, width = (
        draw.tokens(),
        draw.maybe_none(1, 3, 16, 128),
        draw.form("merge width", 2, 1, 7, 64, 128, 512, 600),
    )
    outs = draw.normal(parts, num_tokens, heads, width, dtype=dtype)
    lses = draw.normal(parts, num_tokens, heads, dtype=torch.float32)
    lses[torch.rand(lses.shape) < 0.2] = draw.pick(-math.inf, math.inf)
    pair = parts == 2 and draw.chance(0.7)
    arguments = (
        {"out_a": outs[0], "lse_a": lses[0], "out_b": outs[1], "lse_b": lses[1]}
        if pair
        else {"outs": outs, "lses": lses}
    )

    def judge(before: Arguments, after: Arguments, outputs: tuple[torch.Tensor, ...], lowering: str) -> None:
        outs = torch.stack((before["out_a"], before["out_b"])) if pair else before["outs"]
        lses = torch.stack((before["lse_a"], before["lse_b"])) if pair else before["lses"]
        live = torch.where(lses == math.inf, -math.inf, lses).double()
        total = torch.logsumexp(live, 0) if parts else live.new_full(lses.shape[1:], -math.inf)
        shares = torch.where(total == -math.inf, 0.0, (live - total).exp())
        held = torch.where((shares > 0).unsqueeze(-1), outs.double(), 0.0)
        expected = (held * shares.unsqueeze(-1)).sum(0)
        size = float(live[live.isfinite()].abs().max()) if live.isfinite().any() else 0.0
        relative = (parts + 2) * 2.0**-21 * (1 + size)  # exps of rounded differences
        bound = (held.abs() * shares.unsqueeze(-1)).sum(0) * relative
        unit = attention_oracle.UNIT[dtype]
        close = (outputs[0].double() - expected).abs() <= bound + unit * (expected.abs() + bound) + 2.0**-24
        assert close.all(), f"out: {(~close).sum()} elements beyond their bound"
        apart = (outputs[1].double() - total).abs()
        assert ((outputs[1].double() == total) | (apart <= relative * (1 + total.abs()))).all(), "lse"

    return Case("merge_attention_states" if pair else "merge_attention_states.stacked", arguments, judge)
