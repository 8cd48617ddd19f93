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


def float16_operands(rows: torch.Tensor) -> torch.Tensor:
    """Keys of fp8_ds_mla as operands of tensor cores: e4m3 times float16 of the scale, rounded to float16.

    Exponents are float64's, since kernels keep a power of two apart where float16's do not reach.
    """

    def rounded(x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent)

    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    latent = rounded(e4m3_table().to(rows.device)[rows[:, :512].long()] * rounded(scales).repeat_interleave(128, dim=1))
    return torch.cat((latent, rows[:, 528:].contiguous().view(torch.bfloat16).double()), dim=1)


def powers_apart(rows: torch.Tensor) -> torch.Tensor:
    """The power of two by which a key of fp8_ds_mla is divided before float16 holds it: 1 where it does so anyway."""
    scales = rows[:, 512:528].contiguous().view(torch.float32).double()
    largest = scales.amax(1)
    fits = (largest >= 2.0**-13) & (largest < 0.5) & ((scales == 0) | (scales >= 2.0**-21)).all(1)
    exponent = torch.where(fits, 0, (torch.frexp(largest).exponent + 1).clamp(-60, 40))
    return torch.ldexp(torch.ones_like(largest), exponent)


def v4_powers_apart(exponents: torch.Tensor) -> torch.Tensor:
    """The same for keys of fp8_ds_mla_v4, `[..., 7]` exponents with a bias of 127."""
    largest, least = exponents.amax(-1).long(), exponents.amin(-1).long()
    fits = (largest >= 110) & (largest <= 122) & (least >= 105)
    exponent = torch.where(fits, 0, (largest - 120).clamp(-60, 40))
    exponent = torch.where(least - exponent < 105, (largest - 125).clamp(-60, 40), exponent)
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float64), exponent)


