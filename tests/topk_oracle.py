"""Top-k by a stable sort of 64-bit integers, and rows of scores that are hard to select from."""

from __future__ import annotations

import torch


def keys_of(scores: torch.Tensor) -> torch.Tensor:
    """An int64 for each float32 that is larger where the score is: NaN the least, -0.0 as 0.0."""
    bits = (scores.float() + 0.0).view(torch.int32).long()
    keys = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return torch.where(scores.isnan(), torch.full_like(keys, -(2**33)), keys)


def topk_oracle(
    scores: torch.Tensor,
    k: int,
    row_starts: torch.Tensor | None = None,
    row_ends: torch.Tensor | None = None,
    sorted: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of the k best, ties to the lowest column, and how many there are."""
    num_rows, num_columns = scores.shape
    starts = torch.zeros(num_rows, dtype=torch.long) if row_starts is None else row_starts.long().cpu()
    ends = torch.full((num_rows,), num_columns) if row_ends is None else row_ends.long().cpu()
    starts, ends = starts.clamp(0, num_columns), ends.clamp(0, num_columns)
    indices = torch.full((num_rows, k), -1, dtype=torch.int32)
    lengths = (ends - starts).clamp(0, k).int()
    for row in range(num_rows):
        start, count = int(starts[row]), int(lengths[row])
        order = keys_of(scores[row, start : max(int(ends[row]), start)]).sort(descending=True, stable=True).indices
        chosen = order[:count].cpu() + start
        indices[row, :count] = (chosen if sorted else chosen.sort().values).int()
    return indices, lengths


SAMPLED_RUN = 16  # columns


def sampled_columns(num_columns: int, sampled: int) -> torch.Tensor:
    """Whether a sample of a row has each of its columns, for rows that begin at a multiple of 16 bytes."""
    runs, taken = num_columns // SAMPLED_RUN, sampled // SAMPLED_RUN
    column = torch.arange(num_columns)
    return torch.isin(column // SAMPLED_RUN, torch.arange(taken) * runs // taken)


def hard_rows(kind: str, num_rows: int, num_columns: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    """Scores of a kind in `KINDS`."""
    generator = torch.Generator(device=device).manual_seed(seed)
    normal = torch.randn(num_rows, num_columns, device=device, generator=generator)
    if kind == "normal":
        return normal
    if kind == "ten low bits":
        low = torch.randint(0, 1024, normal.shape, device=device, generator=generator, dtype=torch.int32)
        return (low | 0x3F900000).view(torch.float32)
    if kind == "equal":
        return torch.full_like(normal, 0.5)
    if kind == "mostly zeros":
        return normal.sub_(2.2).relu_() * torch.where(normal.signbit(), -1.0, 1.0)
    if kind == "ascending":
        return torch.arange(num_columns, device=device).float().sub_(num_columns / 2).expand(num_rows, -1).contiguous()
    if kind == "descending":
        return hard_rows("ascending", num_rows, num_columns, device=device).neg_()
    if kind == "special":
        values = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42, -1e-42, 3e38, -3e38, 1.0])
        values = torch.cat([values, torch.tensor([-1, 0x7F800001], dtype=torch.int32).view(torch.float32)]).to(device)
        picked = torch.randint(0, len(values), normal.shape, device=device, generator=generator)
        return torch.where(normal > 0, values[picked], normal)
    if kind == "nan":
        return torch.where(normal > 1.5, normal, torch.nan)
    if kind == "outlier":
        normal[:, num_columns // 2] = 3e38
        return normal.where(normal > 1e38, normal * 1e-30)
    if kind == "best last":
        normal[:, -num_columns // 8 :] += 20
        return normal
    if kind == "neighbours alike":  # as near tokens score, so a sample of runs of columns says little
        alike = normal[:, : num_columns // 64 + 1].repeat_interleave(64, dim=1)[:, :num_columns]
        return alike + torch.randn(normal.shape, device=device, generator=generator) / 2
    if kind == "unlike its sample":  # peaks of a group each, few of which a sample sees
        return normal + 10 * (torch.arange(num_columns, device=device) // 4 % 37 == 5)
    raise ValueError(kind)


KINDS = (
    "normal",
    "ten low bits",
    "equal",
    "mostly zeros",
    "ascending",
    "descending",
    "special",
    "nan",
    "outlier",
    "best last",
    "neighbours alike",
    "unlike its sample",
)


def by_planes(scores: torch.Tensor) -> torch.Tensor:
    """Scores as planes.cuh has them, `[num_rows, columns up to a multiple of 64]`; NaN is the one that an SM makes."""
    num_rows, num_columns = scores.shape
    padded = torch.full((num_rows, -(-num_columns // 64) * 64), torch.nan)
    padded[:, :num_columns] = scores
    bits = padded.view(torch.int32).masked_fill(padded.isnan(), 0x7FFFFFFF).view(num_rows, -1, 4, 2, 8)
    first, second = bits[:, :, :, 0], bits[:, :, :, 1]
    upper, lower = second & -65536 | first >> 16 & 65535, second << 16 | first & 65535
    words = torch.cat((upper.flatten(2), lower.flatten(2)), dim=2)
    return words.flatten(1).contiguous().view(torch.float32)


def of_planes(words: torch.Tensor) -> torch.Tensor:
    """The scores of `by_planes`."""
    upper, lower = words.view(torch.int32).view(words.shape[0], -1, 2, 4, 8).unbind(2)
    first, second = upper << 16 | lower & 65535, upper & -65536 | lower >> 16 & 65535
    return torch.stack((first, second), dim=3).flatten(1).contiguous().view(torch.float32)
