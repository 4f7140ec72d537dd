"""What a candidate left behind shows in the fingerprint; what it may do does not."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

from engines.decoder.batch import build_batch
from engines.decoder.proof import Proof, windows_of
from engines.program import Fingerprint

PATCHES = {
    "patched": "import time; old = time.perf_counter; time.perf_counter = lambda: old() / 2",
    "default_dtype": "torch.set_default_dtype(torch.float64)",
    "matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "deterministic": "torch.use_deterministic_algorithms(True)",
    "grad": "torch.set_grad_enabled(False)",
    "random": "torch.manual_seed(7)",
    "environment": "import os; os.environ['OMP_WAIT_POLICY'] = 'active'",
    "mkldnn": "torch.backends.mkldnn.enabled = False",
    "module_hooks": "torch.nn.modules.module.register_module_forward_hook(lambda m, i, o: None)",
}


def agrees(now: Fingerprint, born: Fingerprint) -> bool:
    """What answered the probe now answered it as at birth."""
    return bool(now.probes) and now.probes.items() <= born.probes.items()


@pytest.fixture
def restored(monkeypatch):
    """Process-wide state, put back whatever a test did to it."""
    import time

    monkeypatch.setattr(time, "perf_counter", time.perf_counter)
    monkeypatch.setattr(torch.nn.functional, "linear", torch.nn.functional.linear)
    monkeypatch.setenv("OMP_WAIT_POLICY", os.environ.get("OMP_WAIT_POLICY", "passive"))
    state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    hooks = dict(torch.nn.modules.module._global_forward_hooks)
    yield
    torch.set_rng_state(state)
    np.random.set_state(numpy_state)
    random.setstate(python_state)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    torch.backends.mkldnn.enabled = True
    torch.nn.modules.module._global_forward_hooks.clear()
    torch.nn.modules.module._global_forward_hooks.update(hooks)


@pytest.mark.parametrize("flag", PATCHES)
def test_each_kind_of_tampering_changes_its_flag(world, restored, flag):
    born = world.program.fingerprint()
    exec(PATCHES[flag], {"torch": torch})
    now = world.program.fingerprint()
    changed = {name for name in born.flags if born.flags[name] != now.flags[name]}
    assert changed - {"tf32"} == {flag}  # tf32 follows the precision of matmul


def test_a_patched_function_is_named(world, restored):
    real = torch.nn.functional.linear
    torch.nn.functional.linear = lambda *args: real(*args)
    assert world.program.fingerprint().flags["patched"] == "torch.nn.functional.linear"


def test_a_patched_class_is_named_and_its_effect_changes_the_probe(world):
    kind = type(world.program._loaded("incumbent", 0).net.modules["model.layers.0.mlp"])
    born = world.program.fingerprint()
    real = kind.forward
    try:
        kind.forward = lambda self, x: real(self, x) * 2
        now = world.program.fingerprint()
    finally:
        kind.forward = real
    assert now.flags["patched"] == f"{kind.__module__}.{kind.__qualname__}.forward"
    assert not agrees(now, born)


def test_trees_that_something_was_left_on_are_named(world):
    deep = world.program._loaded("candidate", 0).net.modules["model.layers.2.mlp"]
    hook = deep.register_forward_hook(lambda module, inputs, output: None)
    shallow = world.program._loaded("incumbent", 1)
    shallow.forward = lambda batch, kv: None
    assert world.program.fingerprint().flags["trees"] == "candidate/0, incumbent/1"
    hook.remove()
    shallow.forward = shallow.as_loaded
    assert world.program.fingerprint().flags["trees"] == ""


def test_a_side_that_is_not_as_loaded_though_nothing_is_installed_shows(world):
    born = world.program.fingerprint()
    module = world.program._loaded("candidate", 1).net.modules["model.norm"]
    module.__dict__["forward"] = lambda x: x
    changed = world.program.fingerprint()
    del module.__dict__["forward"]
    assert not agrees(changed, born)
    assert agrees(world.program.fingerprint(), born)


def test_an_honest_candidate_leaves_nothing(world):
    born = world.program.fingerprint()
    for name in ("model", "model.layers.0.mlp"):
        world.install(world.program.part_template(name), settings={"threads": 2, "kv_dtype": "bfloat16"})
        world.window("candidate", 0)
        beside = world.program.fingerprint()
        world.program.uninstall("candidate")
        after = world.program.fingerprint()
        assert agrees(beside, born)
        assert agrees(after, born)
        assert beside.flags == after.flags == born.flags
        assert after.open_files == born.open_files
        assert after.children_alive == born.children_alive, "compilers of other tests may be running"
        assert after.threads_alive >= 1
        assert after.resident_bytes > 1 << 24


def test_an_attribute_a_buffer_or_a_child_that_is_another_changes_the_tree(world):
    side = world.program._loaded("incumbent", 1)
    norm, rotary = side.net.modules["model.norm"], side.net.modules["model.rotary_emb"]
    layers = side.net.modules["model.layers"]
    first, epsilon, frequencies = layers._modules["0"], norm.variance_epsilon, rotary.inv_freq.clone()
    changes = [
        (lambda: setattr(norm, "variance_epsilon", 2 * epsilon), lambda: setattr(norm, "variance_epsilon", epsilon)),
        (lambda: rotary.inv_freq.mul_(2), lambda: rotary.inv_freq.copy_(frequencies)),
        (lambda: layers._modules.update({"0": layers._modules["1"]}), lambda: layers._modules.update({"0": first})),
        (lambda: norm.__dict__.update(_call_impl=norm.forward), lambda: norm.__dict__.pop("_call_impl")),
    ]
    for change, put_back in changes:
        change()
        assert world.program.state()["trees"] == "incumbent/1"
        put_back()
        assert world.program.state()["trees"] == ""


@pytest.fixture
def proof(world, monkeypatch):
    """That of the program, which has just been born, through one layer at a time: its shallowest trees have two."""
    made = Proof(world.program._probe, torch.device("cpu"))
    made._windows = tuple((layer,) for layer in range(len(world.program._probe.net.layer_paths)))
    assert len(made._windows) > 1
    made.warm_up()
    monkeypatch.setattr(world.program, "_proof", made)
    return made


def test_every_tree_answers_through_every_window_in_turn_and_the_changed_one_at_once(world, proof, monkeypatch):
    asked = []
    answer = proof._answered
    monkeypatch.setattr(
        proof, "_answered", lambda side, batch, window: asked.append((side.name, window)) or answer(side, batch, window)
    )
    shallow = [name for (name, cut) in world.program._sides if cut == world.program._shallowest and name != "reference"]
    trees = [*shallow, "probe"]
    world.program.fingerprint()
    asked.clear()
    for _ in range(len(trees) * len(proof._windows)):
        world.program.fingerprint()
    assert set(asked) == {(tree, window) for tree in trees for window in proof._windows}
    asked.clear()
    monkeypatch.setattr(
        world.program._loaded("candidate", world.program._shallowest), "forward", lambda batch, kv: None
    )
    world.program.fingerprint()
    assert {window for tree, window in asked if tree == "candidate"} >= set(proof._windows)


def test_windows_have_every_layer_and_are_of_two():
    assert windows_of(2) == ((),)
    assert windows_of(6) == ((0, 1), (2, 3), (4, 5))
    assert windows_of(5) == ((0, 1), (2, 3), (3, 4))


def test_a_pass_through_a_window_is_that_of_its_layers(world):
    """By hand: embedding, the two layers, the last norm, the head."""
    side = world.program._loaded("incumbent", world.program._deepest)
    net, kv = side.net, side.kv
    batch = build_batch(torch.tensor([3, 5, 7]), contexts=[0], query_lens=[3], slots=[0])
    with torch.inference_mode():
        side.step.begin(batch)
        whole = net.forward(batch, kv)
        with net.only((1, 2)):
            through = net.forward(batch, kv)
        hidden = net.modules["model.embed_tokens"](batch.tokens[None])
        positions = net.modules["model.rotary_emb"](hidden, batch.positions[None])
        for layer in (1, 2):
            out = net.modules[f"model.layers.{layer}"](
                hidden, position_ids=batch.positions[None], position_embeddings=positions, use_cache=False
            )
            hidden = out if isinstance(out, torch.Tensor) else out[0]
        logits = net.modules["lm_head"](net.modules["model.norm"](hidden[:, -1:]))[0].float()
        again = net.forward(batch, kv)
    assert torch.equal(through, logits)
    assert not torch.equal(through, whole)
    assert torch.equal(again, whole), "every layer is back"


def test_a_layer_that_computes_otherwise_shows_in_its_own_window(world, proof):
    """Nothing of the structure is touched: the weights' memory, which is sealed outside tests, holds other values."""
    born = world.program.fingerprint()
    weight = world.program._loaded("incumbent", 0).net.modules["model.layers.0.mlp.down_proj"].weight
    kept = weight.data.clone()
    weight.data.mul_(2)
    seen = [world.program.fingerprint() for _ in proof._windows]
    assert not agrees(world.program.fingerprint(whole=True), born)
    weight.data.copy_(kept)
    assert [agrees(now, born) for now in seen].count(False) == 1
    assert agrees(world.program.fingerprint(), born)
