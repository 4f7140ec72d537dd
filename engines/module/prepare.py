"""`prepare_module`: from a recipe to a prepared folder, as `prepare_model` makes of a language model.

    recipe ──run──► module, examples ──tried──► cache/models/<key>/ ──► ModelRef
                                                   module.json, model.safetensors, inputs.safetensors, hotpass-model.json (last)

A user's recipe is run each time, since only that tells whether the weights behind it have changed; a pinned alias is run once. A module
is tried before it is served: it must answer the same to the same inputs, and write to none of its own tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engines.flops import flop_counter
from engines.memory import DTYPES
from engines.module.aliases import ALIASES, alias_recipe
from engines.module.inputs import ExampleSpec, InputSpec
from engines.module.outputs import described, flattened, width_of
from engines.module.recipe import Example, Recipe, arguments_of, find_recipe, run_recipe
from engines.prepare.cache import cache_root, make_once
from engines.prepare.model import is_whole
from engines.prepare.sources import Progress, file_sha256
from engines.prepare.store import MODEL_FILE, MODULE_FILE, WEIGHTS_FILE, layer_of
from engines.program import CandidateFailed
from hotpass.canonical import content_hash, to_plain
from hotpass.decode import from_plain
from hotpass.errors import InputError
from hotpass.records.deployment import ModelRef

FOLDER_VERSION = 1
INPUTS_FILE = "inputs.safetensors"
"""Constant tensors of the examples, named `<example>/<argument>`."""
MOST_JUDGED = 1 << 16
"""Values of an answer that held-out scores and served answers are judged by; windows compare them all."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_STREAMED = (
    torch.nn.Linear, torch.nn.modules.conv._ConvNd, torch.nn.RNNBase, torch.nn.modules.rnn.RNNCellBase, torch.nn.MultiheadAttention,
)  # fmt: skip
"""Layers that read all of their weights at each call."""
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleFacts:
    """What a prepared folder says beyond its ModelRef."""

    recipe: Recipe
    examples: tuple[ExampleSpec, ...]
    """In the order of the shape table's rows."""
    tied: Mapping[str, str]
    """Name of a tensor → the name under which it is stored."""
    classes: Mapping[str, str]
    """Module path → name of its class."""


def prepare_module(name: str, *, cache_dir: Path | str | None = None, progress: Progress | None = None) -> ModelRef:
    """The module as a prepared folder on this disk. `name`: an alias, `FILE.py`, `FILE.py:function` or `module:function`.

    Raises InputError for a recipe that does not run or a module that cannot be served, MachineError for the disk or PyPI.
    """
    told = progress or (lambda _: None)
    cache = cache_root(cache_dir)
    if name in ALIASES:
        recipe, identity = alias_recipe(name, cache, told)
        made = None
        key = content_hash([FOLDER_VERSION, recipe.text, identity])[:24]
    else:
        recipe = find_recipe(name)
        told(f"running {recipe.function}() of {name}")
        made = run_recipe(recipe)
        key = content_hash([FOLDER_VERSION, recipe, _digest(*made)])[:24]

    def make(temporary: Path) -> None:
        told(f"preparing {name}")
        _write(temporary, recipe, *(made or run_recipe(recipe)))

    folder = make_once(cache / "models" / key, ready=is_whole, make=make)
    plain = json.loads((folder / MODEL_FILE).read_text())
    known = {item.name for item in dataclasses.fields(ModelRef)}
    ref = from_plain(ModelRef, {field: value for field, value in plain.items() if field in known})
    return dataclasses.replace(ref, name=name, folder=str(folder))


def module_facts(model: ModelRef) -> ModuleFacts:
    """Of a module's prepared folder."""
    return from_plain(ModuleFacts, json.loads((Path(model.folder) / MODULE_FILE).read_text()))


def constants_of(model: ModelRef) -> dict[str, torch.Tensor]:
    """Constant tensors of the examples by `<example>/<argument>`."""
    found: dict[str, torch.Tensor] = load_file(Path(model.folder) / INPUTS_FILE)
    return found


