"""Blocks of a module, compiled by a builder with its shapes fixed, are found by the module engine's child."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.builder import BuilderServer
from actors.spec import EngineSpec, make_builder
from engines.build import find_compiler
from engines.module_engine import ModuleEngine
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import Side, Tier

COMPILED = Candidate(settings={"compile_mode": "default"})


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")
def test_a_modules_child_finds_what_its_builder_compiled(served: Deployment, tmp_path: Path) -> None:
    spec = EngineSpec(kind="module", name="net", threads=1, cache_dir=str(tmp_path))
    built = BuilderServer(spec, served, 300.0).build(COMPILED)
    assert built.failure is None
    builder = make_builder(spec, served)
    with ModuleEngine("net", threads=1, builder=builder, window_ms=2.0, aa_seconds=0.05, pool_sets=1) as engine:
        engine.load(served, Tier.FAST)
        report = engine.install(Side.CANDIDATE, COMPILED)
        assert "compile" not in report.phases_ms
        engine.restore()
