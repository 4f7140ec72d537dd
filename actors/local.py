"""A Ray to run on: a local one that starts by itself, or the one at an address. Nothing else here starts or ends Ray processes.

The local one listens on 127.0.0.1 only, without the dashboard (whose jobs API runs anybody's code), without usage reports, and with
a small object store, since replies are records. What it started ends with this process; no other Ray on the machine is touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hotpass
from actors.errors import ray_errors
from hotpass.errors import InputError, MachineError

OBJECT_STORE_BYTES = 80 * 1024 * 1024
LOCAL = "127.0.0.1"
CONNECT_SECONDS = 5.0
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by `ray job submit`: the job's own working directory and environment apply, and nothing is shipped again."""


@contextlib.contextmanager
def connected(address: str, namespace: str) -> Iterator[None]:
    """Connected on entry; on exit disconnected, and a local Ray ended. A process that is connected already stays so.

    Raises InputError when nothing answers at the address, MachineError when a local Ray does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray runs workers at niceness 15 by default: whatever else runs on the machine would then come before a measurement.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    if ray.is_initialized():
        yield
        return
    submitted = JOB_VARIABLE in os.environ
    if address:
        check_reachable(address)
    try:
        with ray_errors():
            if address or submitted:
                ray.init(
                    address=address or "auto", namespace=namespace, **_quiet(), **({} if submitted else _shipped())
                )
            else:
                ray.init(
                    address="local",
                    namespace=namespace,
                    include_dashboard=False,
                    dashboard_host=LOCAL,
                    _node_ip_address=LOCAL,
                    object_store_memory=OBJECT_STORE_BYTES,
                    job_config=ray.job_config.JobConfig(code_search_path=[str(_home())]),
                    **_quiet(),
                )
    except (ConnectionError, ValueError, RuntimeError) as error:
        problem = str(error).splitlines()[0]
        if address:
            raise InputError(
                "--address",
                address,
                f"cannot be reached: {problem}",
                "give the address that `ray start` printed, or leave it out",
            ) from error
        raise MachineError(f"a local Ray did not start: {problem}; use --no-ray to run in one process") from error
    try:
        yield
    finally:
        ray.shutdown()


def check_reachable(address: str) -> None:
    """Ray waits minutes for an address where nothing listens; a plain connection says so in seconds. Raises InputError."""
    host, separator, port = address.removeprefix("ray://").rpartition(":")
    if not separator or not port.isdigit():
        if address == "auto":
            return
        raise InputError("--address", address, "is not an address", "write it as host:port, ray://host:port or auto")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        problem = f"cannot be reached: {error.strerror or error}"
        remedy = "give the address that `ray start` printed, or leave it out"
        raise InputError("--address", address, problem, remedy) from error


def _quiet() -> dict[str, Any]:
    return {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}


def _shipped() -> dict[str, Any]:
    """Our rooms, for nodes that may not have them installed."""
    rooms = [str(_home() / room) for room in ("hotpass", *hotpass.ROOMS)]
    return {"runtime_env": {"py_modules": rooms}}


def _home() -> Path:
    return Path(hotpass.__file__).resolve().parent.parent
