"""What a candidate left behind shows in the fingerprint; what it may do does not."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest
import torch

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
    assert now.probe_sha256 != born.probe_sha256


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
    assert changed.probe_sha256 != born.probe_sha256
    assert world.program.fingerprint().probe_sha256 == born.probe_sha256


def test_an_honest_candidate_leaves_nothing(world):
    born = world.program.fingerprint()
    for name in ("model", "model.layers.0.mlp"):
        world.install(world.program.part_template(name), settings={"threads": 2, "kv_dtype": "bfloat16"})
        world.window("candidate", 0)
        beside = world.program.fingerprint()
        world.program.uninstall("candidate")
        after = world.program.fingerprint()
        assert beside.probe_sha256 == after.probe_sha256 == born.probe_sha256
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


def test_every_tree_is_asked_in_turn_and_the_changed_one_at_once(world, monkeypatch):
    asked = []
    proof = world.program._proof
    answer = proof._answered
    monkeypatch.setattr(proof, "_answered", lambda side, batch: asked.append(side.name) or answer(side, batch))
    for _ in range(4):
        world.program.fingerprint()
    shallow = [name for (name, cut) in world.program._sides if cut == world.program._shallowest and name != "reference"]
    assert sorted(asked[-3:]) == sorted([*shallow, "probe"])
    asked.clear()
    world.program._loaded("candidate", world.program._shallowest).forward = lambda batch, kv: None
    world.program.fingerprint()
    world.program.fingerprint()
    assert asked.count("candidate") >= 2
