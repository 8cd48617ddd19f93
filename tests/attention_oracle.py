"""Sparse attention written a second time, for the tests: float64, token by token, a sink as one more logit.

`tolerance` derives how far an honest float32 kernel may be from it; nothing in it was tuned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Unit roundoff of what a result, or a probability before PV, is rounded to.
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
# One float32 addition inside a tensor core may truncate instead of rounding: an ulp, not half.
ACCUMULATE = 2.0**-23
# exp2 and log2 of a GPU are good to about 2 ulp, the scaling before them to 1.
FUNCTION = 2.0**-21
# float16 loses half of its smallest step of a weight; a row's largest weight is 2^7 or more there.
FLOAT16_WEIGHT = 2.0 ** (-25 - 7)


def e4m3_table() -> torch.Tensor:
    values = []
    for byte in range(256):
        exponent, mantissa = (byte >> 3) & 15, byte & 7
        value = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
        values.append(math.nan if byte & 0x7F == 0x7F else -value if byte & 0x80 else value)
    return torch.tensor(values, dtype=torch.float64)


def decode(rows: torch.Tensor) -> torch.Tensor:
    """Rows of a cache or of flat keys to float64. uint8 rows are fp8_ds_mla."""
    if rows.dtype != torch.uint8:
        return rows.double()
    rows = rows.contiguous()
    scales = rows[:, 512:528].contiguous().view(torch.float32).double().repeat_interleave(128, dim=1)
    rope = rows[:, 528:].contiguous().view(torch.bfloat16).double()
    return torch.cat((e4m3_table().to(rows.device)[rows[:, :512].long()] * scales, rope), dim=1)


def to_float16(x: torch.Tensor) -> torch.Tensor:
    """Rounded to float16's mantissa; exponents are float64's."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)


def round_latents(latents: torch.Tensor, binades: torch.Tensor, group: int) -> torch.Tensor:
    """Values of e4m3 as they are once those of a group were divided by `2**binades` and became e4m3 again."""
    steps = torch.ldexp(torch.full_like(binades, 2.0**-9, dtype=torch.float64), binades)  # e4m3's smallest number
    steps = steps.repeat_interleave(group, dim=-1)
    return torch.where(steps > 2.0**-9, (latents / steps).round() * steps, latents)


def held_binades(binades: torch.Tensor) -> torch.Tensor:
    """The same, of keys whose groups are divided by up to 2**5 each; 0 of those that float16 does not hold even so."""
    binades = binades.clamp(min=0)
    return torch.where((binades <= 5).all(-1, keepdim=True), binades, 0)


def float16_operands(rows: torch.Tensor, divides: bool = False) -> torch.Tensor:
    """Keys of fp8_ds_mla as operands of tensor cores: e4m3 times float16 of the scale, rounded to float16.

    Exponents are float64's, since kernels keep a power of two apart where float16's do not reach. `divides`: e4m3 of
    groups whose scales lie below 2**-22 even so are divided.
    """
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    latents = e4m3_table().to(rows.device)[rows[:, :512].long()]
    if divides:
        exponents = torch.frexp(scales / powers_apart(rows)[:, None]).exponent - 1
        latents = round_latents(latents, held_binades(torch.where(scales > 0, -22 - exponents, 0)), 128)
    latents = to_float16(latents * to_float16(scales).repeat_interleave(128, dim=1))
    return torch.cat((latents, rows[:, 528:].contiguous().view(torch.bfloat16).double()), dim=1)


def powers_apart(rows: torch.Tensor) -> torch.Tensor:
    """The power of two by which a key of fp8_ds_mla is divided before float16 holds it: 1 where it does so anyway."""
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    largest = scales.amax(1)
    fits = (largest >= 2.0**-13) & (largest < 0.5) & ((scales == 0) | (scales >= 2.0**-21)).all(1)
    exponent = torch.where(fits, 0, (torch.frexp(largest).exponent + 1).clamp(-60, 40))
    return torch.ldexp(torch.ones_like(largest), exponent)


