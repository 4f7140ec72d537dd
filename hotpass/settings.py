"""Settings of the decoder engine: values that the engine itself takes, with what each may hold and what a change costs.

The space of the search, `--set K=V` and the engine all read this one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hotpass.errors import InputError, nearest
from hotpass.records.candidate import Numerics, Reload, Value


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    name: str
    default: Value
    """`None` means: the engine decides at load (threads = physical cores)."""
    values: tuple[Value, ...]
    """Values to search over; a person may give any value of the same type that passes `check`."""
    reload: Reload
    device: str
    """`cpu`, `cuda` or `any`."""
    numerics: Mapping[Value, Numerics] = field(default_factory=dict)
    """Class of a value where it is not bit-identical."""
    doc: str = ""


SETTINGS: tuple[Setting, ...] = (
    Setting(
        name="threads", default=None, values=(1, 2, 4, 8), reload=Reload.HOT, device="cpu",
        numerics={}, doc="Intra-op threads of torch and of C++ parts; at most the physical cores.",
    ),
    Setting(
        name="compile_mode", default="none", values=("none", "default", "max-autotune-no-cudagraphs"),
        reload=Reload.RECAPTURE, device="any",
        numerics={"default": Numerics.TOLERANCE, "max-autotune-no-cudagraphs": Numerics.TOLERANCE},
        doc="torch.compile of the loaded forward (not of parts that claim `model`).",
    ),
    Setting(
        name="cuda_graphs", default=False, values=(False, True), reload=Reload.RECAPTURE, device="cuda",
        doc="Capture the decode step of each shape bucket and replay it.",
    ),
    Setting(
        name="kv_dtype", default="auto", values=("auto", "float32", "bfloat16"), reload=Reload.REKV, device="any",
        numerics={"bfloat16": Numerics.LOSSY, "float32": Numerics.TOLERANCE},
        doc="Storage type of the KV cache; auto is the model's declared dtype.",
    ),
    Setting(
        name="chunk_tokens", default=512, values=(64, 128, 256, 512, 1024, 2048), reload=Reload.HOT, device="any",
        numerics={}, doc="Prefill tokens computed in one step of the serving loop, at most.",
    ),
    Setting(
        name="max_batch", default=0, values=(0, 1, 2, 4, 8, 16, 32), reload=Reload.HOT, device="any",
        numerics={}, doc="Sequences in one step, at most; 0 is the deployment's concurrency.",
    ),
)  # fmt: skip

BY_NAME = {setting.name: setting for setting in SETTINGS}
DEFAULTS: dict[str, Value] = {setting.name: setting.default for setting in SETTINGS}


def check_setting(name: str, value: Value) -> Value:
    """The value as the setting's own type. Raises InputError for an unknown name or an impossible value."""
    if name not in BY_NAME:
        raise InputError("setting", name, "is not known", nearest(name, list(BY_NAME)))
    setting = BY_NAME[name]
    kinds = {type(known) for known in setting.values}
    if isinstance(value, str) and kinds == {int} and value.lstrip("-").isdigit():
        value = int(value)
    if isinstance(value, str) and kinds == {bool} and value.lower() in ("true", "false"):
        value = value.lower() == "true"
    if kinds == {int}:
        lowest = min(v for v in setting.values if isinstance(v, int))
        if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
            raise InputError(f"setting {name}", value, "is not possible", f"give a whole number of at least {lowest}")
    elif value not in setting.values:
        raise InputError(f"setting {name}", value, "is not possible", f"use one of {list(setting.values)}")
    return value


def numerics_of_settings(settings: Mapping[str, Value], dtype: str) -> Numerics:
    """The widest class among settings, for a model of that declared dtype."""
    widest = Numerics.BIT_IDENTICAL
    for name, value in settings.items():
        kind = BY_NAME[name].numerics.get(value, Numerics.BIT_IDENTICAL)
        if name == "kv_dtype" and value == dtype:
            kind = Numerics.BIT_IDENTICAL
        if name in ("threads", "chunk_tokens", "max_batch", "cuda_graphs") and value != DEFAULTS[name]:
            kind = Numerics.TOLERANCE
        widest = max(widest, kind, key=lambda k: k.rank)
    return widest


def reload_of_settings(settings: Mapping[str, Value]) -> Reload:
    """The costliest reload among settings that differ from the defaults."""
    changed = [BY_NAME[name].reload for name, value in settings.items() if value != DEFAULTS[name]]
    return max(changed, key=lambda r: r.rank, default=Reload.HOT)
