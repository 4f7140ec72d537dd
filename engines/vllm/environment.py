"""Where vLLM lives: a venv of its own, made once by `scripts/install-vllm.sh`, and what its processes are told.

vLLM pins other versions of libraries than this project, so it never shares an interpreter with it. Nothing here imports vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path

from engines.threading_env import process_environment
from hotpass.errors import InputError, MachineError

ROOT = Path(__file__).resolve().parents[2]
VERSION = "0.32.0"
PLACES = (".venv-vllm", ".venv-baselines/vllm")
"""Where a venv is looked for below the project's root: made for this engine, or for the comparison of baselines."""
PYTHON_VARIABLE = "HOTPASS_VLLM_PYTHON"
"""Names the interpreter of a venv elsewhere."""
OPTIONS_VARIABLE = "HOTPASS_VLLM_OPTIONS"
"""JSON that the engine leaves for its children: arguments of `vllm.LLM`."""

QUIET = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # scheduler and worker in the child itself, which is our process already
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # windows drive the runner whose interface they know
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # binding would put every child on the same cores in another way than ours
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_PLUGINS": "",  # nothing that some other package registers takes part
}


def find_python() -> str:
    """The interpreter of a venv with vLLM. Raises InputError when there is none."""
    given = os.environ.get(PYTHON_VARIABLE)
    if given:
        if not Path(given).exists():
            raise InputError(PYTHON_VARIABLE, given, "does not exist", "name the python of a venv with vllm-cpu")
        return given
    for place in PLACES:
        python = ROOT / place / "bin" / "python"
        if python.exists():
            return str(python)
    raise InputError("engine", "vllm", "is not installed here", "run scripts/install-vllm.sh, which takes minutes")


@cache
def versions(python: str) -> dict[str, str]:
    """What is installed in the venv, asked of its own interpreter. Raises MachineError."""
    program = (
        "import json, platform; from importlib.metadata import distribution as d; "
        "print(json.dumps({'python': platform.python_version(), "
        "**{n: d(n).version for n in ('vllm-cpu', 'torch', 'transformers', 'numpy')}}))"
    )
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{python} has no vllm-cpu: {done.stderr.strip()[-300:]}")
    found: dict[str, str] = json.loads(done.stdout)
    return found


COMPILED = {
    "VLLM_DISABLE_COMPILE_CACHE": "1",  # its key does not know of parts, so that one candidate's code would be taken for another's
    "VLLM_USE_AOT_COMPILE": "0",
}
"""Of an engine that is not eager."""


def vllm_environment(threads: int, options: dict[str, object], search_path: tuple[str, ...] = ()) -> dict[str, str]:
    """The whole environment of the zygote of vLLM children."""
    given = process_environment(threads, search_path)
    given.pop("VIRTUAL_ENV", None)
    compiled = {} if options.get("enforce_eager", True) else COMPILED
    return {**given, **QUIET, **compiled, OPTIONS_VARIABLE: json.dumps(options)}