def v4_powers_apart(exponents: torch.Tensor, divides: bool = False) -> torch.Tensor:
    """The power apart of keys of fp8_ds_mla_v4, `[..., 7]` exponents with a bias of 127.

    Where a launch divides e4m3 of groups with small scales, such a key's largest scale becomes larger.
    """
    largest, least = exponents.amax(-1).long(), exponents.amin(-1).long()
    fits = (largest >= 110) & (largest <= 122) & (least >= 105)
    exponent = torch.where(fits, 0, (largest - 120).clamp(-60, 40))
    if divides:
        exponent = torch.where(least - exponent < 105, (largest - 125).clamp(-60, 40), exponent)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float64), exponent)


def v4_planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A page-planar cache as data, `[blocks, block_size, 576]`, and scales, `[blocks, block_size, 8]`, behind it."""
    num_blocks, stride = cache.shape[0], cache.stride(0)
    page = next(p for p in range(1, 10**6) if -(-584 * p // 576) * 576 == cache.shape[1]) if cache.dim() == 2 else 0
    page = page or cache.shape[1]
    data = cache.as_strided((num_blocks, page, 576), (stride, 576, 1), cache.storage_offset())
    return data, cache.as_strided((num_blocks, page, 8), (stride, 8, 1), cache.storage_offset() + 576 * page)


def v4_keys(latents: torch.Tensor, data: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Keys of fp8_ds_mla_v4 from values of e4m3, `[..., 448]`, the bytes of their rows and their scales' exponents."""
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)
    latents = latents * powers.to(data.device)[exponents.long()].repeat_interleave(64, dim=-1)
    return torch.cat((latents, data[..., 448:].contiguous().view(torch.bfloat16).double()), dim=-1)


