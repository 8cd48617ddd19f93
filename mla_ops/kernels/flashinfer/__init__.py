"""Lowerings of an installed FlashInfer, all on request. It is imported by the first call that needs it."""

from __future__ import annotations

from . import dense, sparse

LOWERINGS = {**dense.LOWERINGS, **sparse.LOWERINGS}
