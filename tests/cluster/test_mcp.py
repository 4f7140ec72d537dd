"""`hotpass mcp` driven by the real MCP client over stdio: it proposes an improvement and a cheat to a running campaign, and no more."""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from actors.engine import Measured
from cluster.campaign import run_campaign
from cluster.journal import read_state
from cluster.ports import LocalEngine
from engines.fake import FakeEngine
from hotpass.records.candidate import Candidate
from hotpass.records.measurement import Assignment
from search.agents.tools import TOOLS
from tests.cluster.campaigns import FACTORS, fake, machines_with, make_running, part

mcp = pytest.importorskip("mcp", reason="the extra `mcp` is not installed")
anyio = pytest.importorskip("anyio")
ROOT = Path(__file__).parents[2]

INVENTED, CHEAT = part("invented", "post_attention_layernorm"), part("skips-work", "post_attention_layernorm")


def engine() -> FakeEngine:
    """The invented part helps; the cheat would help more, but its logits are wrong."""

    def error(candidate: Candidate) -> float:
        names = {use.source.name for use in candidate.parts}
        return 0.5 if "skips-work" in names else 1e-5 if names else 0.0

    return fake({**FACTORS, "invented": 0.6, "skips-work": 0.1}, logit_error=error)


class HeldEngine(LocalEngine):
    """After the third measurement it answers no more until the client has handed in what it wanted."""

    def __init__(self, port: LocalEngine, measured: threading.Event, may_go_on: threading.Event) -> None:
        super().__init__(port.server)
        self.count, self.measured, self.may_go_on = 0, measured, may_go_on

    def submit(self, assignment: Assignment) -> Future[Measured]:
        self.count += 1
        if self.count > 3:
            self.measured.set()
            assert self.may_go_on.wait(240)
        return super().submit(assignment)


async def _client(folder: Path, seen: dict[str, Any]) -> None:
    parameters = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "cluster.cli", "mcp", str(folder)], env={"PYTHONPATH": str(ROOT)}
    )
    info = mcp.types.Implementation(name="Test Client", version="1")
    async with mcp.Client(parameters, client_info=info) as client:

        async def call(name: str, **arguments: Any) -> tuple[bool, Any]:
            answer = await client.call_tool(name, arguments)
            text = answer.content[0].text
            return answer.is_error, text if answer.is_error else json.loads(text)

        seen["tools"] = {tool.name: tool for tool in (await client.list_tools()).tools}
        seen["slots"] = await call("slots")
        for name in ("release", "export", "set_policy", "held_out_traffic"):
            seen[name] = await call(name, numerics="lossy")
        for source in (INVENTED, CHEAT):
            seen[source.name] = await call(
                "submit_proposal",
                request_id=source.name,
                hypothesis="one pass less",
                parts=[{"name": source.name, "source": source.text()}],
            )
        seen["unclear"] = await call("submit_proposal", request_id="x", parts=[])
        seen["posted"] = await call("post", kind="hypothesis", text="norms can be fused")
        seen["queued"] = await call("result", request_id="invented")


def test_a_client_submits_an_improvement_and_a_cheat_to_a_running_campaign(tmp_path: Path) -> None:
    measured, may_go_on = threading.Event(), threading.Event()
    running = make_running(tmp_path / "c", max_attempts=40)
    running.open_machines = machines_with(engine, lambda port: HeldEngine(port, measured, may_go_on))
    campaign = threading.Thread(target=run_campaign, args=(running,))
    campaign.start()
    seen: dict[str, Any] = {}
    try:
        assert measured.wait(120)
        anyio.run(_client, tmp_path / "c", seen)
    finally:
        may_go_on.set()
        campaign.join(240)
    assert set(seen["tools"]) == {tool.name for tool in TOOLS}
    assert seen["tools"]["submit_proposal"].input_schema["required"] == ["request_id", "hypothesis"]
    assert any(row["claim"] == "model.layers.*.mlp" for row in seen["slots"][1]["slots"])
    for name in ("release", "export", "set_policy", "held_out_traffic"):
        assert seen[name][0], name
        assert "does not exist" in seen[name][1]
    assert (seen["unclear"][0], "hypothesis" in seen["unclear"][1]) == (True, True)
    assert seen["queued"] == (False, {"candidate": seen["invented"][1]["candidate"], "attempts": [], "standing": "queued", "reason": ""})  # fmt: skip
    state = read_state(tmp_path / "c")
    assert {state.candidates[seen[n][1]["candidate"]].proposer for n in ("invented", "skips-work")} == {
        "mcp:test-client"
    }
    verdicts = {
        n: [r.attempt.verdict for r in state.attempts_of(seen[n][1]["candidate"])] for n in ("invented", "skips-work")
    }
    assert verdicts["invented"][0] == "faster"
    assert set(verdicts["skips-work"]) == {"incorrect"}
    assert [(row.post.author, row.post.text) for row in state.posts] == [("mcp:test-client", "norms can be fused")]
    assert state.winner is not None
    assert "invented" in state.label_of(state.winner["candidate_id"])
    assert "skips-work" not in state.label_of(state.winner["candidate_id"])
