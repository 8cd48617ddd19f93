"""Triton's interpreter without work that it repeats, half of what interpreted kernels take.

A launch patches `triton.language`, and so does each call of a device function inside of it; each operation finds the
common type of its operands, makes blocks of its constants, builds the type and the shape of its block, and a table of
NumPy's types; each sum of integers is computed a second time, for an assertion that nobody makes. Here a launch patches
once; types and constants are kept, and NumPy broadcasts. No result changes, but for the order in which NumPy adds up
products of matrices that lie otherwise in memory.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
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
        key = element_ty.name, *[size if type(size) is int else getattr(size, "value", size) for size in shape]
        if key not in made:
            make(self, element_ty, shape)
            made[key] = dict(vars(self))
        vars(self).update(made[key])

    return init


def keep_own_element(make: Any) -> Any:
    """`with_element_ty`, which makes the type that it has, too. Nobody writes to a type, so one serves all."""
    made: dict[Any, Any] = {}

    def with_element_ty(self: Any, kind: Any) -> Any:
        if kind is self.element_ty:
            return self
        key = kind.name, *self.shape.values
        if key not in made:
            made[key] = make(self, kind)
        return made[key]

    return with_element_ty


def keep_shapes(make: Any) -> Any:
    """`tensor.__init__`, which makes a tuple of constants of the shape."""
    made: dict[str, dict[str, Any]] = {}

    def init(self: Any, handle: Any, kind: Any) -> None:
        name = kind.name
        if name not in made:
            make(self, handle, kind)
            made[name] = {**vars(self), "handle": None}
        members = vars(self)
        members.update(made[name])
        members["handle"] = handle

    return init


def expand_by_name(expand: Any) -> Any:
    """`expand_dims`, which counts dims and makes a type."""
    made: dict[tuple[str, int], tuple[Any, Any]] = {}

    def expand_quickly(self: Any, value: Any, axis: int) -> Any:
        if type(value.type) is not tl.core.block_type or axis < 0:
            return expand(self, value, axis)
        key = value.type.name, axis
        if key not in made:
            made[key] = expand(self, value, axis).type, (slice(None),) * axis + (None,)
        kind, index = made[key]
        handle = value.handle
        return tl.core.tensor(interpreter.TensorHandle(handle.data[index], handle.dtype.scalar), kind)

    return expand_quickly


def unwrap_by_type(unwrap: Any) -> Any:
    """`_unwrap_if_constexpr`, which asks most of its arguments four times what they are."""
    plain = (int, float, bool, str, type(None), tl.core.dtype, tl.core.tensor)

    def unwrap_quickly(value: Any) -> Any:
        kind = type(value)
        if kind in plain:
            return value
        return value.value if kind is tl.core.constexpr else unwrap(value)

    return unwrap_quickly


def keep_operands(check: Any) -> Any:
    """`binary_op_type_checking_impl`, which finds out once what becomes of operands of two types.

    A number beside a tensor becomes an array that is made once and cannot be written. What is smaller than the result
    gets its type and stays as it is: NumPy broadcasts it in the operation.
    """
    kinds: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    numbers: dict[tuple[Any, ...], Any] = {}
    wider: dict[tuple[str, str], tuple[Any, Any]] = {}

    def widen(left: Any, right: Any) -> tuple[Any, Any]:
        shapes = [tuple(kind.shape.values) if kind.is_block() else () for kind in (left, right)]
        common = np.broadcast_shapes(*shapes)
        return tuple(
            None if shape == common else tl.core.block_type(kind.scalar, list(common))
            for kind, shape in zip((left, right), shapes, strict=True)
        )

    def broadcast(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        names = lhs.type.name, rhs.type.name
        if names not in wider:
            wider[names] = widen(lhs.type, rhs.type)
        left, right = wider[names]
        if left is not None:
            lhs = tl.core.tensor(lhs.handle, left)
        return lhs, rhs if right is None else tl.core.tensor(rhs.handle, right)

    def check_quickly(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        if named:
            return check(self, lhs, rhs, *options, **named)
        left, right = type(lhs), type(rhs)
        if left is tl.core.tensor is right:
            before = lhs.type.scalar, rhs.type.scalar
            key = before[0].name, before[1].name, *options
            if key not in kinds:
                after = [side.type.scalar for side in check(self, lhs, rhs, *options)]
                kinds[key] = tuple(None if a.name == b.name else b for a, b in zip(before, after, strict=True))
            to_left, to_right = kinds[key]
            lhs = lhs if to_left is None else self.cast(lhs, to_left)
            return broadcast(lhs, rhs if to_right is None else self.cast(rhs, to_right))
        tensor, number = (lhs, rhs) if left is tl.core.tensor else (rhs, lhs)
        # 0.0 and -0.0 are equal
        if type(number) is not int and not (type(number) is float and number):
            return check(self, lhs, rhs, *options)
        key = number, type(number), tensor.type.name, tensor is lhs, *options
        if key not in numbers:
            both = check(self, lhs, rhs, *options)
            if both[0] is not tensor and both[1] is not tensor:  # it was converted
                return both
            block = both[1] if both[0] is tensor else both[0]
            block.handle.data = block.handle.data.ravel()[:1].copy()
            block.handle.data.flags.writeable = False
            numbers[key] = block
        return (tensor, numbers[key]) if tensor is lhs else (numbers[key], tensor)

    return check_quickly


def keep_scalars(convert: Any) -> Any:
    """`to_tensor`, which asks a tensor whether it is a number first."""
    made: dict[tuple[Any, ...], Any] = {}

    def convert_quickly(self: Any, x: Any, check_type: bool = True) -> Any:
        kind = type(x)
        if kind is tl.core.tensor:
            return x
        if kind is not int and not (kind is float and x):
            return convert(self, x, check_type)
        if (x, kind) not in made:
            made[x, kind] = convert(self, x, check_type)
            made[x, kind].handle.data.flags.writeable = False
        return made[x, kind]

    return convert_quickly


def patch_plainly(patch_member: Any) -> Any:
    """`_patch_attr`, whose functions filter their arguments and go through one that asks for the one that it adds."""
    asking = tl.core.builtin(lambda: None).__code__

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        plain = member.__wrapped__ if getattr(member, "__code__", None) is asking else member
        patch_member(obj, name, member, builder, scope)
        semantic = TritonSemantic(builder)

        def call(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return plain(*args, **named)

        setattr(obj, name, call)

    return patch


def compare_names_first(equal: Any) -> Any:
    """`dtype.__eq__`, which looks for constants first."""

    def equal_quickly(self: Any, other: Any) -> Any:
        if self is other:
            return True
        return self.name == other.name if type(other) is type(self) is tl.core.dtype else equal(self, other)

    return equal_quickly


def compare_shapes_as_lists(equal: Any) -> Any:
    """`block_type.__eq__`, which makes a tuple of constants of the other's shape."""

    def equal_quickly(self: Any, other: Any) -> Any:
        if type(other) is type(self) is tl.core.block_type:
            return self.shape.values == other.shape.values and self.element_ty == other.element_ty
        return equal(self, other)

    return equal_quickly


