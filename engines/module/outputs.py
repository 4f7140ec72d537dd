"""A module's answer as one row of float32 values an item, so that the judge can compare it bit for bit.

    answer (tensor, tuple, mapping, record, nested) ──► tensors with paths ──checked against the example's──► [batch, width] float32

A value of a type that float32 does not hold (float64, integers) becomes two columns: what float32 holds of it, and the rest.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from engines.decoder.source import failed
from engines.module.inputs import ExampleSpec, OutputSpec
from hotpass.records.measurement import FailureKind

EXACT = (torch.float32, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int8, torch.int16)
"""Types whose every value is a float32."""
LEAST_WIDTH = 2
"""Columns of a row at least: the judge compares the two largest."""


def tensors_of(answer: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in an answer with their paths, in its own order. Raises TypeError for what is neither tensor, container nor nothing."""
    if isinstance(answer, torch.Tensor):
        yield path, answer
    elif isinstance(answer, Mapping):
        for key, value in answer.items():
            yield from tensors_of(value, f"{path}.{key}" if path else str(key))
    elif isinstance(answer, (tuple, list)):
        for index, value in enumerate(answer):
            yield from tensors_of(value, f"{path}.{index}" if path else str(index))
    elif dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        for field in dataclasses.fields(answer):
            yield from tensors_of(getattr(answer, field.name), f"{path}.{field.name}" if path else field.name)
    elif answer is not None and not isinstance(answer, (bool, int, float, str)):
        raise TypeError(f"{path or 'the answer'} is a {type(answer).__name__}")


def described(answer: Any) -> tuple[OutputSpec, ...]:
    """What an answer is made of. Raises TypeError as `tensors_of`."""
    return tuple(
        OutputSpec(path=path, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
        for path, tensor in tensors_of(answer)
    )


def width_of(outputs: Sequence[OutputSpec], batch: int) -> int:
    """Columns of a row: the values of all outputs, divided over the items."""
    columns = sum(math.prod(item.shape) * (1 if getattr(torch, item.dtype) in EXACT else 2) for item in outputs)
    return max(LEAST_WIDTH, -(-columns // batch))


def flattened(answer: Any, example: ExampleSpec, device: torch.device) -> torch.Tensor:
    """float32 [batch, width]. Raises CandidateFailed (protocol) when the answer is not made as the example's, or not of plain tensors
    in memory on the device."""
    try:
        found = list(tensors_of(answer))
    except TypeError as error:
        raise failed(FailureKind.PROTOCOL, f"the forward returned what is no tensor: {error}") from None
    if [path for path, _ in found] != [item.path for item in example.outputs]:
        raise failed(
            FailureKind.PROTOCOL,
            f"the forward returned {[path for path, _ in found][:8]}, not {[item.path for item in example.outputs][:8]}",
        )
    for (path, tensor), item in zip(found, example.outputs, strict=True):
        _check(path or "the answer", tensor, item, device)
    if len(found) == 1 and found[0][1].dtype == torch.float32 and example.by_item:
        rows = found[0][1].reshape(example.batch, -1)
    else:
        leading = example.batch if example.by_item else 1
        rows = torch.cat([column for _, tensor in found for column in _columns(tensor, leading)], dim=1)
    return rows if rows.shape == (example.batch, example.width) else _padded(rows, example)


def _columns(tensor: torch.Tensor, leading: int) -> list[torch.Tensor]:
    flat = tensor.reshape(leading, -1)
    high = flat.float()
    if tensor.dtype in EXACT:
        return [high]
    return [high, (flat.double() - high.double()).float()]


def _padded(rows: torch.Tensor, example: ExampleSpec) -> torch.Tensor:
    """Rows of the example's width, the rest zero; an answer that is not by item is dealt out over the rows."""
    made = torch.zeros(example.batch, example.width, dtype=torch.float32, device=rows.device)
    if rows.shape[0] == example.batch:
        made[:, : rows.shape[1]] = rows
    else:
        made.view(-1)[: rows.numel()] = rows.reshape(-1)
    return made


def _check(name: str, tensor: torch.Tensor, item: OutputSpec, device: torch.device) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise failed(FailureKind.PROTOCOL, f"{name} is a {type(tensor).__name__}, not a plain torch.Tensor")
    if tuple(tensor.shape) != item.shape:
        raise failed(FailureKind.PROTOCOL, f"{name} has shape {tuple(tensor.shape)}, not {item.shape}")
    if str(tensor.dtype).removeprefix("torch.") != item.dtype:
        raise failed(FailureKind.PROTOCOL, f"{name} is {tensor.dtype}, not {item.dtype}")
    if tensor.layout != torch.strided or tensor.device != device:
        raise failed(FailureKind.PROTOCOL, f"{name} is not in memory on {device}")
    if tensor.numel() and tensor.untyped_storage().data_ptr() == 0:
        raise failed(FailureKind.PROTOCOL, f"{name} has no memory of its own")
