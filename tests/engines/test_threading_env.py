"""The environment of an engine's processes: set by the engine, whatever the caller has."""

from __future__ import annotations

import os

import pytest

from engines.threading_env import environment_record, process_environment, thread_environment, usable_cores


def test_threads_are_the_engines_and_the_traps_are_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    given = process_environment(3)
    assert given["OMP_NUM_THREADS"] == given["MKL_NUM_THREADS"] == "3"
    assert given["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_PROC_BIND" not in given


def test_secrets_and_proxies_stay_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    given = process_environment(1, ("/parts",))
    assert given["CUDA_VISIBLE_DEVICES"] == "1"
    assert not {"OPENAI_API_KEY", "HTTPS_PROXY", "HOME"} & given.keys()
    assert given["PYTHONPATH"].split(os.pathsep)[0] == "/parts"


def test_the_record_tells_thread_counts_apart() -> None:
    one, two = environment_record("cpu", 1), environment_record("cpu", 2)
    assert one.fingerprint != two.fingerprint
    assert one.fingerprint == environment_record("cpu", 1).fingerprint
    assert one.thread_env == thread_environment(1)
    assert one.versions["torch"] != "source"
    assert environment_record("cpu", 1, "g++ 99").fingerprint != one.fingerprint


def test_cores_are_those_that_may_be_used() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
