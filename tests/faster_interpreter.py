"""Triton's interpreter without work that it repeats: half of what interpreted kernels take.

A launch patches `triton.language`, and so does each call of a device function inside of it; each operation builds the
type of its block, and a table of NumPy's types. Here a launch patches once, and types are kept. No result changes.
"""

from __future__ import annotations

import functools
from typing import Any

import triton.language as tl
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
