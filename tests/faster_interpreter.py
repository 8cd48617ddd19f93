"""Triton's interpreter without work that it repeats: a quarter of what interpreted kernels take.

A launch patches `triton.language`, and so does each call of a device function inside of it; each operation builds the
type and the shape of its block, and a table of NumPy's types; each sum of integers is computed a second time, for an
assertion that nobody makes. Here a launch patches once, and types are kept. No result changes.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class Kept:
    """A patch that another one, of the launch, undoes."""

    def restore(self) -> None:
        pass


def patch_once(patch_language: Any) -> Any:
    """`_patch_lang`, which does nothing inside of a launch that has patched the modules of the function."""
    patched: set[str] = set()

    @functools.cache
    def modules_of(function: Any) -> frozenset[str]:
        present = list(function.__globals__.values())
        return frozenset(module.__name__ for module in (tl, tl.core) if any(value is module for value in present))

    def patch(function: Any) -> Any:
        if modules_of(function) <= patched:
            return Kept()
        scope = patch_language(function)
        patched.update(modules_of(function))
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch


def keep_types(make: Any) -> Any:
    """`block_type.__init__`, which copies the type that was made of the same element and shape."""
    made: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not tl.core.dtype:  # a pointer, which has no hash
            return make(self, element_ty, shape)
        key = element_ty, *(getattr(size, "value", size) for size in shape)
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])
        return None

    return init


def keep_shapes(make: Any) -> Any:
    """`tensor.__init__`, which makes a tuple of constants of the shape."""
    made: dict[tuple[int, ...], dict[str, Any]] = {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        key = tuple(kind.shape) if kind.is_block() else ()
        if key not in made:
            make(self, handle, kind)
            made[key] = {"shape": self.shape, "numel": self.numel}
        vars(self).update(made[key], handle=handle, type=kind, dtype=kind.scalar)

    return init


def unwrap_by_type(unwrap: Any) -> Any:
    """`_unwrap_if_constexpr`, which asks most of its arguments four times what they are."""
    plain = (int, float, bool, str, type(None), tl.core.dtype)

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.core.constexpr else unwrap(value)

    return unwrap_quickly


def skip_equal_shapes(broadcast: Any) -> Any:
    """`broadcast_impl_value`, which makes and compares tuples of blocks of one shape, too."""

    def broadcast_unequal(self: Any, one: Any, other: Any) -> Any:
        if one.type.is_block() and other.type.is_block() and one.type.shape.values == other.type.shape.values:
            return one, other
        return broadcast(self, one, other)

    return broadcast_unequal


def skip_unread_checks(check: Any) -> Any:
    """`binary_op_sanitize_overflow_impl`, whose ten operations end in an assertion that is made in debug mode only."""
    return lambda semantic, *rest: check(semantic, *rest) if semantic.builder.options.debug else None


def keep_numpy_types(find: Any) -> Any:
    """`_get_np_dtype`, which makes a table in each call."""
    kept = functools.cache(find)
    return lambda dtype: kept(dtype) if type(dtype) is tl.core.dtype else find(dtype)


def install() -> None:
    """Takes effect for kernels that are defined before and after. Another Triton may have other internals."""
    if not hasattr(interpreter, "_patch_lang") or not hasattr(interpreter, "_get_np_dtype"):
        return
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = keep_numpy_types(interpreter._get_np_dtype)
    tl.core.block_type.__init__ = keep_types(tl.core.block_type.__init__)
    tl.core.tensor.__init__ = keep_shapes(tl.core.tensor.__init__)
    tl.core._unwrap_if_constexpr = unwrap_by_type(tl.core._unwrap_if_constexpr)
    TritonSemantic.broadcast_impl_value = skip_equal_shapes(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_sanitize_overflow_impl = skip_unread_checks(
        TritonSemantic.binary_op_sanitize_overflow_impl
    )
