"""Parts and settings on a side: who runs, who is counted, what is refused, and that taking off restores exactly."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from engines.decoder.compile import compile_count
from engines.program import Artefacts, CandidateFailed
from hotpass.records.candidate import Candidate, Reload
from hotpass.records.measurement import FailureKind

HEAD = """
import torch
import torch.nn.functional as F
from hotpass import part
"""
MLP = (
    HEAD
    + """
@part(engine="decoder", claims=["model.layers.*.mlp"], replaces="LlamaMLP", domain="phase == 'decode'")
class Fused:
    def weights(self, w, params):
        return {"gate_up": torch.cat([w["gate_proj.weight"], w["up_proj.weight"]]), "down": w["down_proj.weight"]}

    def prepare(self, ctx, params):
        self.w = ctx.weights

    def forward(self, x):
        gate, up = F.linear(x, self.w["gate_up"]).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.w["down"])
"""
)
WHOLE = (
    HEAD
    + """
@part(engine="decoder", claims=["model"], domain="num_seqs == 2")
class Constant:
    def prepare(self, ctx, params):
        self.vocab = ctx.config.vocab_size

    def forward(self, batch, kv):
        {body}
"""
)


def whole(body: str) -> str:
    return WHOLE.replace("{body}", body)


def claiming(
    claim: str, *, body: str = "return self.reference(*args, **kwargs)", extra: str = "", methods: str = ""
) -> str:
    """A part that calls what stood there before."""
    return (
        HEAD
        + f"""
@part(engine="decoder", claims=["{claim}"]{extra})
class Calls:
    def prepare(self, ctx, params):
        self.ctx, self.reference = ctx, ctx.reference()
{methods}
    def forward(self, *args, **kwargs):
        {body}
