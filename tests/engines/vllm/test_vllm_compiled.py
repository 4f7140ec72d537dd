"""Parts in a vLLM that compiles its model: a swap changes nothing until the model is compiled again, and that is seen in two ways.

One program in vLLM's own interpreter, without keeper and judge: what is judged of it is the same as under eager.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from engines.vllm.environment import ROOT, vllm_environment
from engines.vllm.stable import BLOCK_SIZE
from hotpass.canonical import to_plain
from hotpass.records.deployment import ModelRef

# vLLM compiles at its start and again for the candidate.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
OPTIONS = {
    "enforce_eager": False, "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128, "block_size": BLOCK_SIZE,
    "kv_cache_memory_bytes": 1 << 25, "skip_tokenizer_init": True, "async_scheduling": False, "disable_log_stats": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def seen(python: str, shallow_model: ModelRef, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `compiled_swaps` saw."""
    folder = tmp_path_factory.mktemp("compiled")
    named = folder / "model.json"
    named.write_text(json.dumps(to_plain(shallow_model)))
    environment = vllm_environment(2, OPTIONS, (str(ROOT),)) | {"HOME": str(folder), "TMPDIR": str(folder)}
    command = [python, "-m", "tests.engines.vllm.compiled_swaps", str(named)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_swap_without_recapture_changes_nothing_and_shows(seen: dict[str, Any]) -> None:
    """The canary answers as loaded does, bit for bit, so it did not run; and no call was counted, which is `invalid`."""
    assert seen["swapped"]["moved"] == 0.0
    assert set(seen["swapped"]["counts"].values()) == {0}
    assert len(seen["swapped"]["counts"]) == 2


def test_a_recapture_runs_the_part_beside_as_loaded_and_leaves_no_trace(seen: dict[str, Any]) -> None:
    assert seen["captured"]["moved"] > 0.1
    assert set(seen["captured"]["counts"].values()) == {3}, "once a step in each layer"
    assert seen["beside"] == 0.0
    assert seen["again"] == 0.0
    assert seen["clean"] == [True, "as loaded", ""]


def test_hot_is_refused_where_forwards_are_compiled_in(seen: dict[str, Any]) -> None:
    assert "declares reload=hot, but vLLM has compiled its forwards in" in seen["refused"]["hot"]
    assert "declare reload=recapture" in seen["refused"]["hot"]


def test_what_no_operator_of_tokens_can_carry_is_refused(seen: dict[str, Any]) -> None:
    assert "no operator of tokens can carry" in seen["refused"]["shrinks"]
