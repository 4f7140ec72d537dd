"""The built-in parts, as sources: reading them, finding one by name, and saying whether one applies to a deployment.

Each folder with `part.py`, or `.py` file, under `cpu/`, `cuda/`, `torch/`, `module/` and `vllm/` is one part, named after the folder or
file. What is not here: running a part. Nothing in this module executes a part's text or imports torch; only an engine's child does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hotpass.errors import InputError, nearest
from hotpass.parts import DEVICES, PartDeclaration, declaration, read_part
from hotpass.records.candidate import PartSource
from hotpass.records.deployment import Deployment

ROOMS = ("cpu", "torch", "cuda", "module", "vllm")
"""Folders of the catalogue; a part's own `device` argument, not its folder, says where it runs."""

FAMILIES = {"llama": ("LlamaForCausalLM",)}
"""What `family:<name>` in a part's `requires` admits: architectures with exactly that forward pass."""

_ANY_MODEL = ("Linear", "Embedding")
"""Classes of torch.nn that a slot of any architecture may hold."""


def load_catalogue(device: str | None = None) -> tuple[PartSource, ...]:
    """Every built-in part that may run on `device` (`cpu` or `cuda`; None for all), sorted by name. Raises InputError."""
    if device is not None and device not in DEVICES:
        raise InputError("device", device, "is not a device", nearest(device, list(DEVICES)))
    found = sorted((read_part(path) for path in _paths()), key=lambda source: source.name)
    if device in (None, "any"):
        return tuple(found)
    return tuple(source for source in found if declaration(source).device in (device, "any"))


def find_part(name: str) -> PartSource:
    """The built-in part of that name. Raises InputError that names the nearest one."""
    by_name = {_name(path): path for path in _paths()}
    if name not in by_name:
        raise InputError("part", name, "is not in the catalogue", nearest(name, list(by_name)))
    return read_part(by_name[name])


def applicable(source: PartSource, deployment: Deployment, *, compiler: bool) -> str | None:
    """None when the part may be proposed for the deployment, else the reason why not, as a clause.

    `compiler` says whether this machine has a C++ compiler. Shapes are no matter here: outside its domain a part simply does not run.
    Raises InputError for a `requires` term that nobody knows.
    """
    declared = declaration(source)
    if declared.engine != served_by(deployment):
        return f"is for the {declared.engine} engine"
    if declared.device not in ("any", deployment.hardware.device):
        return f"needs device {declared.device}, the deployment has {deployment.hardware.device}"
    # A module's classes, and vLLM's, which many architectures share, are told by the engine's slot table.
    if declared.engine == "decoder" and not _stands_in(declared.replaces, deployment.model.architecture):
        return f"replaces {declared.replaces}, which {deployment.model.architecture} does not have"
    if declared.native and not compiler:
        return "needs a C++ compiler"
    return lacking(declared.requires, declared, deployment, compiler=compiler)


def served_by(deployment: Deployment) -> str:
    """The kind of engine whose parts fit."""
    serving = deployment.serving.engine
    return serving if serving in ("module", "vllm") else "decoder"


def lacking(terms: Sequence[str], declared: PartDeclaration, deployment: Deployment, *, compiler: bool) -> str | None:
    """The first of these `requires` terms that the deployment does not meet, as a clause; None when it meets all."""
    reasons = [_missing(term, declared, deployment, compiler) for term in terms]
    return next((reason for reason in reasons if reason is not None), None)


def _paths() -> list[Path]:
    """Folders and files of all parts. Names starting with `_` or `.` are no parts."""
    here = Path(__file__).parent
    inside = [item for room in ROOMS for item in sorted((here / room).glob("*")) if item.name[0] not in "_."]
    return [item for item in inside if item.suffix == ".py" or (item / "part.py").is_file()]


def _name(path: Path) -> str:
    return path.stem if path.is_file() else path.name


def _stands_in(replaces: str, architecture: str) -> bool:
    """True when a model of that architecture can hold the class: transformers names both after the family."""
    family = architecture.removesuffix("ForCausalLM")
    rest = replaces.removeprefix(family)
    return replaces in ("", *_ANY_MODEL) or (rest != replaces and rest[:1].isupper())


def _missing(term: str, declared: PartDeclaration, deployment: Deployment, compiler: bool) -> str | None:
    kind, _, value = term.partition(":")
    if kind == "packed":
        have = deployment.model.packed_formats
        found = value in have if value else bool(have)
        return None if found else f"needs packed {value or 'GGUF'} blocks, the model has {_listed(have)}"
    if kind == "isa" and value:
        have = deployment.hardware.isa
        return None if value in have else f"needs {value} instructions, the processor has {_listed(have)}"
    if term == "compiler":
        return None if compiler else "needs a C++ compiler"
    if kind == "architecture" and value:
        architecture = deployment.model.architecture
        return None if architecture == value else f"is for {value}, the module is a {architecture}"
    if kind == "family" and value in FAMILIES:
        architecture = deployment.model.architecture
        return None if architecture in FAMILIES[value] else f"is for the {value} family, the model is {architecture}"
    known = [
        "packed",
        "packed:Q4_1",
        "isa:avx2",
        "compiler",
        "architecture:Net",
        *(f"family:{family}" for family in FAMILIES),
    ]
    raise InputError(f"part {declared.class_name}: requires", term, "is not known", nearest(term, known))


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "none"
