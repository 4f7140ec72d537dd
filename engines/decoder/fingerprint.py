"""The state of a process that a candidate must leave as it was: torch's flags, random states, callables, environment, threads.

What is here reads only. Whether two fingerprints are alike enough is the judge's to say; `probes` and `flags` must be equal,
the counts may only not grow without bound.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType

import numpy as np
import torch

from engines.compile_cache import CACHE_VARIABLES
from hotpass.canonical import content_hash

WATCHED_TENSOR_METHODS = (
    "__matmul__", "__add__", "__mul__", "__getitem__", "__setitem__", "argmax", "copy_", "float", "fill_", "masked_fill_",
    "pow", "mean", "reshape", "to", "transpose", "view", "index_select", "item", "tolist", "data_ptr",
)  # fmt: skip
WATCHED_MODULES = ("torch.nn.functional", "torch", "time", "torch.cuda", "transformers.integrations.sdpa_attention")
ENGINE_MODULES = (
    "engines.decoder.proof", "engines.decoder.structure",
    "engines.child", "engines.wire", "engines.decoder.attention", "engines.decoder.batch", "engines.decoder.fingerprint",
    "engines.decoder.install", "engines.decoder.kv", "engines.decoder.placing", "engines.decoder.program", "engines.decoder.reference",
    "engines.decoder.serve", "engines.decoder.side", "engines.decoder.windows", "engines.module.inputs", "engines.module.outputs",
    "engines.module.program", "engines.module.side", "engines.vllm.compiled", "engines.vllm.extension", "engines.vllm.program",
    "engines.vllm.rows", "engines.vllm.serving", "engines.vllm.step", "engines.vllm.steps", "engines.vllm.tree",
)  # fmt: skip
"""Those that run, count and check a candidate: in them whatever may be replaced is watched, and the methods of their classes."""


def watched_callables(classes: Iterable[type], modules: Sequence[str] = ()) -> dict[str, int]:
    """Name → identity of what a candidate could replace to change how others run or are timed. `classes`: those of the trees;
    `modules`: looked into as the engine's own are."""
    found: dict[str, int] = {}
    for name in WATCHED_MODULES:
        module = sys.modules.get(name)
        if module is not None:
            found.update(_functions(module))
    for name in (*ENGINE_MODULES, *modules):
        module = sys.modules.get(name)
        if module is not None:
            found.update(_whole(module))
    for method in WATCHED_TENSOR_METHODS:
        found[f"torch.Tensor.{method}"] = _identity(torch.Tensor, method)
    for kind in {*classes, torch.nn.Module, torch.nn.Linear, torch.nn.Embedding}:
        for method in ("forward", "__call__", "_call_impl", "__getattr__", "__setattr__"):
            found[f"{kind.__module__}.{kind.__qualname__}.{method}"] = _identity(kind, method)
    return found


def patched(before: Mapping[str, int], now: Mapping[str, int]) -> list[str]:
    """Names whose callable is another than before. New names are none: modules load parts of themselves lazily."""
    return sorted(name for name, identity in before.items() if now.get(name) != identity)


def flags(born: Mapping[str, int], classes: Iterable[type], modules: Sequence[str] = ()) -> dict[str, str]:
    """Process-wide state as text. `born` is `watched_callables` of the same at load."""
    return {
        "patched": ", ".join(patched(born, watched_callables(classes, modules))),
        "default_dtype": str(torch.get_default_dtype()),
        "default_device": str(torch.get_default_device()),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "tf32": f"{torch.backends.cuda.matmul.allow_tf32} {torch.backends.cudnn.allow_tf32}",
        "mkldnn": str(torch.backends.mkldnn.enabled),
        "flush_denormal": str(_flushes_denormals()),
        "grad": f"{torch.is_grad_enabled()} {torch.is_inference_mode_enabled()}",
        "interop_threads": str(torch.get_num_interop_threads()),
        "profile_hooks": f"{sys.getprofile() is not None} {sys.gettrace() is not None}",
        "module_hooks": str(_global_module_hooks()),
        "random": _random_state(),
        "environment": _environment(),
        "affinity": _affinity(),
    }


def threads_alive() -> int:
    """Threads of this process as the kernel counts them; Python's own where it does not."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return threading.active_count()


def start_worker_threads(most: int, then: int) -> None:
    """Bring torch's pool to its largest size now: workers started later, for a candidate with more threads, would count as left
    behind. Then back to `then` threads."""
    torch.set_num_threads(most)
    torch.ones(1 << 17).add_(1.0)
    torch.set_num_threads(then)


def children_alive() -> int:
    """Child processes of this one, the ended but not awaited included."""
    try:
        tasks = os.listdir("/proc/self/task")
        return sum(len(_text(f"/proc/self/task/{task}/children").split()) for task in tasks)
    except OSError:
        return 0


def resident_bytes() -> int:
    """Resident memory, shared pages included."""
    try:
        return int(_text("/proc/self/statm").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # that of the listing itself
    except OSError:
        return 0


def logits_digest(logits: Iterable[torch.Tensor]) -> str:
    """SHA-256 of the values, bit for bit."""
    digest = hashlib.sha256()
    for tensor in logits:
        digest.update(tensor.detach().to("cpu", torch.float32).contiguous().numpy().tobytes())
    return digest.hexdigest()


def _functions(module: ModuleType) -> Iterator[tuple[str, int]]:
    for name, value in vars(module).items():
        kind_counts = (
            not isinstance(value, type) or module.__name__ == "torch.cuda"
        )  # torch.Storage follows the default dtype
        if callable(value) and kind_counts and not name.startswith("_"):
            yield f"{module.__name__}.{name}", id(value)


def _whole(module: ModuleType) -> Iterator[tuple[str, int]]:
    """Functions, classes and other modules under their names in this one, and functions in the classes that it defines."""
    for name, value in vars(module).items():
        if callable(value) or isinstance(value, ModuleType):
            yield f"{module.__name__}.{name}", id(value)
        if isinstance(value, type) and value.__module__ == module.__name__:
            for method, function in vars(value).items():
                if callable(function) or isinstance(function, (classmethod, property)):
                    yield f"{module.__name__}.{name}.{method}", id(function)


def _identity(kind: type, method: str) -> int:
    for base in kind.__mro__:
        if method in base.__dict__:
            return id(base.__dict__[method])
    return 0


def _random_state() -> str:
    name, keys, *rest = np.random.get_state(legacy=True)
    parts = [repr(random.getstate()), repr(name), np.asarray(keys).tobytes().hex(), repr(rest)]
    parts.append(torch.get_rng_state().numpy().tobytes().hex())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        parts += [each.numpy().tobytes().hex() for each in torch.cuda.get_rng_state_all()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _environment() -> str:
    """Without the variables that the compilers set: folders of caches, and an address that inductor hands on."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in CACHE_VARIABLES and not name.startswith("_TORCHINDUCTOR")
    }
    return content_hash(kept)


def _affinity() -> str:
    return ",".join(map(str, sorted(os.sched_getaffinity(0)))) if hasattr(os, "sched_getaffinity") else ""


def _flushes_denormals() -> bool:
    tiny = torch.tensor([1e-40]) * 1.0
    return bool(tiny.item() == 0.0)


def _global_module_hooks() -> int:
    from torch.nn.modules import module as hooks

    names = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
    return sum(len(getattr(hooks, name, ())) for name in names)


def _text(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()
