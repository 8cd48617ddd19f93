"""More than one GPU: how DTensor splits the ops, and contexts over ranks. Importing this registers the rules."""

from .context_parallel import ContextParallel
from .sharding import register_sharding_rules

__all__ = ["ContextParallel", "register_sharding_rules"]

register_sharding_rules()
