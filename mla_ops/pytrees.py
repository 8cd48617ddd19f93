"""Classes of tensors that `torch.export` takes as arguments, and saves with the program."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils import _pytree

T = TypeVar("T")


def exportable(cls: type[T]) -> type[T]:
    """Names a dataclass or named tuple, so that an exported program which takes it can be saved and loaded.

    Sizes are leaves, which export keeps. The process that loads the program imports the class's module first.
    """
    name = f"mla_ops.{cls.__name__}"
    if issubclass(cls, tuple):
        _pytree._register_namedtuple(cls, serialized_type_name=name)
    else:
        _pytree.register_dataclass(cls, serialized_type_name=name)
    # a program is saved with its example arguments, which are loaded again
    torch.serialization.add_safe_globals([cls])
    return cls
