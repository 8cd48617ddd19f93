"""An out-of-tree attention backend of vLLM: the entry point `vllm.general_plugins`.

vLLM calls `register` in each of its processes. It names classes and imports none of them; a process that does not use
them pays for a few dictionary entries. Switches are words in `MLA_OPS_VLLM`, separated by commas:

    off         register nothing
    force       also with a version of vLLM that was not tested
    override    take the place of FLASHMLA_SPARSE and FLASHMLA, so that no flag is needed
    indexer     serve the indexers of our sparse layers, too; VLLM_BATCH_INVARIANT=1 does so by itself
    v4          take the place of the attention of DeepSeek-V4's layer for Hopper
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection

ENVIRONMENT_VARIABLE = "MLA_OPS_VLLM"
WORDS = ("off", "force", "override", "indexer", "v4")
TESTED = ("0.24", "0.33")  # major and minor
NAME = "MLA_OPS"

logger = logging.getLogger("mla_ops")


def is_tested(version: str) -> bool:
    return ".".join(version.split(".")[:2]) in TESTED


def parse_words(value: str) -> frozenset[str]:
    """The words of `MLA_OPS_VLLM`. One that is not known is an error: a misspelt switch must not pass for none."""
    words = frozenset(word.strip() for word in value.split(",") if word.strip())
    if not words <= set(WORDS):
        raise ValueError(f"{ENVIRONMENT_VARIABLE} must consist of {', '.join(WORDS)}, got '{value}'")
    return words


def words_asked() -> frozenset[str]:
    return parse_words(os.environ.get(ENVIRONMENT_VARIABLE, ""))


def register() -> None:
    """Makes the backends known to vLLM. It never raises: what goes wrong is a warning, and vLLM's own are used."""
    try:
        words = words_asked()
        if "off" not in words:
            _register(words)
    except Exception:
        logger.warning("mla_ops: its vLLM backends are not registered", exc_info=True)


def _register(words: Collection[str]) -> None:
    import vllm

    if not is_tested(vllm.__version__) and "force" not in words:
        logger.warning(
            "mla_ops: its vLLM backends are off: they were tested with vLLM %s, this is %s; %s=force turns them on",
            " and ".join(TESTED),
            vllm.__version__,
            ENVIRONMENT_VARIABLE,
        )
        return
    from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum, register_mla_prefill_backend
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    package = f"{__name__}.backends"
    for enum, add, path in (
        (AttentionBackendEnum, register_backend, f"{package}.MLAOpsBackend"),
        (MLAPrefillBackendEnum, register_mla_prefill_backend, f"{package}.MLAOpsPrefillBackend"),
    ):
        if not hasattr(enum, "register"):  # no names but those of the enumeration: its one free place
            taken = enum.CUSTOM.get_path() if enum.CUSTOM.is_overridden() else path
            if taken == path:
                add(enum.CUSTOM, path)
            else:
                logger.warning("mla_ops: CUSTOM of %s is taken by %s", enum.__name__, taken)
        elif NAME not in enum.__members__:
            add(NAME, path)
    if "override" in words:
        register_backend(AttentionBackendEnum.FLASHMLA_SPARSE, f"{package}.FlashMLASparseBackend")
        register_backend(AttentionBackendEnum.FLASHMLA, f"{package}.FlashMLABackend")
    if "v4" in words:
        from .v4 import install

        install()
