"""torch.compile without work that no test looks at, a third of what compilations take.

pytest listens to every logger that does not propagate, and torch's trace of compilations writes down all graphs and
stacks once anybody listens. Dynamo measures the time of each set of guards, with the caches emptied before. Inductor
writes each loop for vectors, and once more for the numbers that fill none.
"""

from __future__ import annotations

import logging

import torch._dynamo.guards
import torch._inductor.config


def install() -> None:
    """Call it before pytest runs a test."""
    logging.getLogger("torch.__trace").propagate = True
    if hasattr(torch._dynamo.guards, "profile_guard_manager"):
        torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # type: ignore[assignment]
    torch._inductor.config.cpp.simdlen = 1