def named_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, then buffers (those that no checkpoint holds too); tied ones under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _write(folder: Path, recipe: Recipe, module: torch.nn.Module, examples: Mapping[str, Example]) -> None:
    tensors, tied = _stored(module)
    save_file(tensors, folder / WEIGHTS_FILE)
    specs, constants = _tried(module, examples)
    save_file(constants, folder / INPUTS_FILE)
    facts = ModuleFacts(
        recipe=recipe,
        examples=specs,
        tied=tied,
        classes={path: type(child).__name__ for path, child in module.named_modules()},
    )
    (folder / MODULE_FILE).write_text(json.dumps(to_plain(facts), indent=1, sort_keys=True))
    files = {
        path.name: {"bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    ref = _ref(module, tensors, specs, config_hash=content_hash(facts), weights_hash=str(files[WEIGHTS_FILE]["sha256"]))
    written = {**to_plain(ref), "folder_version": FOLDER_VERSION, "packed": {}, "files": files}
    (folder / MODEL_FILE).write_text(json.dumps(written, indent=1, sort_keys=True))


def _ref(
    module: torch.nn.Module,
    tensors: Mapping[str, torch.Tensor],
    specs: Sequence[ExampleSpec],
    *,
    config_hash: str,
    weights_hash: str,
) -> ModelRef:
    """Fields of language models are 0. Layers are numbers in paths, so that a cut of all of them renames nothing."""
    kinds = Counter({"float32": 0})
    for tensor in tensors.values():
        if tensor.is_floating_point():
            kinds[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    layers = [layer for name, _ in module.named_modules() if (layer := layer_of(name)) is not None]
    return ModelRef(
        name="",
        folder="",
        architecture=type(module).__name__,
        dtype=kinds.most_common(1)[0][0],
        num_layers=max(layers, default=0) + 1,
        layers=None,
        num_heads=0,
        num_kv_heads=0,
        head_dim=0,
        hidden_size=0,
        intermediate_size=0,
        vocab_size=min(MOST_JUDGED, max(spec.width for spec in specs)),
        max_context=max(spec.length for spec in specs),
        num_params=sum(tensor.numel() for tensor in tensors.values()),
        packed_formats=(),
        config_hash=config_hash,
        weights_hash=weights_hash,
        tokenizer_hash="",
    )


def _stored(module: torch.nn.Module) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Each tensor once, and for its other names the one that it is under. Raises InputError for a type that cannot be shared."""
    first: dict[tuple[object, ...], str] = {}
    tensors: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    for name, tensor in named_tensors(module):
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            raise InputError("model", name, f"is a {type(tensor).__name__}", "serve a module of plain dense tensors")
        if str(tensor.dtype).removeprefix("torch.") not in DTYPES:
            raise InputError("model", name, f"is of type {tensor.dtype}", f"use one of {sorted(DTYPES)}")
        view = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
        owner = first.setdefault(view, name) if tensor.numel() else name
        if owner == name:
            # a copy of its own: views of one storage cannot be saved
            tensors[name] = tensor.detach().to("cpu").clone(memory_format=torch.contiguous_format)
        else:
            tied[name] = owner
    return tensors, tied


def _digest(module: torch.nn.Module, examples: Mapping[str, Example]) -> str:
    """Of every tensor of the module and of its examples."""
    digest = hashlib.sha256()
    given = [
        (f"{name}/{argument}", value)
        for name, example in examples.items()
        for argument, value in arguments_of(example).items()
    ]
    for name, value in [*named_tensors(module), *given]:
        digest.update(name.encode())
        if isinstance(value, torch.Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            plain = value.detach().cpu().contiguous().reshape(-1)
            digest.update(plain.view(torch.uint8).numpy().data if plain.numel() else b"")
        else:
            digest.update(repr(value).encode())
    shares = [(name, example.share, example.constant) for name, example in examples.items()]
    digest.update(repr(shares).encode())
    return digest.hexdigest()


def _tried(
    module: torch.nn.Module, examples: Mapping[str, Example]
) -> tuple[tuple[ExampleSpec, ...], dict[str, torch.Tensor]]:
    """Every example described and run, and the constants among their inputs. Raises InputError."""
    total = sum(example.share for example in examples.values())
    specs, constants = [], dict[str, torch.Tensor]()
    for name, example in examples.items():
        if not _NAME.fullmatch(name):
            raise InputError("example", name, "is no name", "use letters, digits, dots, dashes and underlines")
        if not 0 < example.share < float("inf"):
            raise InputError(f"example {name}: share", example.share, "is not positive", "give a positive number")
        arguments = arguments_of(example)
        inputs = tuple(_input(name, key, value, key in example.constant) for key, value in arguments.items())
        constants |= {
            f"{name}/{item.name}": arguments[item.name].detach().clone() for item in inputs if item.kind == "tensor"
        }
        specs.append(_run(module, name, example.share / total, arguments, inputs))
    return tuple(specs), constants


def _input(example: str, name: str, value: Any, constant: bool) -> InputSpec:
    """Integers that differ from one another and floating values are drawn anew; the rest stays."""
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, _PLAIN):
            problem = f"is a {type(value).__name__}"
            raise InputError(f"example {example}: {name}", value, problem, "give tensors, numbers, texts or None")
        return InputSpec(name=name, kind="plain", value=value)
    dtype, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    plain = value.detach().cpu()
    whole = value.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if constant or not value.numel() or value.dtype == torch.bool or bool((plain == plain.reshape(-1)[0]).all()):
        return InputSpec(name=name, kind="tensor", dtype=dtype, shape=shape)
    if whole:
        return InputSpec(
            name=name, kind="integers", dtype=dtype, shape=shape, low=int(plain.min()), high=int(plain.max())
        )
    if not value.is_floating_point() or not bool(plain.isfinite().all()):
        problem = f"is {value.dtype}, or not finite"
        raise InputError(
            f"example {example}: {name}", shape, problem, "give real finite values, or name it in `constant`"
        )
    wide = plain.double()
    return InputSpec(name=name, kind="normal", dtype=dtype, shape=shape, mean=float(wide.mean()), std=float(wide.std()))


def _run(
    module: torch.nn.Module, name: str, share: float, arguments: Mapping[str, Any], inputs: tuple[InputSpec, ...]
) -> ExampleSpec:
    batch, length = _extent(arguments)
    positional, keywords = split_arguments(arguments)
    before = [tensor._version for _, tensor in named_tensors(module)]
    with torch.inference_mode():
        try:
            answer, streamed = _watched(module, positional, keywords)
            outputs = described(answer)
        except Exception as error:
            first = (str(error).splitlines() or [""])[0][:200]
            problem = f"does not run ({type(error).__name__}: {first})"
            raise InputError("example", name, problem, "make the module answer to it by itself first") from error
        if not outputs:
            raise InputError("example", name, "gives no tensor", "return tensors, also in tuples, mappings and records")
        by_item = all(item.shape and item.shape[0] == batch for item in outputs)
        spec = ExampleSpec(
            name=name, share=share, batch=batch, length=length, inputs=inputs, outputs=outputs, by_item=by_item,
            width=width_of(outputs, batch), flops=_flops(module, positional, keywords), streamed_bytes=streamed,
        )  # fmt: skip
        _check_repeats(module, spec, answer, positional, keywords)
    if before != [tensor._version for _, tensor in named_tensors(module)]:
        raise InputError("example", name, "makes the module write to its own tensors", "serve a module without state")
    return spec


def split_arguments(arguments: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Positional and keyword arguments of a call."""
    positional = [value for name, value in arguments.items() if name.isdigit()]
    return positional, {name: value for name, value in arguments.items() if not name.isdigit()}


def _extent(arguments: Mapping[str, Any]) -> tuple[int, int]:
    """(batch, length) as an ExampleSpec has them."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    wide = next((tensor for tensor in tensors if tensor.dim() >= 2 and tensor.numel()), None)
    if wide is not None:
        return int(wide.shape[0]), int(wide.shape[1])
    return 1, max([tensor.numel() for tensor in tensors], default=1)


def _watched(module: torch.nn.Module, positional: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[Any, int]:
    """The answer, and the bytes of weights that it cannot have been made without reading."""
    read: dict[int, int] = {}

    def note(layer: torch.nn.Module, *_: Any) -> None:
        read.update({p.data_ptr(): p.numel() * p.element_size() for p in layer.parameters(recurse=False)})

    hooks = [layer.register_forward_pre_hook(note) for layer in module.modules() if isinstance(layer, _STREAMED)]
    try:
        return module(*positional, **keywords), sum(read.values())
    finally:
        for hook in hooks:
            hook.remove()


def _flops(module: torch.nn.Module, positional: Sequence[Any], keywords: Mapping[str, Any]) -> int:
    with flop_counter() as counter:
        module(*positional, **keywords)
    return int(counter.get_total_flops())


def _check_repeats(
    module: torch.nn.Module, spec: ExampleSpec, answer: Any, positional: Sequence[Any], keywords: Mapping[str, Any]
) -> None:
    device = torch.device("cpu")
    try:
        first = flattened(answer, spec, device).clone()
        again = flattened(module(*positional, **keywords), spec, device)
    except CandidateFailed as error:
        raise InputError("example", spec.name, f"cannot be judged: {error}", "return plain dense tensors") from None
    if not bool(first.isfinite().all()):
        raise InputError("example", spec.name, "gives values that are not finite", "give an input that it is made for")
    if not torch.equal(first.view(torch.int32), again.view(torch.int32)):
        raise InputError(
            "example", spec.name, "gives another answer when it is called again", "serve a module without state or chance"
        )  # fmt: skip