def decode_cache(cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """All keys of a paged cache to float64, `[blocks, block_size, head_dim]`."""
    if cache_format != "fp8_ds_mla_v4":
        return decode(cache.reshape(-1, cache.shape[2])).unflatten(0, cache.shape[:2])
    data, scales = v4_planes(cache)
    return v4_keys(e4m3_table().to(cache.device)[data[..., :448].long()], data, scales[..., :7])


def v4_divided_operands(cache: torch.Tensor) -> torch.Tensor:
    """Keys of fp8_ds_mla_v4 as operands where a launch divides e4m3 of groups with exponents below 105."""
    data, scales = v4_planes(cache)
    exponents = scales[..., :7]
    left = exponents.long() - torch.log2(v4_powers_apart(exponents, divides=True)).long()[..., None]
    latents = e4m3_table().to(cache.device)[data[..., :448].long()]
    latents = round_latents(latents, held_binades(torch.where(exponents > 0, 105 - left, 6)), 64)
    return v4_keys(latents, data, exponents)


def valid_slots(
    indices: list[int], num_blocks: int, block_size: int, length: int | None, table_row: list[int] | None
) -> list[tuple[int, int]]:
    """(block, offset) of what one token attends to, in order; `table_row` None where indices are slots."""
    found = []
    for index in indices[: None if length is None else max(length, 0)]:
        if index < 0:
            continue
        block, offset = divmod(index, block_size)
        if table_row is not None:
            if block >= len(table_row):
                continue
            block = table_row[block]
        if 0 <= block < num_blocks:
            found.append((block, offset))
    return found


@dataclass
class Source:
    """A cache `[blocks, block_size, ...]`, its format ('' for plain rows), and what chooses among its keys.

    `divides`: whether the launch divides e4m3 of groups that lie far below their key's largest, as Hopper kernels of
    one CTA a row do (`LOWERS` in sparse_attention.cu, `attention_inputs.divides_groups`).
    """

    cache: torch.Tensor
    cache_format: str
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    divides: bool = False

    def __post_init__(self) -> None:
        self.keys = decode_cache(self.cache, self.cache_format)
        self.operands = self.keys
        self.powers = torch.ones(self.keys.shape[:2], dtype=torch.float64, device=self.keys.device)
        self.quantized = self.cache.dtype == torch.uint8
        if self.cache_format == "fp8_ds_mla_v4":
            exponents = v4_planes(self.cache)[1][..., :7]
            self.powers = v4_powers_apart(exponents, self.divides)
            if self.divides:
                self.operands = v4_divided_operands(self.cache)
        elif self.quantized:
            rows = self.cache.reshape(-1, self.cache.shape[2]).contiguous()
            self.operands = float16_operands(rows, self.divides).unflatten(0, self.cache.shape[:2])
            self.powers = powers_apart(rows).unflatten(0, self.cache.shape[:2])

    def chosen(self, token: int, request: int | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The keys that a token attends to, in order, what tensor cores get of them, and their powers."""
        num_blocks, block_size, _ = self.keys.shape
        row = None
        if self.block_table is not None and request is not None:
            row = self.block_table[request].tolist() if 0 <= request < self.block_table.shape[0] else []
        length = None if self.topk_length is None else int(self.topk_length[token])
        slots = valid_slots(self.indices[token].tolist(), num_blocks, block_size, length, row)
        place = torch.tensor(slots, dtype=torch.int64, device=self.keys.device).view(-1, 2)
        block, offset = place.unbind(1)
        return self.keys[block, offset], self.operands[block, offset], self.powers[block, offset]


@dataclass
class Expected:
    """Float64 results and what bounds a kernel's distance from them, for the tokens `tokens`."""

    tokens: list[int]
    out: torch.Tensor
    lse: torch.Tensor
    out_tolerance: torch.Tensor
    lse_tolerance: torch.Tensor


def attention(
    q: torch.Tensor,
    cache: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    *,
    topk_length: torch.Tensor | None = None,
    attn_sink: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    req_id_per_token: torch.Tensor | None = None,
    operand: torch.dtype | None = None,
    tokens: list[int] | None = None,
    cache_format: str = "",
    extra: Source | None = None,
    divides: bool = False,
) -> Expected:
    """Attention and its bounds.

    `cache` is `[blocks, block_size, width]`; `cache_format` matters where it does not lie row by row; `extra` is a
    second cache in the same softmax. `operand` is what probabilities are rounded to, None if to nothing. Where it is
    not None, tensor cores multiply: they have keys of quantised formats as `Source.operands` rounds them, and weights
    of these keys as float16, times `Source.powers`. `divides` is that of `Source`, for `cache`.

    The bounds, with d the key width, n the number of keys, |.| elementwise:
    a score s = scale * sum q_i k_i is off by at most e_s = (d + 4) * ACCUMULATE * scale * sum |q_i k_i|, plus what the
    change of base and exp2 add, FUNCTION * (|s| + 1), plus what the rounding of a key makes of it. The same e_s, for
    all keys, bounds the error of lse, to which the sum of n terms adds n * ACCUMULATE, and two logarithms: of the parts
    of a row, and of their sum. A probability is then off by a factor of at most exp(2 e_s), but by 1 at most: where
    scores are in the thousands, that is a choice among neighbours. It is off by a factor of 1 + n * ACCUMULATE as well,
    plus the unit of the operand, and a weight in float16 by FLOAT16_WEIGHT of the row's largest; summing p_k v_k adds
    n * ACCUMULATE once more, each relative to A = sum p_k |v_k|. However the weights are off, the result is a mean of
    the values (and of 0, with a sink). A finite sink is one more exponential, of an argument as large as it is. Last
    comes the rounding of the output.
    """
    tokens = tokens if tokens is not None else list(range(q.shape[0]))
    sources = [Source(cache, cache_format, indices, topk_length, block_table, divides)]
    sources += [extra] if extra is not None else []
    found = []
    for token in tokens:
        request = None if req_id_per_token is None else int(req_id_per_token[token])
        found.append(attend(q[token], sources, token, request, scale, attn_sink, operand))
    results = (torch.stack(parts) for parts in zip(*found, strict=True)) if found else [torch.empty(0)] * 4
    return Expected(tokens, *results)


def attend(
    query: torch.Tensor,
    sources: list[Source],
    token: int,
    request: int | None,
    scale: float,
    attn_sink: torch.Tensor | None,
    operand: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One token's out and lse, and the bounds of each, as `attention` derives them. `query`: `[num_heads, width]`."""
    chosen = [source.chosen(token, request) for source in sources]
    keys, operands, powers = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    if not len(keys):
        out = query.new_zeros(len(query), 512, dtype=torch.float64)
        lse = query.new_full((len(query),), -math.inf, dtype=torch.float64)
        return out, lse, torch.zeros_like(out), torch.zeros_like(lse)
    rounding = operands - keys if operand is not None else torch.zeros_like(keys)
    queries = query.double()
    scores = queries @ keys.T * scale
    error = (keys.shape[1] + 4) * ACCUMULATE * abs(scale) * (queries.abs() @ keys.abs().T)
    error = (error + FUNCTION * (scores.abs() + 1) + (queries @ rounding.T * scale).abs()).amax(1)
    logarithms = log_weights(scores, attn_sink)
    weights, values, n = logarithms.exp(), keys[:, :512], len(keys) * ACCUMULATE
    out, lse = weights @ values, torch.logsumexp(scores, 1)
    relative = torch.full_like(error, (UNIT[operand] if operand is not None else 0.0) + 2 * n + 4 * FUNCTION)
    if attn_sink is not None:
        relative = relative + FUNCTION * attn_sink.double().abs().nan_to_num(0.0, 0.0)
    e = (2 * error).clamp(max=1e300)
    off = (logarithms + (e + (-torch.expm1(-e)).log())[:, None]).clamp(max=0.0).exp()
    own = weights @ values.abs() * relative[:, None] + off @ values.abs()
    own = own + weights @ rounding[:, :512].abs()
    means = values if attn_sink is None else torch.cat((values, torch.zeros_like(values[:1])))
    mean = means.amax(0) - means.amin(0) + relative[:, None] * means.abs().amax(0)
    own = torch.fmin(own, mean + rounding[:, :512].abs().amax(0))
    if operand is not None and any(source.quantized for source in sources):
        own = own + FLOAT16_WEIGHT * ((weights * powers).amax(1, keepdim=True) / powers) @ values.abs()
    # numbers that underflow in float32 or in the output's type are lost
    floor = 2.0**-126 * keys.abs().amax() + (2.0**-25 if query.dtype == torch.float16 else 2.0**-134)
    return out, lse, own + UNIT[query.dtype] * (out.abs() + own) + floor, error + n + 2 * FUNCTION * lse.abs()


def log_weights(scores: torch.Tensor, attn_sink: torch.Tensor | None) -> torch.Tensor:
    """Logarithms of the probabilities of scores `[num_heads, n]`, also where these underflow."""
    logits = scores
    if attn_sink is not None:
        logits = torch.cat((scores, attn_sink.double()[:, None]), dim=1)
    top = logits.amax(1, keepdim=True).clamp(max=1e300)
    logarithms = logits - top - torch.logsumexp(logits - top, 1, keepdim=True)
    if attn_sink is None:
        return logarithms
    return torch.where((attn_sink == math.inf)[:, None], -math.inf, logarithms)[:, :-1]


def assert_close(out: torch.Tensor, lse: torch.Tensor, expected: Expected) -> None:
    """Every element within its own bound; infinities and NaN exactly where they belong."""
    if not expected.tokens:
        return
    for name, found, wanted, tolerance in (
        ("out", out, expected.out, expected.out_tolerance),
        ("lse", lse, expected.lse, expected.lse_tolerance),
    ):
        chosen = found[expected.tokens].double()
        distance = (chosen - wanted).abs()
        fine = (chosen == wanted) | (distance <= tolerance) | (chosen.isnan() & wanted.isnan())
        worst = (distance / tolerance.clamp(min=1e-300)).nan_to_num(0.0, 0.0).max().item()
        assert fine.all(), f"{name}: {(~fine).sum().item()} elements beyond their bound, the worst {worst:.3g} times"
