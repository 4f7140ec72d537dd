"""torch.compile of the loaded forward: decoder layers, or what a candidate's parts leave of them.

Layers of one class share one compilation, since their weights and KV are inputs of the graph; attention stays one opaque operator.
Each candidate compiles a code object of its own (so that nothing of another candidate's is found or counted) into a cache folder of
its own, and in this thread, without worker processes. Every shape of more than one token is one dynamic graph.
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from engines.compile_cache import cache_folder, linked, variables
from engines.decoder.side import DecoderSide

_serial = itertools.count()


def compile_count() -> int:
    """Frames that dynamo compiled in this process, and kernels that Triton did; grows, never falls."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    frames = dynamo.counters["frames"]["total"] if dynamo is not None else 0
    return int(frames) + _triton_kernels()


def graphs_compiled() -> int:
    """Graphs for which inductor generated code in this process, since no cache had it; grows, never falls."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counts = dynamo.counters["inductor"] if dynamo is not None else {}
    return int(counts.get("fxgraph_cache_miss", 0)) + int(counts.get("fxgraph_cache_bypass", 0))


def compile_layers(side: DecoderSide, mode: str, claimed: frozenset[str], undo: ExitStack) -> int:
    """Swap in compiled forwards for whatever of the layers no part claims; they compile at the warm-up. How many modules."""
    side.step.bind_pool(side.net.model)
    return compile_modules(compilable(side, claimed), mode, undo, dynamic=side.net.dynamic)


def compile_in_this_thread() -> None:
    """No worker processes, and no thread that stays: the progress bar of a first compile would leave its monitor running, which is a
    thread that no candidate started and every proof of a clean engine would find. Nor are headers precompiled: that takes longer than the
    few kernels of a layer gain by it, and is done again wherever the code itself is found made."""
    import torch._inductor.config as inductor
    import tqdm  # type: ignore[import-untyped]

    inductor.compile_threads = 1
    inductor.cpp_cache_precompile_headers = False
    tqdm.tqdm.monitor_interval = 0


def compile_modules(modules: Sequence[torch.nn.Module], mode: str, undo: ExitStack, *, dynamic: bool) -> int:
    """Compiled forwards for modules, one compilation a class. How many modules."""
    compile_in_this_thread()
    fresh: dict[type, Callable[..., Any]] = {}
    for module in modules:
        kind = type(module)
        if kind not in fresh:
            fresh[kind] = torch.compile(_own_code(kind), dynamic=dynamic, mode=mode)
        module.__dict__["forward"] = types.MethodType(fresh[kind], module)
        undo.callback(module.__dict__.pop, "forward")
    return len(modules)


def compilable(side: DecoderSide, claimed: frozenset[str]) -> list[torch.nn.Module]:
    """The widest modules at or below a decoder layer that hold no claimed slot."""
    found = []
    for path in side.net.layer_paths:
        pending = [path]
        while pending:
            name = pending.pop()
            module = side.net.modules[name]
            below = f"{name}." if name else ""
            if not any(slot == name or slot.startswith(below) for slot in claimed):
                found.append(module)
            elif name not in claimed:
                pending += [below + child for child, _ in module.named_children()]
    return found


def _own_code(kind: type) -> Callable[..., Any]:
    """A copy of a class's forward with a code object of its own: dynamo's caches hang on that."""
    forward: Any = kind.forward  # type: ignore[attr-defined]
    code = forward.__code__.replace(co_name=f"{forward.__name__}_{next(_serial)}")
    copy = types.FunctionType(code, forward.__globals__, code.co_name, forward.__defaults__, forward.__closure__)
    copy.__kwdefaults__ = forward.__kwdefaults__
    copy.__qualname__ = forward.__qualname__
    return copy


def use_cache(side: DecoderSide, candidate_id: str, compiled: str, undo: ExitStack) -> None:
    """From now on whatever this side compiles is looked for in its candidate's own folder, and goes there (made when something does).

    `compiled`: a folder that a builder filled for the candidate, or empty."""
    folder = linked(Path(compiled)) if compiled else cache_folder(candidate_id)
    if compiled:
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
    side.environment = variables(folder)
    before = {name: os.environ.get(name) for name in side.environment}

    def restore() -> None:
        side.environment = {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    undo.callback(restore)
    side.activate()


_triton_count = 0


def _triton_kernels() -> int:
    """Kernels that Triton compiled since the first call of this; its hook is set once Triton is there."""
    triton = sys.modules.get("triton")
    knobs = getattr(triton, "knobs", None)
    if knobs is not None and knobs.runtime.jit_post_compile_hook is None:
        knobs.runtime.jit_post_compile_hook = _count_kernel
    return _triton_count


def _count_kernel(*_: Any, **__: Any) -> None:
    global _triton_count
    _triton_count += 1
