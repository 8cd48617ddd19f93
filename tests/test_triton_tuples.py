"""Integers that kernels take in tuples: other values compile nothing."""

from __future__ import annotations

import os

import fresh
import pytest

pytest.importorskip("triton")

# Triton decides at import whether it interprets, so another process asks its binder, of every kernel.
PROGRAM = """
import importlib, pkgutil
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
import mla_ops.kernels.triton as kernels
from mla_ops.kernels.triton.common import SizedFunction


class Hopper:
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def specialization(kernel, bind, number):
    values = []
    for parameter in kernel.params:
        if parameter.name in kernel.tuples:
            values.append((number,) * len(kernel.tuples[parameter.name]))
        elif parameter.annotation_type == "fp32":
            values.append(0.5)
        else:
            values.append(number if parameter.annotation_type else torch.zeros(1))
    return bind(*values)[1]


driver.set_active(Hopper())
names = [found.name for found in pkgutil.iter_modules(kernels.__path__)]
modules = [importlib.import_module(f"{kernels.__name__}.{name}") for name in names]
found = {id(each): each for module in modules for each in vars(module).values() if isinstance(each, SizedFunction)}
assert len(found) > 5, found
for kernel in found.values():
    *_, bind = kernel.create_binder()
    usual = specialization(kernel, bind, 17)
    for parameter in kernel.params:
        if parameter.name in kernel.tuples:
            types, values = usual[parameter.num]
            assert set(types) <= {"i32", "i64"} and not any(values), (kernel, parameter.name, types, values)
    for number in (0, 1, 16, 2**40):
        assert list(map(repr, specialization(kernel, bind, number))) == list(map(repr, usual)), (kernel, number)
"""


def test_integers_in_tuples_are_not_specialised() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = fresh.run("-c", PROGRAM, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