"""
    )


def test_a_to_b_to_a_is_bit_equal_and_only_decode_ran_the_part(world):
    loaded = [world.window("candidate", row)[0] for row in range(len(world.plan.rows))]
    report = world.install(MLP)
    assert report.slots == tuple(f"model.layers.{n}.mlp" for n in range(3))
    assert report.derived_bytes == 3 * 3 * 48 * 32 * 4
    assert report.actual == Reload.REWEIGHT
    assert {"source", "prepare", "swap", "warm-up"} <= set(report.phases_ms)
    for row, item in enumerate(world.plan.rows):
        logits, reply = world.window("candidate", row)
        calls = world.plan.steps_per_window[row] if item.phase == "decode" else 0
        assert reply.activation == dict.fromkeys(report.slots, calls)
        torch.testing.assert_close(logits, loaded[row], rtol=0, atol=1e-5)
    world.program.uninstall("candidate")
    for row, before in enumerate(loaded):
        logits, reply = world.window("candidate", row)
        assert torch.equal(logits, before)
        assert reply.activation == {}


COMPILES = "        self.norm = torch.compile(lambda x: x * 1.0, backend='eager')\n"
NARROWS = "        ctx.kv._keys = [keys.to(torch.bfloat16) for keys in ctx.kv._keys]\n"


def test_what_a_part_does_shows_in_its_reload_whatever_it_declares(world):
    """Nothing, compiling, deriving weights, exchanging the cache: each part declares `hot`."""
    assert world.install(claiming("model.norm")).actual is Reload.HOT
    compiling = claiming("model.norm", body="return self.norm(self.reference(*args))", methods=COMPILES)
    report = world.install(compiling)
    assert (report.declared, report.actual, report.understated) == (Reload.HOT, Reload.RECAPTURE, True)
    report = world.install(MLP)
    assert (report.declared, report.actual, report.understated) == (Reload.HOT, Reload.REWEIGHT, True)
    assert not world.install(MLP.replace('replaces="LlamaMLP"', 'replaces="LlamaMLP", reload="reweight"')).understated
    pool = world.program._loaded("candidate", 0).kv
    keys = pool._keys
    report = world.install(claiming("model.norm", methods=NARROWS))
    assert (report.declared, report.actual, report.understated) == (Reload.HOT, Reload.REKV, True)
    world.program.uninstall("candidate")
    assert world.program.fingerprint().flags["trees"] == "candidate/0", "the next candidate would compute in it"
    pool._keys = keys
    assert world.program.fingerprint().flags["trees"] == ""


def test_the_other_side_never_runs_the_part(world):
    world.install(claiming("model.layers.*.mlp", body="return self.reference(*args) * 2"))
    incumbent, reply = world.window("incumbent", 0)
    candidate, _ = world.window("candidate", 0)
    assert reply.activation == {}
    torch.testing.assert_close(incumbent, world.expected(0), rtol=0, atol=1e-5)
    assert (candidate - incumbent).abs().max() > 0.1


def test_a_whole_forward_runs_inside_its_domain_only(world):
    world.install(whole("return torch.full((batch.num_seqs, self.vocab), 3.0)"))
    inside, reply = world.window("candidate", 1)
    assert reply.activation == {"model": 3}
    assert (inside == 3.0).all()
    outside, reply = world.window("candidate", 0)
    assert reply.activation == {"model": 0}
    torch.testing.assert_close(outside, world.expected(0), rtol=0, atol=1e-5)


def test_parts_compose_from_root_to_leaves(world):
    layer = claiming(
        "model.layers.*",
        extra=', keeps=["mlp"], domain="phase == \'decode\'"',
        body="self.ctx.kept('mlp'); return self.reference(*args, **kwargs)",
    )
    world.install(MLP, layer)
    logits, reply = world.window("candidate", 0)
    assert reply.activation == {f"model.layers.{n}{leaf}": 4 for n in range(3) for leaf in ("", ".mlp")}
    torch.testing.assert_close(logits, world.expected(0), rtol=0, atol=1e-5)


def test_two_domains_share_a_slot(world):
    double = claiming("model.norm", extra=", domain=\"phase == 'decode'\"", body="return self.reference(*args) * 2")
    triple = claiming("model.norm", extra=", domain=\"phase == 'prefill'\"", body="return self.reference(*args) * 3")
    world.install(double, triple)
    for row, factor in ((0, 2), (2, 3), (3, 1)):
        logits, _ = world.window("candidate", row)
        torch.testing.assert_close(logits, world.expected(row) * factor, rtol=0, atol=1e-4)


def test_a_kept_child_of_a_layer_is_what_the_layer_part_calls(world):
    layer = claiming(
        "model.layers.1",
        extra=', keeps=["self_attn", "mlp"]',
        body="h = args[0] if args else kwargs.pop('hidden_states'); return h + self.ctx.kept('mlp')(h)",
    )
    mlp = claiming("model.layers.*.mlp", body="return self.reference(*args) * 0")
    world.install(layer, mlp)
    _, reply = world.window("candidate", 0)
    assert reply.activation == {"model.layers.1": 4, **{f"model.layers.{n}.mlp": 4 for n in range(3)}}


def test_settings_take_effect_and_are_taken_back(world):
    side = world.program._loaded("candidate", 0)
    before = torch.get_num_threads()
    report = world.install(settings={"threads": 2, "kv_dtype": "bfloat16", "chunk_tokens": 64})
    assert report.declared == report.actual == Reload.REKV
    assert side.kv.dtype == torch.bfloat16
    assert torch.get_num_threads() == 2
    logits, _ = world.window("candidate", 0)
    worst = (logits - world.expected(0)).abs().max()
    assert 1e-4 < worst < 0.1
    world.program.uninstall("candidate")
    assert (side.kv.dtype, side.settings["chunk_tokens"]) == (torch.float32, 512)
    assert torch.get_num_threads() == before
    logits, _ = world.window("candidate", 0)
    torch.testing.assert_close(logits, world.expected(0), rtol=0, atol=1e-5)


def test_threads_follow_the_side_that_runs(world):
    world.install(settings={"threads": 2})
    world.window("incumbent", 0)
    assert torch.get_num_threads() == 1
    world.window("candidate", 0)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("sources", "options", "said"),
    [
        ((claiming("model.layers.*.mixer"),), {}, "which no slot here matches"),
        ((claiming("model.layers.*.mlp", extra=', replaces="Qwen3MLP"'),), {}, "replaces Qwen3MLP"),
        ((claiming("model.layers.*.mlp"), claiming("model.layers.0")), {}, "both cover model.layers.0.mlp"),
        ((claiming("model"), claiming("lm_head")), {}, "both cover lm_head"),
        ((claiming("model.layers.0", extra=', keeps=["nose"]'),), {}, "keeps nose"),
        ((claiming("model.norm", extra=', device="cuda"'),), {}, "needs a cuda device"),
        ((claiming("model.norm").replace('"decoder"', '"vllm"'),), {}, "is for engine vllm"),
        ((claiming("model.norm") + "\nraise RuntimeError('at import')",), {}, "does not load: RuntimeError: at import"),
        ((claiming("model.norm").replace("self.ctx, self", "1 / 0; self"),), {}, "ZeroDivisionError"),
        ((claiming("model.norm", body="return (((").rstrip(),), {}, "is not Python"),
        ((), {"settings": {"cuda_graphs": True}}, "needs a cuda device"),
        ((), {"settings": {"thread": 1}}, "did you mean 'threads'"),
        ((), {"settings": {"kv_dtype": "int8"}}, "is not possible"),
        ((), {"parallelism": {"tp": 2}}, "tp=2"),
    ],
)
def test_what_cannot_be_installed_is_refused_and_leaves_the_side_as_loaded(world, sources, options, said):
    before, _ = world.window("candidate", 0)
    base = world.candidate(*sources)
    with pytest.raises(CandidateFailed) as caught:
        world.program.install("candidate", Candidate(parts=base.parts, **options), Artefacts(), 0)
    assert said in caught.value.failure.message
    assert world.program._loaded("candidate", 0).installed is None
    after, _ = world.window("candidate", 0)
    assert torch.equal(before, after)


def test_missing_artefacts_are_named(world):
    with pytest.raises(CandidateFailed, match=r"derived weights of model\.layers\.0\.mlp"):
        world.program.install("candidate", world.candidate(MLP), Artefacts(), 0)
    native = claiming("model.norm", extra=', native={"step": "step.cpp"}')
    candidate = world.candidate(native)
    with pytest.raises(CandidateFailed) as caught:
        world.program.install("candidate", candidate, Artefacts(), 0)
    assert "step.cpp" in caught.value.failure.message


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        ("return [1.0]", FailureKind.PROTOCOL, "list"),
        ("return torch.nn.Parameter(torch.zeros(2, self.vocab))", FailureKind.PROTOCOL, "Parameter"),
        ("return torch.zeros(self.vocab)", FailureKind.PROTOCOL, "shape"),
        ("return torch.zeros(2, self.vocab, dtype=torch.int64)", FailureKind.PROTOCOL, "int64"),
        ("return torch.empty(2, self.vocab, device='meta')", FailureKind.PROTOCOL, "memory"),
        ("return torch.zeros(2, self.vocab).to_sparse()", FailureKind.PROTOCOL, "memory"),
        ("raise SystemExit(3)", FailureKind.EXCEPTION, "SystemExit: 3"),
        ("return self.nothing", FailureKind.EXCEPTION, "AttributeError"),
        ("raise MemoryError()", FailureKind.MEMORY, "MemoryError"),
    ],
)
def test_a_forward_that_does_not_answer_fails_at_its_warm_up(world, body, kind, said):
    with pytest.raises(CandidateFailed) as caught:
        world.install(whole(body))
    assert caught.value.failure.kind == kind
    assert said in caught.value.failure.message


def test_a_failure_in_a_window_is_in_the_reply_with_the_line(world):
    world.install(whole("return {0: torch.zeros(2, self.vocab)}[int(batch.tokens.sum())]"))
    _, reply = world.window("candidate", 1)
    assert reply.failure is not None
    assert reply.failure.kind == FailureKind.EXCEPTION
    assert "KeyError" in reply.failure.message
    assert "return {0: torch.zeros" in reply.failure.detail
    assert reply.steps < 3


def test_close_is_called_and_the_module_forgotten(world):
    part = claiming("model.norm", methods="    def close(self):\n        type(self).closed = True\n")
    world.install(part)
    (name,) = [name for name in sys.modules if name.startswith("hotpass_part_")]
    kind = sys.modules[name].Calls
    world.program.uninstall("candidate")
    assert kind.closed
    assert not [name for name in sys.modules if name.startswith("hotpass_part_")]


def test_a_close_that_raises_is_a_failure_after_everything_is_restored(world):
    before, _ = world.window("candidate", 0)
    world.install(claiming("model.norm", methods="    def close(self):\n        raise ValueError('stuck')\n"))
    with pytest.raises(CandidateFailed, match="stuck"):
        world.program.uninstall("candidate")
    after, _ = world.window("candidate", 0)
    assert torch.equal(before, after)


def test_a_second_install_replaces_the_first(world):
    world.install(claiming("model.norm", body="return self.reference(*args) * 2"))
    world.install(claiming("lm_head", body="return self.reference(*args) * 3"))
    logits, reply = world.window("candidate", 0)
    assert reply.activation == {"lm_head": 4}
    torch.testing.assert_close(logits, world.expected(0) * 3, rtol=0, atol=1e-4)


def test_the_context_of_a_part_names_its_place(world):
    world.install(claiming("model.layers.*.mlp", extra=', params={"bits": [4, 8]}'), cut=1)
    side = world.program._loaded("candidate", 1)
    closure = side.net.modules["model.layers.1.mlp"].forward.__closure__
    owners = [getattr(cell.cell_contents, "__self__", None) for cell in closure]
    (ctx,) = [owner.ctx for owner in owners if hasattr(owner, "ctx")]
    assert (ctx.slot, ctx.layer, ctx.threads, ctx.config.num_hidden_layers) == ("model.layers.1.mlp", 1, 1, 2)
    assert ctx.kv is side.kv
    assert ctx.step.kv is side.kv
    with pytest.raises(KeyError):
        ctx.kept("gate_proj")


def test_install_leaves_the_environment_alone_after_uninstall(world):
    before = dict(os.environ)
    world.install(MLP)
    assert os.environ["TRITON_CACHE_DIR"] != before.get("TRITON_CACHE_DIR")
    world.program.uninstall("candidate")
    assert dict(os.environ) == before


def test_as_loaded_is_a_candidate_that_changes_nothing(world):
    before, _ = world.window("candidate", 0)
    world.install(MLP)
    report = world.install()
    after, reply = world.window("candidate", 0)
    assert torch.equal(before, after)
    assert (report.slots, reply.activation, report.actual) == ((), {}, Reload.HOT)
    assert world.program.fingerprint().flags["trees"] == ""


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_every_template_runs_and_computes_the_reference(make_world, family):
    world = make_world(family)
    names = {slot.name.replace(".1.", ".0.").replace(".2.", ".0."): slot for slot in world.program.slots().slots}
    kinds = {slot.stands_for: name for name, slot in names.items() if not name.endswith(("rotary_emb", "transformer"))}
    assert len(kinds) >= 7
    for name in kinds.values():
        report = world.install(world.program.part_template(name))
        assert len(report.slots) in (1, 3)
        for row in (0, 2, 3):
            logits, reply = world.window("candidate", row)
            assert set(reply.activation.values()) == {world.plan.steps_per_window[row]}, name
            torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=2e-5)
    world.program.uninstall("candidate")


def test_own_cache_models_take_module_parts_but_no_whole_forward(make_world):
    world = make_world("gemma3")
    world.install(world.program.part_template("model.layers.0.mlp"))
    logits, reply = world.window("candidate", 0)
    assert reply.activation["model.layers.0.mlp"] == 4 * 3  # a call for each request
    torch.testing.assert_close(logits, world.expected(0), rtol=0, atol=1e-5)
    world.program.uninstall("candidate")
    with pytest.raises(CandidateFailed, match="sliding_attention"):
        world.install(whole("return None"))
    with pytest.raises(CandidateFailed, match="keeps the KV cache"):
        world.install(settings={"kv_dtype": "bfloat16"})


def test_compiled_layers_compile_before_the_window_and_leave_the_side_as_it_was(world, traced_only):
    before, _ = world.window("candidate", 0)
    born = world.program.fingerprint()
    report = world.install(settings={"compile_mode": "default"})
    assert report.actual == Reload.RECAPTURE
    assert traced_only == ["LlamaDecoderLayer"]  # one compilation for all layers
    for row in range(len(world.plan.rows)):
        logits, reply = world.window("candidate", row)
        assert reply.compile_events == 0
        torch.testing.assert_close(logits, world.expected(row), rtol=0, atol=1e-5)
    prompts = [[1, 2, 3, 4], [5], [6, 7]]
    compiled = compile_count()
    assert world.program.generate("candidate", prompts, 4) == [world.greedy(prompt, 4) for prompt in prompts]
    assert compile_count() == compiled
    world.program.uninstall("candidate")
    after, _ = world.window("candidate", 0)
    assert torch.equal(before, after)
    assert world.program.fingerprint().flags == born.flags


def test_compiling_leaves_parts_as_they_are(world, traced_only):
    world.install(MLP, settings={"compile_mode": "default"})
    assert sorted(traced_only) == ["LlamaAttention", "LlamaRMSNorm"]
    logits, reply = world.window("candidate", 0)
    assert set(reply.activation.values()) == {4}
    torch.testing.assert_close(logits, world.expected(0), rtol=0, atol=1e-5)


def test_a_compilation_in_a_window_is_counted(world, traced_only):
    world.install(
        claiming(
            "model.norm",
            body="return torch.compile(self.reference)(*args) if self.ctx.step.batch.tokens.sum() else self.reference(*args)",
        )
    )
    _, reply = world.window("candidate", 0)
    assert reply.compile_events > 0


def test_a_first_compile_leaves_no_thread(tmp_path, monkeypatch):
    """Fresh caches, real inductor: an earlier artefact would compile nothing, and its progress bar would start no monitor."""
    import threading

    from engines.decoder.compile import compile_in_this_thread

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    compile_in_this_thread()
    before = set(threading.enumerate())
    compiled = torch.compile(lambda x: (x.sin() * 2 + x).softmax(-1), fullgraph=True)
    with torch.inference_mode():
        compiled(torch.ones(8, 8))
    assert set(threading.enumerate()) == before
