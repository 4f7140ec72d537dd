"""The shipped suite over the module engine."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from engines.module_engine import ModuleEngine
from engines.testing import STALE, EngineSuite, Faults
from hotpass.records.candidate import Candidate
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind
from tests.engines.module.conftest import candidate, part


class TestModule(EngineSuite):
    @pytest.fixture(scope="class")
    def engine(self, module_engine: ModuleEngine) -> ModuleEngine:
        return module_engine

    @pytest.fixture(scope="class")
    def deployment(self, served: Deployment) -> Deployment:
        return served

    @pytest.fixture(scope="class")
    def honest(self) -> Candidate:
        return candidate(part("return self.reference(*args, **kwargs)"))

    @pytest.fixture(scope="class")
    def stale(self) -> Mapping[str, Candidate]:
        return {
            what: candidate(part(f"{line}\nreturn self.reference(*args, **kwargs)")) for what, line in STALE.items()
        }

    @pytest.fixture(scope="class")
    def faults(self) -> Faults:
        return {
            FailureKind.CRASH: candidate(part("ctypes.string_at(0)")),
            FailureKind.EXCEPTION: candidate(part("raise RuntimeError('planted')")),
            FailureKind.TIMEOUT: candidate(part("while True: pass")),
        }
