"""The C++ parts in the decoder program, beside the reference: all parameter values, all kinds of steps, both dtypes; composed; taken off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from engines.build import build_native, find_compiler
from engines.decoder.source import compile_part, derive
from engines.program import Artefacts
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, Value
from search.catalogue import find_part
from tests.search.catalogue.programs import ROWS, Bench, bindings

if find_compiler() is None:
    pytest.skip("no C++ compiler", allow_module_level=True)

EXACT_LIMIT = 5e-5
"""Of logits near 2, as for the PyTorch parts; measured 1e-5 at most."""
LOSSY_LIMIT = 1.0

Use = tuple[str, dict[str, Value]]
CASES: list[list[Use]] = [
    *([(name, params)] for name in ("cpp-model", "cpp-attention") for params in bindings(find_part(name))
      if not str(params.get("weights_as", "")).startswith("gguf")),
    [("cpp-attention", {}), ("fused-gate-up", {})],
]  # fmt: skip


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def install(bench: Bench, uses: list[Use], cache: Path) -> Numerics:
    """On side `candidate`, built as an engine's builder does. Returns the declared class."""
    bound, native, derived = [], [], []
    for name, params in uses:
        source = find_part(name)
        declared = declaration(source)
        use = declared.bind(source, params)
        part = compile_part(use)
        slots = [slot.name for claim in declared.claims for slot in bench.program.slots().matching(claim)]
        derived.append(
            {slot: derive(part, bench.weights.restricted(slot)) for slot in slots} if part.has_weights else {}
        )
        part.forget()
        libraries = build_native(source, declared, use.params, cache_dir=cache)
        native.append({library: str(path) for library, path in libraries.items()})
        bound.append(use)
    candidate = Candidate(parts=tuple(bound), settings=AS_LOADED.settings)
    bench.program.install("candidate", candidate, Artefacts(native=tuple(native), derived=tuple(derived)), 0)
    classes = [declaration(use.source).numerics_of(use.params, bench.model.dtype) for use in bound]
    return max(classes, key=lambda kind: kind.rank)


@pytest.mark.parametrize(
    "uses", CASES, ids=lambda uses: " + ".join(" ".join([name, *map(str, params.values())]) for name, params in uses)
)
def test_candidate_is_within_its_class(bench: Bench, uses: list[Use], cache: Path) -> None:
    kind = install(bench, uses, cache)
    loaded = max(bench.error(ran, row) for row, ran in enumerate(bench.loaded))
    limit = EXACT_LIMIT if bench.model.dtype == "float32" else max(1.6 * loaded, EXACT_LIMIT)
    limit = LOSSY_LIMIT if kind is Numerics.LOSSY else limit
    for row in range(len(ROWS)):
        ran = bench.run("candidate", row)
        assert min(ran.activation.values()) > 0
        assert bench.error(ran, row) <= limit, f"row {row}"


def test_taken_off_nothing_is_left(bench: Bench, cache: Path) -> None:
    tasks = Path("/proc/self/task")
    before = set(os.listdir(tasks)) if tasks.exists() else set()
    for uses in ([("cpp-model", {"weights_as": "fp32"})], [("cpp-attention", {})]):
        install(bench, uses, cache)
        bench.run("candidate", 0)
        bench.program.uninstall("candidate")
        assert torch.equal(bench.run("candidate", 1).logits, bench.loaded[1].logits)
        if before:
            assert set(os.listdir(tasks)) <= before
