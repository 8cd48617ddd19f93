"""The Triton kernels with their constants, which `aot_jobs.py` compiles.

To add a kernel: one more generator of `Variant`s in `VARIANTS`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from triton.compiler import ASTSource

from mla_ops.formats import FORMATS
from mla_ops.kernels.triton import (
    cache,
    compressor,
    dense_attention,
    dense_attention_device,
    dense_attention_even,
    dense_attention_short,
    index,
    indexer,
    indexer_cache,
    indexer_topk,
    indexer_topk_rows,
    merge,
    sparse_attention,
    sparse_attention_extra,
    splits,
    step_metadata,
)
from mla_ops.kernels.triton.attention_options import Options, attention_options
from mla_ops.kernels.triton.e4m3 import decode_method

CAPABILITIES = (80, 86, 89, 90, 100, 103, 120, 121)

SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants.

    Attributes:
        name: what the test id says.
        kernel: the jitted function.
        types: Triton's type of each argument that is not annotated with one, e.g. `*bf16`; "none" for an optional
            argument that is not given.
        constants: the constexprs.
        options: num_warps, num_stages.
    """

    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


def cache_variants(capability: int) -> Iterator[Variant]:
    for element in ("bf16", "fp32"):
        types = {"kv_c": f"*{element}", "k_pe": f"*{element}", "kv_cache": "*u8", "slot_mapping": "*i64"}
        yield Variant(f"store_fp8[{element}]", cache._store_fp8_kernel, types, {}, {"num_warps": 2})
        yield Variant(f"store_fp8_v4[{element}]", cache._store_fp8_v4_kernel, types, {}, {"num_warps": 2})
    types = {"kv_c": "*fp32", "k_pe": "*fp32", "kv_cache": "*bf16", "slot_mapping": "*i64"}
    for width, block in ((576, 512), (128, 128)):
        constants = {"ROW_WIDTH": width, "BLOCK": block}
        yield Variant(f"store_plain[{width}]", cache._store_plain_kernel, types, constants, {"num_warps": 2})
    ints = dict.fromkeys(("block_table", "seq_lens", "cu_seq_lens", "gather_lens"), "*i32")
    for fmt, element, out, width in (
        ("fp8", "u8", "bf16", 656),
        ("fp8_v4", "u8", "bf16", 576),
        ("bf16", "bf16", "bf16", 576),
        ("fp32", "fp32", "fp32", 576),
    ):
        planar = fmt == "fp8_v4"
        constants = {"FP8": element == "u8", "PLANAR": planar, "ROW_WIDTH": width, "LATENT": 512}
        constants |= {"ROPE": 0 if planar else 64, "ROWS": cache.GATHER_ROWS}
        constants |= {
            "DECODE": decode_method((capability // 10, capability % 10)),
            "OUT_UNIT": 4 if out == "fp32" else 8,
        }
        types = {"kv_cache": f"*{element}", "out": f"*{out}", **ints}
        yield Variant(f"gather[{fmt}]", cache._gather_kernel, types, constants)


def index_variants(capability: int) -> Iterator[Variant]:
    names = ("req_id_per_token", "block_table", "token_indices", "out", "valid_counts")
    for compact in (False, True):
        constants = {"COMPACT": compact, "BLOCK": index.CONVERT_BLOCK}
        yield Variant(f"convert[compact={compact}]", index._convert_kernel, dict.fromkeys(names, "*i32"), constants)
    names = ("positions", "req_id_per_token", "block_table", "indices", "lens")
    for newest, block, warps in ((True, index.WINDOW_BLOCK, 1), (False, index.COMPRESSED_BLOCK, 4)):
        constants, options = {"NEWEST": newest, "BLOCK": block}, {"num_warps": warps}
        types = dict.fromkeys(names, "*i32")
        yield Variant(f"range[newest={newest}]", index._range_kernel, types, constants, options)
    types = dict.fromkeys(index._combine_kernel.arg_names[:7], "*i32")
    yield Variant("combine", index._combine_kernel, types, {"BLOCK": index.COMBINE_BLOCK})
    names = ("indices", "context_lens", "context_indices", "new_indices")
    yield Variant("filter", index._filter_kernel, dict.fromkeys(names, "*i32"), {"BLOCK": index.FILTER_BLOCK})


def indexer_types() -> dict[str, str]:
    ints = (
        "block_table",
        "seq_lens",
        "cu_seq_lens",
        "req_id_per_token",
        "lengths",
        "row_starts",
        "row_ends",
        "indices",
        "ends",
    )
    ints += (
        "valid_counts",
        "chosen",
        "counts",
        "kept_indices",
        "best_indices",
    )
    floats = ("weights", "q_weights", "k_scale", "out", "scores", "kept_scores", "best_scores")
    return dict.fromkeys(ints, "*i32") | dict.fromkeys(floats, "*fp32") | {"slot_mapping": "*i64"}


def indexer_variants(capability: int) -> Iterator[Variant]:
    types = indexer_types()
    for source, target in (("bf16", "u8"), ("fp32", "u8"), ("fp32", "bf16")):
        given, constants = {**types, "k": f"*{source}", "index_cache": f"*{target}"}, {"FP8": target == "u8"}
        name = f"write_index[{source} to {target}]"
        yield Variant(name, indexer_cache._write_kernel, given, constants, {"num_warps": 1})
    for element in ("u8", "bf16"):
        given = {**types, "k": f"*{element}", "index_cache": f"*{element}"}
        constants = {"FP8": element == "u8", "ROWS": indexer_cache.GATHER_ROWS}
        yield Variant(f"gather_index[{element}]", indexer_cache._gather_kernel, given, constants)
    given = {**types, "q": "*bf16", "weights": "*bf16", "q_fp8": "*u8"}
    yield Variant("quantize_index_query", indexer_cache._quantize_kernel, given, {"HEADS": 16})
    for element, heads in (("u8", 32), ("u8", 64), ("bf16", 64), ("fp32", 64)):
        native = element == "u8" and indexer.takes_fp8((capability // 10, capability % 10))
        given = {**types, "q": f"*{element}", "k": f"*{element}", "index_cache": f"*{element}"}
        constants = {"NATIVE_FP8": native, "UPCAST": False, "CLEAN": False, "HEADS": heads, "UNIT": 16}
        constants["KEYS"] = indexer.SCORE_KEYS_FP32 if element == "fp32" else indexer.SCORE_KEYS
        name = f"[{element}, {heads} heads]"
        dtype = {"u8": torch.float8_e4m3fn, "bf16": torch.bfloat16, "fp32": torch.float32}[element]
        flat = {**constants, "TOKENS": indexer.SCORE_TOKENS}
        warps = {"num_warps": indexer.score_warps(dtype, (capability // 10, capability % 10))}
        yield Variant(f"indexer_flat{name}", indexer._flat_kernel, given, flat, warps)
        paged = {**constants, "FP8": element == "u8"}
        yield Variant(f"indexer_paged{name}", indexer._paged_kernel, given, paged, warps)


def topk_variants(capability: int) -> Iterator[Variant]:
    types, options, rows = indexer_types(), {"num_warps": indexer_topk.NUM_WARPS}, indexer_topk_rows
    whole = {**types, "columns": "none", "kept_scores": "none"}
    pieces = {**types, "block_table": "none", "columns": "none", "kept_scores": "*fp32", "valid_counts": "none"}
    kinds = {"slots": whole, "pieces": pieces, "of pieces": {**whole, "columns": "*i32"}}
    kinds["pieces of pieces"] = {**pieces, "columns": "*i32"}
    for size, (name, given) in itertools.product((rows.SMALL_PIECE, rows.LARGE_PIECE), kinds.items()):
        constants, warps = {"PIECE": size, "UNIT": 4}, {"num_warps": size // 1024}
        yield Variant(f"topk[{name}, {size}]", rows._select_kernel, given, constants, warps)
    yield Variant("topk_order", indexer_topk._order_kernel, types, {"RANKED": indexer_topk.RANKED})
    yield Variant("topk_merge", indexer_topk._merge_kernel, types, {"BLOCK": indexer_topk.CANDIDATES}, options)
    yield Variant("topk_ascend", indexer_topk._ascend_kernel, types, {"BLOCK": indexer_topk.RANKED})


def compressor_variants(capability: int) -> Iterator[Variant]:
    floats = dict.fromkeys(("position_bias", "cos_sin", "state_cache"), "*fp32")
    ints = dict.fromkeys(("state_block_table", "req_id_per_token", "positions"), "*i32") | {"slot_mapping": "*i64"}
    layers = (("C4A", 4, 1024, 512), ("C128A", 128, 512, 512), ("C4A indexer", 4, 256, 128))
    # loaded and stored types do not meet: two pairs have each of them
    for (layer, ratio, width, head_dim), source in itertools.product(layers, ("bf16", "fp32")):
        types = {"kv": f"*{source}", "score": f"*{source}", "norm_weight": "*fp32", **floats, **ints}
        planar = head_dim == 512 and source == "bf16"
        channels, states, num_warps = compressor.tile(ratio * (width // head_dim), head_dim)
        fixed = ratio, width, head_dim, 64, planar, channels, states
        constants = {"OPTIONS": compressor.make_options(*fixed, 1, source == "bf16")}
        yield Variant(f"store_state[{layer}, {source}]", compressor._store_state_kernel, types, constants)
        types |= {"kv_cache": "*u8" if planar else f"*{source}", "pooled_groups": "*fp32"}
        name = f"[{layer}, {source} to {'fp8_ds_mla_v4' if planar else source}]"
        for tokens in (1, compressor.MANY_TOKENS):
            rows = compressor.rows_of_a_program(tokens, channels, head_dim)
            if tokens == 1 or rows > 1:
                constants = {"OPTIONS": compressor.make_options(*fixed, rows, source == "bf16")}
                options = {"num_warps": num_warps}
                yield Variant(f"compress{name}, {rows} rows", compressor._compress_kernel, types, constants, options)
        if channels < head_dim:
            yield Variant(f"finish{name}", compressor._finish_kernel, types, constants)


def merge_variants(capability: int) -> Iterator[Variant]:
    for element, block in (("bf16", 512), ("fp32", 512), ("bf16", 128)):
        types = {"out_a": f"*{element}", "out_b": f"*{element}", "out": f"*{element}"}
        types |= dict.fromkeys(("lse_a", "lse_b", "lse"), "*fp32")
        tile, unit = merge.pair_tile(128, block), 4 if element == "fp32" else 8
        constants = {"ROWS": tile.rows, "BLOCK_D": block, "PIECE": tile.piece, "UNIT": unit, "UPCAST": False}
        options = {"num_warps": tile.num_warps}
        yield Variant(f"merge[{element}, {block}]", merge._merge_kernel, types, constants, options)
        types |= {"outs": f"*{element}", "lses": "*fp32"}
        constants = {"ROWS": merge.MERGE_VALUES // block, "BLOCK_D": block, "UNIT": unit, "UPCAST": False}
        constants["STAGES"] = merge.MERGE_STAGES
        yield Variant(f"merge_stacked[{element}, {block}]", merge._merge_stacked_kernel, types, constants)
    # the parts of dense attention on Hopper
    types["out"] = "*bf16"
    name = "merge_stacked[fp32 to bf16, 512]"
    constants |= {"ROWS": merge.MERGE_VALUES // 512, "BLOCK_D": 512, "UNIT": 4}
    yield Variant(name, merge._merge_stacked_kernel, types | {"outs": "*fp32"}, constants)


def step_metadata_variants(capability: int) -> Iterator[Variant]:
    names = step_metadata._step_kernel.arg_names[:11]
    types = dict.fromkeys(names, "*i32") | {"slot_mapping": "*i64"}
    constants = {"TOKENS": step_metadata.TOKEN_BLOCK, "COPY": step_metadata.COPY_BLOCK}
    yield Variant("step", step_metadata._step_kernel, types, constants)
    types = dict.fromkeys(step_metadata._compressed_kernel.arg_names[:6], "*i32") | {"slot_mapping": "*i64"}
    yield Variant("compressed", step_metadata._compressed_kernel, types, constants)


def cache_keys(capability: int, cache_format: str, mode: str, dim: int, translated: bool) -> sparse_attention.Keys:
    entry = FORMATS[cache_format]
    decode = decode_method((capability // 10, capability % 10)) if entry.quantized else ""
    row_width = entry.data_bytes or entry.row_width(dim)
    in_line = not translated and not mode.startswith("fp8_v4")
    return sparse_attention.Keys(mode, row_width, 16 // entry.dtype.itemsize, in_line, translated, decode)


def in_halves(variant: Variant) -> Variant:
    """The same for queries in two tensors."""
    types = {**variant.types, "q_rope": variant.types["q"]}
    return replace(variant, name=variant.name.replace("]", ", halves]"), types=types)


def heads_of_tiles(pick: Callable[[int], Any], numbers: Iterable[int]) -> list[int]:
    """The first of these numbers of heads for each tile."""
    first: dict[Any, int] = {}
    for heads in numbers:
        first.setdefault(pick(heads), heads)
    return list(first.values())


AN_OUTPUT = torch.empty(1, 128, 512, dtype=torch.bfloat16)  # with room for indices


def sparse_attention_variants(capability: int) -> Iterator[Variant]:
    device = (capability // 10, capability % 10)
    cases = []
    for fmt, dim in (("fp8_ds_mla", 576), ("bf16", 576), ("fp8_ds_mla_v4", 512)):
        mode = sparse_attention.operand_mode(torch.bfloat16, fmt)
        for heads in heads_of_tiles(lambda heads, mode=mode: sparse_attention.tile(device, heads, mode), (16, 32, 128)):
            cases += [(fmt, torch.bfloat16, dim, heads, everything) for everything in (True, False)]
    cases += [("fp16", torch.float16, 512, 128, True), ("fp32", torch.float32, 576, 128, True)]
    cases += [("fp8_ds_mla", torch.float16, 576, 128, True)]
    cases += [("fp8_ds_mla_v4", torch.float16, 512, 128, True)]
    for fmt, dtype, dim, heads, everything in cases:
        mode = sparse_attention.operand_mode(dtype, fmt)
        tile = sparse_attention.tile(device, heads, mode)
        # another kernel translates in front of tiles of more than 16 heads
        translated = everything and tile.block_h == 16
        partial = everything and (heads == 16 or tile.block_h == 64)
        types = {
            "q": f"*{SHORT[dtype]}",
            "q_rope": "none",
            "kv": "*u8" if fmt.startswith("fp8") else f"*{SHORT[dtype]}",
            "out": ("*fp16" if tile.half else "*fp32") if partial else f"*{SHORT[dtype]}",
            "lse": "*fp32",
            "attn_sink": "none" if partial else "*fp32",
        }
        looked_up = ("topk_length", "block_table", "req_id_per_token")
        types |= {"indices": "*i32"} | dict.fromkeys(looked_up, "*i32" if translated else "none")
        types["topk_length"] = "*i32" if everything else "none"
        keys = cache_keys(capability, fmt, "fp8_half" if tile.half else mode, dim, translated)
        keys = replace(keys, in_line=keys.in_line and not everything)
        out_unit = 4 if types["out"] == "*fp32" else 8
        looks = sparse_attention.looks_at_indices(keys, tile, partial, everything)
        parts = (64 if tile.block_h == 16 else 2) if partial else 1
        steady = sparse_attention.is_steady(tile, keys, dtype, 2048, parts)
        keeps = looks and sparse_attention.keeps_indices(tile, AN_OUTPUT, 2048, parts)
        copies = sparse_attention.spares_copies(tile, keys, 2048, parts, keeps)
        fixed = keys, tile, dim == 576, 8, out_unit, partial, looks, steady, keeps, copies
        constants = {"OPTIONS": attention_options(*fixed, upcast=False)}
        options = {"num_warps": tile.num_warps}
        name = f"attend[{fmt}, q {SHORT[dtype]}, {dim}, {heads} heads{'' if everything else ', slots'}]"
        variant = Variant(name, sparse_attention._attend_kernel, types, constants, options)
        yield variant
        if tile.block_h == 32 and not everything and mode != "fp8_v4":
            # for an SM that has room for two programs
            beside = sparse_attention.tile(device, heads, mode, alone=False)
            looks = sparse_attention.looks_at_indices(keys, beside, partial, everything)
            steady = sparse_attention.is_steady(beside, keys, dtype, 2048, 1)
            beside_keeps = looks and sparse_attention.keeps_indices(beside, AN_OUTPUT, 2048, 1)
            copies = sparse_attention.spares_copies(beside, keys, 2048, 1, beside_keeps)
            fixed = replace(constants["OPTIONS"], tile=beside, looks=looks, steady=steady, keeps=beside_keeps)
            fixed = replace(fixed, copies=copies)
            options = {"num_warps": beside.num_warps}
            yield replace(variant, name=name.replace("]", ", beside]"), constants={"OPTIONS": fixed}, options=options)
        if keeps and not everything:
            # for outputs without room for indices
            of_many = sparse_attention.spares_copies(tile, keys, 2048, 1)
            masked = {"OPTIONS": replace(constants["OPTIONS"], keeps=False, copies=of_many)}
            yield replace(variant, name=name.replace("]", ", masks]"), constants=masked)
            part = {"partial": True, "out_unit": 8 if tile.half else 4, "copies": False}
            part["keeps"] = sparse_attention.keeps_indices(tile, AN_OUTPUT, 2048, 2)
            part["steady"] = sparse_attention.is_steady(tile, keys, dtype, 2048, 2)
            of_part = {"OPTIONS": replace(constants["OPTIONS"], **part)}
            part_types = {**types, "out": "*fp16" if tile.half else "*fp32", "attn_sink": "none"}
            yield replace(variant, name=name.replace("]", ", parts]"), types=part_types, constants=of_part)
        if parts > 2 and sparse_attention.is_steady(tile, keys, dtype, 2048, 2):
            long = {"OPTIONS": replace(constants["OPTIONS"], steady=True, copies=True)}
            yield replace(variant, name=name.replace("]", ", long parts]"), constants=long)
        if fmt == "fp8_ds_mla" and dtype == torch.bfloat16 and everything:
            yield in_halves(variant)
    for element, part in (("bf16", "fp32"), ("fp32", "fp32"), ("bf16", "fp16")):
        types = {
            "partial_out": f"*{part}",
            "partial_lse": "*fp32",
            "attn_sink": "*fp32",
            "uneven": "none" if element == "bf16" else "*i32",
            "out": f"*{element}",
            "lse": "*fp32",
        }
        most = splits.MAX_SPLITS
        constants = {"MAX_SPLITS": most, "BLOCK_S": splits.merge_block(most)}
        constants |= {"OUT_UNIT": 8 if element == "bf16" else 4}
        warps = splits.merge_warps(torch.float16 if part == "fp16" else torch.float32)
        name = f"merge_splits[{element}, parts {part}]"
        yield Variant(name, splits._merge_splits_kernel, types, constants, {"num_warps": warps})


def two_cache_variants(capability: int) -> Iterator[Variant]:
    """Indices are translated for both caches, of two formats for the second only, of 64 heads for none."""
    v4, more_heads = "fp8_ds_mla_v4", (64, 128)
    cases = [(v4, v4, torch.bfloat16, 512, heads) for heads in (16, *more_heads)]
    cases += [("bf16", v4, torch.bfloat16, 512, 128), ("fp8_ds_mla", "bf16", torch.bfloat16, 576, 128)]
    cases += [("fp8_ds_mla", "fp8_ds_mla", torch.bfloat16, 576, 64)]
    if capability == 90:  # elsewhere they have the tile of 16
        cases += [("bf16", "bf16", torch.bfloat16, 576, heads) for heads in more_heads]
        # 16 seconds to compile: elsewhere, float16 in the kernel of one cache has to do
        cases.append((v4, v4, torch.float16, 512, 128))
    for fmt, extra, dtype, dim, heads in cases:
        modes = sparse_attention.operand_modes(dtype, fmt, extra)
        partial = heads == 16
        types = {"q": f"*{SHORT[dtype]}", "out": "*fp32" if partial else f"*{SHORT[dtype]}", "lse": "*fp32"}
        types["attn_sink"] = "none" if partial else "*fp32"
        types |= dict.fromkeys(("indices", "topk_length", "extra_indices", "extra_topk_length"), "*i32")
        types |= dict.fromkeys(("block_table", "extra_block_table", "req_id_per_token"), "*i32")
        if fmt != extra:
            types |= dict.fromkeys(("topk_length", "extra_topk_length", "block_table"), "none")
        if heads == 64:
            types |= dict.fromkeys(("block_table", "extra_block_table", "req_id_per_token"), "none")
        keys = []
        for prefix, name, mode in (("", fmt, modes[0]), ("extra_", extra, modes[1])):
            entry = FORMATS[name]
            types[f"{prefix}kv"] = "*u8" if entry.quantized else f"*{SHORT[dtype]}"
            keys.append(cache_keys(capability, name, mode, dim, types[f"{prefix}block_table"] != "none"))
        tile = sparse_attention.two_cache_tile((capability // 10, capability % 10), heads, (keys[0], keys[1]))
        fixed = keys[0], tile, dim == 576, 8, 4 if partial else 8, partial
        # SMs of 227 KB have two programs of 32 heads
        paired = tile.block_h == 32 and capability // 10 == 10
        steady = paired and sparse_attention.is_steady(tile, keys[0], dtype, 640, 1, paired)
        of_v4 = tile.block_h == 64 and modes[0] == "fp8_v4"
        copies = of_v4 and sparse_attention.spares_copies(tile, keys[0], 640, 1)
        walk = {"steady": steady, "copies": copies, "extra_keys": keys[1], "upcast": False}
        constants = {"OPTIONS": attention_options(*fixed, **walk)}
        options = {"num_warps": tile.num_warps}
        name = f"attend_extra[{fmt} and {extra}, q {SHORT[dtype]}, {heads} heads]"
        yield Variant(name, sparse_attention_extra._attend_extra_kernel, types, constants, options)


def dense_attention_variants(capability: int) -> Iterator[Variant]:
    cases = [("bf16", 192, 128, True), ("bf16", 128, 128, False)]
    cases += [("bf16", 256, 256, True), ("fp16", 96, 80, True), ("fp32", 192, 128, True)]
    for element, dim, dim_v, causal in cases:
        exact = element == "fp32"
        tile = dense_attention.prefill_tile((capability // 10, capability % 10), dim, dim_v, exact)
        types = dict.fromkeys(("q", "k", "v", "out"), f"*{element}") | {"lse": "*fp32"}
        types |= dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), "*i32")
        fixed = causal, exact, (dim, dim_v), ((4 if exact else 8),) * 4
        sums = dense_attention.weight_sums((capability // 10, capability % 10))
        constants = {"OPTIONS": dense_attention.prefill_options(*fixed, tile.block_m, tile.block_n, sums)}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        name = f"prefill[{element}, {dim}/{dim_v}, {'causal' if causal else 'full'}]"
        yield Variant(name, dense_attention_device._prefill_kernel, types, constants, options)
        tile = dense_attention.short_tile(exact)
        constants = {"OPTIONS": dense_attention.prefill_options(*fixed, tile.block_m, tile.block_n, 1)}
        options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        yield Variant(f"short {name}", dense_attention_short._short_prefill_kernel, types, constants, options)


def dense_helper_variants(capability: int) -> Iterator[Variant]:
    """Kernels before and behind other libraries' kernels."""
    names = ("block_table", "req_id_per_token", "key_lens", "blocks", "lens")
    constants = {"BLOCK": dense_attention.COMPACT_BLOCK}
    kernel = dense_attention_device._compact_blocks_kernel
    yield Variant("compact_blocks", kernel, dict.fromkeys(names, "*i32"), constants)
    types = {"end": "*i32", "out": "*bf16", "lse": "*fp32"}
    kernel = dense_attention_device._clear_behind_kernel
    yield Variant("clear_behind", kernel, types, {"BLOCK_V": 128}, {"num_warps": 1})


class DenseCase(NamedTuple):
    cache_format: str
    dtype: torch.dtype
    dim: int
    num_heads: int
    whole: bool = True


def paged_attention_variants(capability: int) -> Iterator[Variant]:
    """Each kernel with each tile of each format.

    All else that changes is in `attend_keys` and `query_rows`, which all of them call: small blocks and queries in two
    tensors once alone and once packed, exact keys once, as `sparse_attention_variants` has them of every format.
    """
    device = (capability // 10, capability % 10)
    small_blocks = DenseCase("bf16", torch.bfloat16, 576, 16, whole=False)
    tiles = ((False, dense_attention.group_tile, (16, 128)), (True, dense_attention.packed_tile, (32,)))
    for packed, pick, numbers in tiles:
        cases = []
        for fmt, dim in (("fp8_ds_mla", 576), ("fp8_ds_mla_v4", 512), ("bf16", 576)):
            mode = sparse_attention.operand_mode(torch.bfloat16, fmt)
            heads_of_format = heads_of_tiles(functools.partial(pick, device, mode=mode), numbers)
            cases += [DenseCase(fmt, torch.bfloat16, dim, heads) for heads in heads_of_format]
        for case in cases:
            # whole tiles of many heads are those of `operand_variants`
            walk = case._replace(whole=packed or case.num_heads == 16)
            yield walk_variant(capability, walk, packed)
            yield even_variant(capability, case, packed)
        variant = even_variant if packed else walk_variant
        yield variant(capability, small_blocks, packed)
        yield in_halves(variant(capability, cases[-1] if packed else walk, packed))
    yield walk_variant(capability, DenseCase("fp32", torch.float32, 576, 16), packed=False)
    types = dict.fromkeys(("part_out", "part_lse", "lse"), "*fp32") | {"cuts": "*i32", "out": "*bf16"}
    constants = {"BLOCK_S": dense_attention.MERGE_PARTS}
    yield Variant("merge_cuts", dense_attention_even._merge_cuts_kernel, types, constants)
    for fmt in ("fp8_ds_mla", "bf16"):
        yield from operand_variants(capability, DenseCase(fmt, torch.bfloat16, 576, 128))


def dense_case(capability: int, case: DenseCase, packed: bool) -> tuple[str, dict[str, str], Options]:
    """The arguments of all dense kernels: the end of their name, types, and options with the tile before any change."""
    fmt, dtype, dim, heads, whole = case
    entry, mode = FORMATS[fmt], sparse_attention.operand_mode(dtype, fmt)
    pick = dense_attention.packed_tile if packed else dense_attention.group_tile
    types = {"q": f"*{SHORT[dtype]}", "kv": "*u8" if entry.quantized else f"*{SHORT[dtype]}"}
    types |= {"out": f"*{SHORT[dtype]}", "lse": "*fp32", "q_rope": "none"}
    types |= dict.fromkeys(("block_table", "req_id_per_token", "key_lens"), "*i32")
    tile = pick((capability // 10, capability % 10), heads, mode)
    keys = cache_keys(capability, fmt, mode, dim, translated=True)
    options = attention_options(keys, tile, dim == 576, 16 // dtype.itemsize, whole=whole, upcast=False)
    name = f"[{fmt}, q {SHORT[dtype]}, {dim}, {heads} heads{'' if whole else ', small blocks'}]"
    return name, types, options


def walk_variant(capability: int, case: DenseCase, packed: bool) -> Variant:
    """Quantised keys of 16 heads give parts, for which no length is looked at."""
    name, types, options = dense_case(capability, case, packed)
    partial = FORMATS[case.cache_format].quantized and case.num_heads == 16
    types |= {"out": "*fp32", "uneven": "none"} if partial else {"uneven": "*i32"}
    constants = {"OPTIONS": replace(options, partial=partial, out_unit=4)}
    kernel = dense_attention_device._packed_kernel if packed else dense_attention_device._paged_kernel
    name = ("packed" if packed else "paged") + name
    return Variant(name, kernel, types, constants, {"num_warps": options.tile.num_warps})


def operand_variants(capability: int, case: DenseCase) -> Iterator[Variant]:
    """Whole rows and parts in tiles of the sparse kernels; of plain keys parts in tiles of which an SM has two, too."""
    variant, device = walk_variant(capability, case, packed=False), (capability // 10, capability % 10)
    mode = sparse_attention.operand_mode(case.dtype, case.cache_format)
    kinds = {"rows": True, "parts": True} | ({"parts beside": False} if mode == "plain" and capability != 90 else {})
    for kind, alone in kinds.items():
        tile = dense_attention.paged_tile(device, case.num_heads, mode, alone)
        keys = cache_keys(capability, case.cache_format, "fp8_half" if tile.half else mode, case.dim, translated=True)
        partial, part = kind != "rows", "*fp16" if tile.half else "*fp32"
        steady = tile.block_h == 32 and sparse_attention.is_steady(tile, keys, case.dtype, 8192, 2)
        options = replace(variant.constants["OPTIONS"], tile=tile, keys=keys, partial=partial, steady=steady)
        options = replace(options, out_unit=8 if partial and tile.half else 4)
        types = variant.types | {"out": part if partial else f"*{SHORT[case.dtype]}"}
        types["uneven"] = "none" if partial else "*i32"
        name = variant.name.replace("]", f", {kind}]")
        yield Variant(name, variant.kernel, types, {"OPTIONS": options}, {"num_warps": tile.num_warps})


def even_variant(capability: int, case: DenseCase, packed: bool) -> Variant:
    name, types, options = dense_case(capability, case, packed)
    tile = dense_attention.even_tile(options.tile)
    types |= dict.fromkeys(("part_out", "part_lse"), "*fp32") | dict.fromkeys(("cuts", "uneven"), "*i32")
    constants: dict[str, Any] = {"SLACK": 8, "LEAST": 4, "ROW_COST": 2}
    constants["OPTIONS"] = replace(options, tile=tile, packed=packed, out_unit=options.q_unit)
    name = f"even{', packed' if packed else ''}{name}"
    return Variant(name, dense_attention_even._even_kernel, types, constants, {"num_warps": tile.num_warps})


VARIANTS = (
    cache_variants,
    compressor_variants,
    dense_attention_variants,
    dense_helper_variants,
    index_variants,
    indexer_variants,
    merge_variants,
    paged_attention_variants,
    sparse_attention_variants,
    step_metadata_variants,
    topk_variants,
    two_cache_variants,
)


def source(variant: Variant) -> ASTSource:
    """The kernel as a launch with these arguments would compile it: integers unspecialised, most pointers aligned."""
    signature: dict[str, str] = {}
    constants = dict(variant.constants)
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    tuples = getattr(variant.kernel, "tuples", {})
    for parameter in variant.kernel.params:
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif variant.types.get(name) == "none":
            signature[name] = "constexpr"
            constants[name] = None
        elif name in variant.types:
            signature[name] = variant.types[name]
            # among specialised integers, strides of queries and outputs are multiples of 16
            aligned = not parameter.do_not_specialize_on_alignment if "*" in signature[name] else "lse" not in name
            if aligned and signature[name] != "fp32":
                attributes[(parameter.num,)] = [["tt.divisibility", 16]]
        elif name in tuples:
            signature[name] = tuples[name]
        else:
            signature[name] = parameter.annotation_type
            assert signature[name] in ("i32", "i64", "fp32"), f"{variant.name}: {name} has no type"
            assert parameter.do_not_specialize or signature[name] == "fp32", f"{variant.name}: {name} is specialised"
    return ASTSource(variant.kernel, signature, constants, attributes)
