"""Parameter structs of kernels: a `ctypes.Structure` beside the C++ struct, with the same names in the same order.

    class Params(ctypes.Structure):
        _fields_ = [("x", POINTER), ("n", ctypes.c_int)]

    pack = packer(Params)
    params = pack(x.data_ptr(), n)

tests/test_aot_cuda.py has the compiler compare every offset.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

POINTER = ctypes.c_uint64
CODES: dict[type, str] = {
    ctypes.c_int: "i",
    ctypes.c_uint: "I",
    ctypes.c_int64: "q",
    ctypes.c_uint64: "Q",
    ctypes.c_float: "f",
}


class Field(NamedTuple):
    """A scalar of a struct, or an array of chars.

    Attributes:
        name: as C++ writes it, e.g. "caches[1].rows".
        offset: from the beginning of the struct, bytes.
        size: bytes.
        code: of the module struct.
    """

    name: str
    offset: int
    size: int
    code: str


def fields_of(kind: Any, name: str = "", offset: int = 0) -> Iterator[Field]:
    """Every field, those of nested structs and arrays one by one. Names that begin with "_" are padding."""
    if issubclass(kind, ctypes.Structure):
        for inner, inner_kind in kind._fields_:
            if not inner.startswith("_"):
                path = f"{name}.{inner}" if name else inner
                yield from fields_of(inner_kind, path, offset + getattr(kind, inner).offset)
    elif not issubclass(kind, ctypes.Array):
        yield Field(name, offset, ctypes.sizeof(kind), CODES[kind])
    elif kind._type_ is ctypes.c_char:
        yield Field(name, offset, ctypes.sizeof(kind), f"{kind._length_}s")
    else:
        for i in range(kind._length_):
            yield from fields_of(kind._type_, f"{name}[{i}]", offset + i * ctypes.sizeof(kind._type_))


def packer(kind: type[ctypes.Structure]) -> Callable[..., bytes]:
    """A function that takes a value for each of `fields_of(kind)`, in order, and returns the struct's bytes.

    An instance made with keywords takes 2 us more in every launch.
    """
    layout, end = ["<"], 0
    for field in fields_of(kind):
        layout.append(f"{field.offset - end}x{field.code}")
        end = field.offset + field.size
    return struct.Struct("".join(layout) + f"{ctypes.sizeof(kind) - end}x").pack
