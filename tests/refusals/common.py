"""What the tables of refusals are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

INT32 = torch.int32

Arguments = dict[str, Any]
# op, what is wrong, the changed arguments, exception, words of the message
Refusal = tuple[str, str, Callable[[Arguments], Arguments], type[Exception], tuple[str, ...]]


def narrower(name: str, dim: int = 0) -> Callable[[Arguments], Arguments]:
    """One element less of `name` along `dim`."""
    return lambda given: {name: given[name].narrow(dim, 0, given[name].shape[dim] - 1).contiguous()}
