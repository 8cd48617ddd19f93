"""Every Triton kernel compiles for AMD's gfx942, and sparse attention for gfx950, whose matrix products are others.

A variant of each, none of which has run on such a GPU. `aot_jobs.py` compiles those of which it keeps no figures.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
from aot_results import kernels_of_the_sources, run_jobs

# bytes of local data share of one compute unit
SHARED_LIMITS = {"gfx942": 64 * 1024, "gfx950": 160 * 1024}


@pytest.mark.slow
def test_every_kernel_compiles_within_its_shared_memory() -> None:
    rows = run_jobs("--amd")
    assert not [row for row in rows if "error" in row]
    assert {row["kernel"] for row in rows if row["capability"] == "gfx942"} == kernels_of_the_sources()
    assert {row["capability"] for row in rows} == set(SHARED_LIMITS)
    assert not [row for row in rows if row["shared"] > SHARED_LIMITS[row["capability"]]]