def v4_planes(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A page-planar cache as data, `[blocks, block_size, 576]`, and scales, `[blocks, block_size, 8]`, behind it."""
    num_blocks, stride = cache.shape[0], cache.stride(0)
    page = next(p for p in range(1, 10**6) if -(-584 * p // 576) * 576 == cache.shape[1]) if cache.dim() == 2 else 0
    page = page or cache.shape[1]
    data = cache.as_strided((num_blocks, page, 576), (stride, 576, 1), cache.storage_offset())
    return data, cache.as_strided((num_blocks, page, 8), (stride, 8, 1), cache.storage_offset() + 576 * page)


def decode_cache(cache: torch.Tensor, cache_format: str) -> torch.Tensor:
    """All keys of a paged cache to float64, `[blocks, block_size, head_dim]`."""
    if cache_format != "fp8_ds_mla_v4":
        return decode(cache.reshape(-1, cache.shape[2])).unflatten(0, cache.shape[:2])
    data, scales = v4_planes(cache)
    powers = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [math.nan], dtype=torch.float64)
    latent = e4m3_table().to(cache.device)[data[..., :448].long()]
    latent = latent * powers.to(cache.device)[scales[..., :7].long()].repeat_interleave(64, dim=-1)
    return torch.cat((latent, data[..., 448:].contiguous().view(torch.bfloat16).double()), dim=-1)


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
    """A cache `[blocks, block_size, ...]`, its format ('' for plain rows), and what chooses among its keys."""

    cache: torch.Tensor
    cache_format: str
    indices: torch.Tensor
    topk_length: torch.Tensor | None = None
    block_table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.keys = decode_cache(self.cache, self.cache_format)
        self.operands = self.keys
        self.powers = torch.ones(self.keys.shape[:2], dtype=torch.float64, device=self.keys.device)
        self.quantized = self.cache.dtype == torch.uint8
        if self.cache_format == "fp8_ds_mla_v4":
            self.powers = v4_powers_apart(v4_planes(self.cache)[1][..., :7])
        elif self.quantized:
            rows = self.cache.reshape(-1, self.cache.shape[2]).contiguous()
            self.operands = float16_operands(rows).unflatten(0, self.cache.shape[:2])
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
) -> Expected:
    """Attention and its bounds.

    `cache` is `[blocks, block_size, width]`; `cache_format` matters where it does not lie row by row; `extra` is a
    second cache in the same softmax. `operand` is what probabilities are rounded to, None if to nothing. Where it is
    not None, tensor cores multiply: they have keys of fp8_ds_mla as `float16_operands` rounds them, and weights of
    quantised keys as float16, times `powers_apart`.

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
    unit = UNIT[operand] if operand is not None else 0.0
    result = Expected(tokens if tokens is not None else list(range(q.shape[0])), *(torch.empty(0) for _ in range(4)))
    outs, lses, out_tolerances, lse_tolerances = [], [], [], []
    sources = [Source(cache, cache_format, indices, topk_length, block_table)]
    sources += [extra] if extra is not None else []
    for token in result.tokens:
        request = None if req_id_per_token is None else int(req_id_per_token[token])
        chosen = [source.chosen(token, request) for source in sources]
        keys, operands, powers = (torch.cat(parts) for parts in zip(*chosen, strict=True))
        rounding = operands - keys if operand is not None else torch.zeros_like(keys)
        num_heads = q.shape[1]
        if not len(keys):
            outs.append(q.new_zeros(num_heads, 512, dtype=torch.float64))
            lses.append(q.new_full((num_heads,), -math.inf, dtype=torch.float64))
            out_tolerances.append(torch.zeros_like(outs[-1]))
            lse_tolerances.append(torch.zeros_like(lses[-1]))
            continue
        queries = q[token].double()
        scores = queries @ keys.T * scale
        error = (keys.shape[1] + 4) * ACCUMULATE * abs(scale) * (queries.abs() @ keys.abs().T)
        error = (error + FUNCTION * (scores.abs() + 1) + (queries @ rounding.T * scale).abs()).amax(1)
        logits = scores
        if attn_sink is not None:
            logits = torch.cat((scores, attn_sink.double()[:, None]), dim=1)
        top = logits.amax(1, keepdim=True).clamp(max=1e300)
        logarithms = logits - top - torch.logsumexp(logits - top, 1, keepdim=True)  # also where weights underflow
        if attn_sink is not None:
            logarithms = torch.where((attn_sink == math.inf)[:, None], -math.inf, logarithms)[:, :-1]
        weights = logarithms.exp()
        n = len(keys) * ACCUMULATE
        out = weights @ keys[:, :512]
        relative = torch.full_like(error, unit + 2 * n + 4 * FUNCTION)
        e = (2 * error).clamp(max=1e300)
        off = (logarithms + (e + (-torch.expm1(-e)).log())[:, None]).clamp(max=0.0).exp()
        if attn_sink is not None:
            relative = relative + FUNCTION * attn_sink.double().abs().nan_to_num(0.0, 0.0)
        outs.append(out)
        lses.append(torch.logsumexp(scores, 1))
        own = weights @ keys[:, :512].abs() * relative[:, None] + off @ keys[:, :512].abs()
        own = own + weights @ rounding[:, :512].abs()
        values = keys[:, :512] if attn_sink is None else torch.cat((keys[:, :512], torch.zeros_like(keys[:1, :512])))
        mean = values.amax(0) - values.amin(0) + relative[:, None] * values.abs().amax(0)
        own = torch.fmin(own, mean + rounding[:, :512].abs().amax(0))
        if operand is not None and any(source.quantized for source in sources):
            own = own + FLOAT16_WEIGHT * ((weights * powers).amax(1, keepdim=True) / powers) @ keys[:, :512].abs()
        # numbers that underflow in float32 or in the output's type are lost
        floor = 2.0**-126 * keys.abs().amax() + (2.0**-25 if q.dtype == torch.float16 else 2.0**-134)
        out_tolerances.append(own + UNIT[q.dtype] * (out.abs() + own) + floor)
        lse_tolerances.append(error + n + 2 * FUNCTION * lses[-1].abs())
    if outs:
        result.out, result.lse = torch.stack(outs), torch.stack(lses)
        result.out_tolerance, result.lse_tolerance = torch.stack(out_tolerances), torch.stack(lse_tolerances)
    return result


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
