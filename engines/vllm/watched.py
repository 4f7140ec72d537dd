"""Which of vLLM's modules a clean engine's proof looks into: those whose code runs, counts or answers when a step or a request does.

Noted once, after the load and its first steps: what vLLM imports later is no candidate's doing, and is not watched. What is here reads
only; how a module is looked into is `engines.decoder.fingerprint`'s.
"""

from __future__ import annotations

import sys

PREFIXES = (
    "vllm._custom_ops", "vllm.forward_context", "vllm.compilation", "vllm.distributed", "vllm.entrypoints.llm",
    "vllm.model_executor", "vllm.sampling_params", "vllm.utils", "vllm.v1",
)  # fmt: skip


def watched_modules() -> tuple[str, ...]:
    """Names of vLLM's modules that are loaded now and belong to what computes."""
    return tuple(sorted(name for name in sys.modules if name.startswith(PREFIXES)))