def check_size_of_numbers(check: Any) -> Any:
    """`_validate_np_data_size`, which asks what a pointer is first."""

    def fits(array: Any, kind: Any) -> bool:
        if type(kind) is tl.core.dtype:
            bits = array.itemsize * 8
            return bits == 8 or bits <= kind.primitive_bitwidth
        return check(array, kind)

    return fits


def hold(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """`TensorHandle.__init__` without the size of the numbers, which operations have checked."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


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
    found: dict[str, Any] = {}

    def find_once(kind: Any) -> Any:
        scalar = kind.element_ty if type(kind) is tl.core.block_type else kind
        if type(scalar) is not tl.core.dtype:
            return find(kind)
        if scalar.name not in found:
            found[scalar.name] = find(scalar)
        return found[scalar.name]

    return find_once


def cast_by_names(cast: Any) -> Any:
    """`cast`, which asks of both types what they are, up to thirty times, before it has NumPy convert the numbers."""
    floats = {"fp16", "bf16", "fp32", "fp64"}
    simple: dict[tuple[str, str], bool] = {}

    def is_simple(old: Any, new: Any) -> bool:
        return (new.name in floats or (new.is_int() and not new.is_bool())) and (
            old.is_int() or old.name in ("fp32", "fp64") or (old.name in floats and new.name == "fp32")
        )

    def cast_quickly(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        before, scalar = value.type, kind.scalar
        names = before.scalar.name, scalar.name
        if names[0] == names[1]:
            return value
        if names not in simple:
            simple[names] = is_simple(before.scalar, scalar)
        if rounding is not None or not simple[names]:
            return cast(self, value, kind, rounding)
        after = before.with_element_ty(scalar) if type(before) is tl.core.block_type else scalar
        return tl.core.tensor(self.builder.cast_impl(value.handle, after), after)

    return cast_quickly


def cut_off(convert: Any) -> Any:
    """`_convert_float`, which makes bfloat16 of float32 bit by bit. It cuts off all numbers but the smallest."""

    def convert_quickly(numbers: Any, kind: Any, other: Any, rounding: Any) -> Any:
        if (kind.name, other.name, rounding) == ("fp32", "bf16", None):
            bits = numbers.view(np.uint32)
            if not ((bits & 0x7F800000 == 0) & (bits & 0x7FFFFF != 0)).any():
                return (bits >> 16).astype(np.uint16)
        return convert(numbers, kind, other, rounding)

    return convert_quickly


def install() -> None:
    """Takes effect for kernels that are defined before and after. Another Triton may have other internals."""
    names = ("_patch_lang", "_patch_attr", "_get_np_dtype", "_convert_float", "_validate_np_data_size")
    if not all(hasattr(interpreter, name) for name in names) or interpreter._patch_attr.__code__.co_argcount != 5:
        return
    interpreter._patch_lang = patch_once(interpreter._patch_lang)
    interpreter._patch_attr = patch_plainly(interpreter._patch_attr)
    interpreter._convert_float = cut_off(interpreter._convert_float)
    interpreter._get_np_dtype = keep_numpy_types(interpreter._get_np_dtype)
    interpreter._validate_np_data_size = check_size_of_numbers(interpreter._validate_np_data_size)
    interpreter.TensorHandle.__init__ = hold
    tl.core.dtype.__eq__ = compare_names_first(tl.core.dtype.__eq__)
    tl.core.block_type.__eq__ = compare_shapes_as_lists(tl.core.block_type.__eq__)
    tl.core.dtype.__hash__ = lambda kind: hash(kind.name)
    TritonSemantic.to_tensor = keep_scalars(TritonSemantic.to_tensor)
    TritonSemantic.binary_op_type_checking_impl = keep_operands(TritonSemantic.binary_op_type_checking_impl)
    TritonSemantic.expand_dims = expand_by_name(TritonSemantic.expand_dims)
    TritonSemantic.cast = cast_by_names(TritonSemantic.cast)
    tl.core.block_type.__init__ = keep_types(tl.core.block_type.__init__)
    tl.core.block_type.with_element_ty = keep_own_element(tl.core.block_type.with_element_ty)
    tl.core.tensor.__init__ = keep_shapes(tl.core.tensor.__init__)
    tl.core._unwrap_if_constexpr = unwrap_by_type(tl.core._unwrap_if_constexpr)
    TritonSemantic.broadcast_impl_value = skip_equal_shapes(TritonSemantic.broadcast_impl_value)
    TritonSemantic.binary_op_sanitize_overflow_impl = skip_unread_checks(
        TritonSemantic.binary_op_sanitize_overflow_impl
    )
