"""torch.compile without work that no test looks at, a third of what compilations take.

Dynamo measures the time of each set of guards, with the caches emptied before, looks for expressions that guards share,
and collects garbage behind each graph. Inductor writes each loop for vectors, and once more for the numbers that fill
none; before the first one it compiles a program for each kind of vector and runs it, to learn which this CPU has.
"""

from __future__ import annotations

import torch._dynamo.config
import torch._dynamo.guards
import torch._inductor.config
import torch._inductor.cpu_vec_isa


def install() -> None:
    """Call it before pytest runs a test."""
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    if hasattr(torch._dynamo.guards, "PyExprCSEPass"):
        torch._dynamo.guards.PyExprCSEPass.count = lambda *_: None
        torch._dynamo.guards.PyExprCSEPass.replace = lambda _, guard: ([], guard)
    if hasattr(torch._dynamo.config, "run_gc_after_compile"):
        torch._dynamo.config.run_gc_after_compile = False
    torch._inductor.config.cpp.simdlen = 1
    torch._inductor.cpu_vec_isa.valid_vec_isa_list = list
