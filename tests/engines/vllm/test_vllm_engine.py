"""A live vLLM engine through the shipped suite, and what is vLLM's own: merged weights, its tree, domains, hot swaps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.testing import STALE, EngineSuite, Faults, order
from engines.vllm_engine import VllmEngine
from hotpass.parts import declaration
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse, Reload, Value
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, MeasureResult, Side
from search.catalogue import find_part
from tests.engines.vllm.vllm_parts import part

# One start of vLLM: a quarter of a minute here, minutes on a busy machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
MLP = "model.layers.*.mlp"
LAYERS = 4
PROMPTS = ((1, 2, 3, 4), (9, 8, 7))

PLAIN_MLP = """
import torch
from hotpass import part


@part(engine="vllm", claims=["model.layers.*.mlp"], replaces="LlamaMLP", reload="reweight")
class PlainMlp:
    def weights(self, w, params):
        return {"both": w["gate_up_proj.weight"].clone(), "down": w["down_proj.weight"].clone()}

    def prepare(self, ctx, params):
        self.both, self.down = ctx.weights["both"], ctx.weights["down"]

    def forward(self, x):
        gate, up = (x @ self.both.T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ self.down.T
"""


def worst(result: MeasureResult, *against: str) -> float:
    """Largest difference from any of these."""
    return max(check.max_abs for check in result.checks if check.against in against)


class TestVllm(EngineSuite):
    @pytest.fixture(scope="class")
    def engine(self, live: VllmEngine) -> VllmEngine:
        return live

    @pytest.fixture(scope="class")
    def honest(self) -> Candidate:
        return part("honest", MLP, "x", "return self.reference(x)")

    @pytest.fixture(scope="class")
    def stale(self) -> Mapping[str, Candidate]:
        return {what: part(what, MLP, "x", f"{line}; return self.reference(x)") for what, line in STALE.items()}

    @pytest.fixture(scope="class")
    def faults(self) -> Faults:
        """A hang is left out: it ends as a crash does, by a new child, which costs a load of vLLM each."""
        return {
            FailureKind.EXCEPTION: part("raise", MLP, "x", "raise RuntimeError('planted')"),
            FailureKind.CRASH: part("crash", MLP, "x", "ctypes.string_at(0)"),
        }

    def test_slots_have_the_signatures_of_vllms_own_tree(self, live: VllmEngine) -> None:
        slots = {slot.name: slot for slot in live.slots().slots}
        assert slots["model.layers.0.mlp"].stands_for == "LlamaMLP"
        assert slots["model.layers.0.mlp"].signature == "(x)"
        assert slots["model.layers.3.self_attn.qkv_proj"].stands_for == "QKVParallelLinear"
        assert slots["model.layers.3"].signature.startswith("(positions: torch.Tensor, hidden_states: torch.Tensor, ")
        assert "model.layers.0.mlp.gate_proj" not in slots, "vLLM merges it"

    def test_operators_of_vllms_own_say_what_they_take(self, live: VllmEngine) -> None:
        """Their `forward` takes anything, and hands it on."""
        slots = {slot.name: slot for slot in live.slots().slots}
        assert slots["model.norm"].signature.startswith("(x: torch.Tensor, residual: torch.Tensor | None = None)")
        assert slots["model.layers.0.mlp.act_fn"].signature.startswith("(x: torch.Tensor)")

    @pytest.mark.parametrize(
        ("name", "params", "slots"),
        [
            ("vllm-norm", {}, 2 * LAYERS + 1),
            ("vllm-mlp", {"products": "fused"}, LAYERS),
            ("vllm-mlp", {"products": "joined"}, LAYERS),
            ("vllm-silu-mul", {}, LAYERS),
        ],
    )
    def test_the_catalogues_parts_are_right_at_every_slot_that_they_claim(
        self, live: VllmEngine, deployment: Deployment, name: str, params: Mapping[str, Value], slots: int
    ) -> None:
        source = find_part(name)
        declared = declaration(source)
        candidate = Candidate(parts=(declared.bind(source, params),), numerics=declared.numerics)
        result = live.measure(order(deployment, candidate))
        assert result.failure is None, result.failure
        assert len(result.activation) == slots
        assert min(result.activation.values()) > 0
        assert 0 < worst(result, "reference") < 1e-4
        assert declared.numerics is not Numerics.BIT_IDENTICAL or worst(result, "incumbent", "loaded") == 0.0
        assert result.clean is not None
        assert result.clean.clean, result.clean.reasons
        assert result.reloads[-1].declared is result.reloads[-1].actual

    @pytest.mark.parametrize(
        ("slot", "written_out"),
        [
            ("model.layers.0.input_layernorm", True),
            ("model.layers.0.mlp", True),
            ("model.layers.0.mlp.act_fn", True),
            ("model.layers.0.self_attn.qkv_proj", True),
            ("model.layers.0.mlp.down_proj", True),
            ("model.layers.0", False),
            ("model", False),
        ],
    )
    def test_a_part_to_start_from_is_right_as_it_is(
        self, live: VllmEngine, deployment: Deployment, slot: str, written_out: bool
    ) -> None:
        child = live._loaded.pair().child
        text = child.call_plain("part_template", {"slot": slot}, deadline=time.monotonic() + 30.0)
        assert ("self.reference" in text) != written_out
        source = PartSource(name="start", files=(("part.py", text),))
        candidate = Candidate(parts=(declaration(source).bind(source),), numerics=Numerics.TOLERANCE)
        result = live.measure(order(deployment, candidate))
        assert result.failure is None, result.failure
        assert len(result.activation) == (1 if slot == "model" else LAYERS)
        assert worst(result, "reference") < 1e-4

    def test_a_part_gets_merged_weights_and_is_right(self, live: VllmEngine, deployment: Deployment) -> None:
        """vLLM itself has packed them away, so what `weights` was given is the checkpoint's."""
        source = PartSource(name="plain-mlp", files=(("part.py", PLAIN_MLP),))
        candidate = Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE)
        result = live.measure(order(deployment, candidate))
        assert result.failure is None, result.failure
        assert {report.actual for report in result.reloads} == {Reload.REWEIGHT}
        assert result.reloads[-1].derived_bytes == 4 * 4 * 3 * deployment.model.intermediate_size * 128
        checks = [check for check in result.checks if check.against == "reference"]
        assert 0 < max(check.max_abs for check in checks) < 1e-4
        assert result.clean is not None
        assert result.clean.clean, result.clean.reasons

    def test_a_wrong_part_shows_in_the_logits_and_goes_without_a_trace(
        self, live: VllmEngine, deployment: Deployment
    ) -> None:
        """The canary: were a swap without effect, its answers would be the reference's."""
        before = live.generate(Side.CANDIDATE, PROMPTS, 6)
        result = live.measure(order(deployment, part("canary", MLP, "x", "return -self.reference(x)")))
        assert result.failure is None, result.failure
        assert min(check.max_abs for check in result.checks if check.against == "reference") > 0.1
        assert result.clean is not None
        assert result.clean.clean, result.clean.reasons
        assert {report.actual for report in result.reloads} == {Reload.HOT}
        live.restore()
        assert live.generate(Side.CANDIDATE, PROMPTS, 6) == before

    def test_a_prefix_cached_by_one_candidate_is_not_read_by_another(self, live: VllmEngine) -> None:
        """Prompts longer than a page, served with other forwards before: neither side may find the other's pages."""
        prompt = [[1 + index % 50 for index in range(40)]]
        loaded = live.generate(Side.INCUMBENT, prompt, 4)
        live.install(Side.CANDIDATE, part("canary", MLP, "x", "return -self.reference(x)"))
        other = live.generate(Side.CANDIDATE, prompt, 4)
        assert live.generate(Side.INCUMBENT, prompt, 4) == loaded
        assert live.generate(Side.CANDIDATE, prompt, 4) == other != loaded
        live.restore()

    def test_outside_its_domain_a_part_does_not_run(self, live: VllmEngine, deployment: Deployment) -> None:
        """Decode windows count calls, the prefill row's none: 2 sequences decode, 1 is read."""
        more = "domain=\"phase == 'prefill'\""
        result = live.measure(order(deployment, part("prefill", MLP, "x", "return -self.reference(x)", more=more)))
        assert result.failure is None, result.failure
        worst = {check.row.phase: check.max_abs for check in result.checks if check.against == "reference"}
        assert worst["decode"] < 1e-4
        assert worst["prefill"] > 0.1

    def test_a_profile_knows_the_work_of_packed_weights_and_the_parts(
        self, live: VllmEngine, deployment: Deployment, honest: Candidate, tmp_path: Path
    ) -> None:
        """By what modules were made with: two FLOPs a multiply-add, each weight once."""
        found = live.profile(order(deployment, honest), str(tmp_path / "trace.json"))
        assert found.failure is None, found.failure
        model = deployment.model
        weights = 3 * model.hidden_size * model.intermediate_size
        padded_vocab = -(-model.vocab_size // 64) * 64
        for row, path in zip(found.rows, found.traces, strict=True):
            slots = {item.slot: item for item in row.slots}
            tokens, mlp = row.row.query_tokens, slots["model.layers.0.mlp"]
            assert (mlp.calls, mlp.by_part, slots["model.layers.0"].by_part) == (1, True, False)
            assert mlp.flops == 2 * tokens * weights
            assert 4 * weights < mlp.bytes_moved < 4 * weights + 4 * 4 * tokens * model.hidden_size
            assert slots["logits_processor"].flops == 2 * row.row.num_seqs * padded_vocab * model.hidden_size
            attention = slots["model.layers.0.self_attn.attn"]
            assert attention.flops >= 4 * tokens * model.hidden_size * max(1, row.row.context_mean)
            assert slots["model"].flops > LAYERS * (mlp.flops + attention.flops)
            trace = Path(path).read_text()
            assert "part model.layers.0.mlp" in trace
            assert "slot model.layers.0.self_attn.attn" in trace

    @pytest.mark.parametrize(
        ("patch", "named"),
        [
            (
                "import vllm.forward_context as m; old = m.get_forward_context; m.get_forward_context = lambda: old()",
                "vllm.forward_context.get_forward_context",
            ),
            (
                "from vllm.v1.sample.sampler import Sampler as m; old = m.sample; m.sample = lambda *a, **k: old(*a, **k)",
                "vllm.v1.sample.sampler.Sampler.sample",
            ),
        ],
    )
    def test_a_patch_of_vllms_own_functions_is_seen_and_costs_the_child(
        self, live: VllmEngine, deployment: Deployment, patch: str, named: str
    ) -> None:
        """None of them is a class of the model's tree."""
        result = live.measure(order(deployment, part("patch", MLP, "x", "return self.reference(x)", prepare=patch)))
        assert result.clean is not None
        assert not result.clean.clean
        assert any("patched" in reason and named in reason for reason in result.clean.reasons), result.clean.reasons
        after = live.measure(order(deployment, AS_LOADED))
        assert after.clean is not None
        assert after.clean.clean, after.clean.reasons

    def test_a_reload_is_as_good_as_a_cold_one(self, live: VllmEngine) -> None:
        """Warm A→B against a vLLM that saw nothing else, and A→B→A, bit for bit."""
        proof = live.verify_reload(AS_LOADED, part("honest", MLP, "x", "return self.reference(x)"))
        assert proof.holds, proof.reason
        assert proof.windows == 2

    @pytest.mark.parametrize(
        ("candidate", "problem"),
        [
            (Candidate(settings={"kv_dtype": "bfloat16"}), "setting kv_dtype=bfloat16"),
            (part("nowhere", "model.layers.*.mlp.gate_proj", "x", "return x"), "which no slot here matches"),
            (part("other", MLP, "x", "return x", more="replaces='LlamaAttention'"), "but slot model.layers.0.mlp"),
            (part("torn", MLP, "x", "return x", prepare="raise OSError('planted')"), "prepare fails"),
        ],
    )
    def test_what_cannot_be_installed_is_the_candidates_failure(
        self, live: VllmEngine, deployment: Deployment, candidate: Candidate, problem: str
    ) -> None:
        result = live.measure(order(deployment, candidate))
        assert result.failure is not None
        assert result.failure.kind is FailureKind.INSTALL
        assert problem in result.failure.message
        assert result.clean is not None
        assert result.clean.clean, "nothing was left on the tree"
