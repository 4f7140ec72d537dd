"""What inputs and answers are made of, recipes that cannot be served, and parts at slots of a module."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from actors.slots import open_program
from engines.build import build_candidate, module_names
from engines.module import outputs
from engines.module.inputs import ExampleSpec, InputSpec, ModuleInputs, draw_step, places, seeded_step
from engines.module.prepare import ModuleFacts, module_facts, prepare_module
from engines.module.program import ModuleProgram
from engines.module.side import Decoder, compiled_alone
from engines.module_engine import ModuleEngine, module_shapes
from engines.prepare.store import open_weights
from engines.program import Artefacts, CandidateFailed, WindowInputs
from engines.testing import order
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics
from hotpass.records.deployment import Deployment, ModelRef
from hotpass.records.measurement import FailureKind
from tests.engines.module.conftest import candidate, part


def spec(**changes: object) -> ExampleSpec:
    given: dict[str, object] = {
        "name": "one", "share": 1.0, "batch": 2, "length": 3, "flops": 0, "streamed_bytes": 0, "by_item": True, "width": 4,
        "inputs": (
            InputSpec(name="ids", kind="integers", dtype="int32", shape=(2, 3), low=5, high=7),
            InputSpec(name="x", kind="normal", dtype="bfloat16", shape=(3,), mean=4.0, std=0.5),
            InputSpec(name="mask", kind="tensor", dtype="bool", shape=(2,)),
            InputSpec(name="gain", kind="plain", value=2.5),
        ),
        "outputs": (outputs.OutputSpec(path="", dtype="float32", shape=(2, 4)),),
    }  # fmt: skip
    return ExampleSpec(**{**given, **changes})  # type: ignore[arg-type]


def test_words_of_a_step_become_the_arguments_again() -> None:
    example = spec()
    assert example.num_words == 6 + 2
    words = draw_step(example, np.random.default_rng(1))
    mask = torch.tensor([True, False])
    positional, keywords = Decoder(example, {"one/mask": mask}, torch.device("cpu"))(torch.from_numpy(words))
    assert positional == []
    assert list(keywords) == ["ids", "x", "mask", "gain"]
    assert (keywords["ids"].dtype, keywords["ids"].tolist()) == (torch.int32, words[:6].reshape(2, 3).tolist())
    assert set(keywords["ids"].flatten().tolist()) <= {5, 6, 7}
    assert (keywords["x"].dtype, tuple(keywords["x"].shape)) == (torch.bfloat16, (3,))
    assert (keywords["x"].float() - 4.0).abs().max() < 4.0
    assert keywords["mask"].tolist() == [True, False]
    assert keywords["mask"] is not mask
    assert keywords["gain"] == 2.5


def test_places_follow_one_another_and_skip_what_does_not_travel() -> None:
    assert [(item.name, place.start, place.stop) for item, place in places(spec())] == [("ids", 0, 6), ("x", 6, 8)]


def test_inputs_are_fresh_and_follow_the_seed() -> None:
    source = ModuleInputs([spec()], 3)
    steps = source.steps(0, 4)
    assert steps.shape == (4, 8)
    assert len({row.tobytes() for row in steps}) == 4
    assert np.array_equal(ModuleInputs([spec()], 3).steps(0, 4), steps)
    row, words = seeded_step([spec()], 12)
    assert row == 0
    assert np.array_equal(words, seeded_step([spec()], 12)[1])


def test_served_calls_follow_the_shares() -> None:
    examples = [spec(share=0.9), spec(name="two", share=0.1)]
    rows = [seeded_step(examples, seed)[0] for seed in range(300)]
    assert 5 < sum(rows) < 60


@dataclass
class Answer:
    logits: torch.Tensor
    nothing: None = None


def test_tensors_of_any_answer_are_found_with_their_paths() -> None:
    x = torch.zeros(2, 3)
    nested = OrderedDict(a=(x, [x]), b=Answer(logits=x), c=7)
    assert [path for path, _ in outputs.tensors_of(nested)] == ["a.0", "a.1.0", "b.logits"]
    with pytest.raises(TypeError, match=r"b\.0 is a set"):
        list(outputs.tensors_of({"b": [{1}]}))


def test_wide_types_are_compared_to_the_last_bit() -> None:
    value = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    example = spec(batch=1, outputs=outputs.described(value), width=outputs.width_of(outputs.described(value), 1))
    near = value.clone()
    near[0, 1] += 1e-12
    rows = [outputs.flattened(item, example, torch.device("cpu")) for item in (value, near)]
    assert rows[0].shape == (1, 4)
    assert not torch.equal(rows[0], rows[1])


def test_an_answer_that_is_not_by_item_is_dealt_out_over_rows() -> None:
    answer = {"state": torch.arange(10, dtype=torch.float32).view(5, 2)}
    described = outputs.described(answer)
    example = spec(batch=3, outputs=described, by_item=False, width=outputs.width_of(described, 3))
    rows = outputs.flattened(answer, example, torch.device("cpu"))
    assert rows.flatten().tolist() == [*range(10), 0, 0]


class Lazy(torch.Tensor):
    """A tensor that could compute later."""


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (torch.zeros(2, 5), "shape"),
        (torch.zeros(2, 4, dtype=torch.float64), "float64"),
        (torch.zeros(2, 4).as_subclass(Lazy), "Lazy"),
        (torch.zeros(2, 4).to_sparse(), "not in memory"),
        ({"other": torch.zeros(2, 4)}, "returned"),
    ],
)
def test_answers_of_another_form_are_the_candidates_fault(answer: object, problem: str) -> None:
    with pytest.raises(CandidateFailed, match=problem) as found:
        outputs.flattened(answer, spec(), torch.device("cpu"))
    assert found.value.failure.kind is FailureKind.PROTOCOL


def test_a_module_is_prepared_once_with_its_ties_and_facts(net: ModelRef, cache: Path, recipe_file: Path) -> None:
    assert (net.architecture, net.dtype, net.num_layers) == ("Net", "float32", 3)
    facts: ModuleFacts = module_facts(net)
    assert facts.tied == {"head.weight": "embed.weight"}
    one, many = facts.examples
    assert (one.share, many.share, many.batch, many.length) == (0.25, 0.75, 4, 9)
    assert [item.kind for item in many.inputs] == ["integers", "tensor", "plain"]
    assert [item.path for item in many.outputs] == ["logits", "best"]
    # of each position 50 logits, and the best token as two values
    assert many.width == 9 * 52
    blocks = 3 * (32 * 64 + 64 * 32)
    assert many.flops == 2 * 36 * (blocks + 32 * 50)
    assert many.streamed_bytes == 4 * (blocks + 3 * (64 + 32) + 32 * 50)
    weights = open_weights(net)
    assert weights["head.weight"] is weights["embed.weight"]
    assert prepare_module(str(recipe_file), cache_dir=cache) == net


def test_rows_are_the_examples(net: ModelRef) -> None:
    table = module_shapes(module_facts(net).examples)
    assert [row.key for row in table.rows] == ["forward one n1 q7", "forward many n4 q36"]
    assert table.output_tokens_per_step == pytest.approx(0.25 * 1 + 0.75 * 4)
    assert sum(row.tokens_share for row in table.rows) == pytest.approx(1.0)


BAD = {
    "returns": ("def load():\n    return torch.nn.Linear(2, 2)\n", "does not return two things"),
    "state": (
        "class N(torch.nn.Module):\n    n = 0\n    def forward(self, x):\n        self.n += 1\n        return x + self.n\n"
        "def load():\n    return N(), {'a': torch.randn(1, 4)}\n",
        "another answer",
    ),
    "writes": (
        "class N(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.register_buffer('seen', torch.zeros(1))\n"
        "    def forward(self, x):\n        self.seen.fill_(1.0)\n        return x * 2\n"
        "def load():\n    return N(), {'a': torch.randn(1, 4)}\n",
        "write to its own tensors",
    ),
    "raises": ("def load():\n    raise RuntimeError('no file')\n", "fails in load"),
    "nan": ("def load():\n    return torch.nn.Identity(), {'a': torch.randn(1, 4).log()}\n", "not finite"),
    "object": ("def load():\n    return torch.nn.Identity(), {'a': {'input': object()}}\n", "is a object"),
    "name": ("def load():\n    return torch.nn.Identity(), {'a b': torch.randn(1, 4)}\n", "is no name"),
    "jit": (
        "def load():\n    return torch.jit.script(torch.nn.Linear(2, 2)), {'a': torch.randn(1, 2)}\n",
        "TorchScript",
    ),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_what_cannot_be_served_is_said_in_one_sentence(name: str, tmp_path: Path) -> None:
    text, problem = BAD[name]
    path = tmp_path / "net.py"
    path.write_text("import torch\n" + text)
    with pytest.raises(InputError, match=problem):
        prepare_module(str(path), cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["absent.py", "no.such.module:load", "json", "engines.module.recipe:nothing"])
def test_a_name_that_leads_nowhere(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError):
        prepare_module(name, cache_dir=tmp_path)


def test_a_function_of_an_importable_module_is_a_recipe(
    tmp_path: Path, cache: Path, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "nets"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "mine.py").write_text(recipe_file.read_text())
    monkeypatch.syspath_prepend(str(tmp_path))
    ref = prepare_module("nets.mine:load", cache_dir=cache)
    assert ref.architecture == "Net"
    assert module_facts(ref).recipe.search_path == (str(tmp_path),)


@pytest.fixture(scope="module")
def program(net: ModelRef) -> ModuleProgram:
    found = open_program(net)
    assert isinstance(found, ModuleProgram)
    return found


def window(program: ModuleProgram, row: int = 1) -> torch.Tensor:
    """One step of a row on the candidate's side."""
    examples = program._examples
    words = torch.from_numpy(ModuleInputs(examples, 5).steps(row, 1))
    out = torch.full((1, examples[row].batch, examples[row].width), float("nan"))
    reply = program.run_window("candidate", 0, row, WindowInputs(tokens=words, nonce="n"), out)
    assert reply.failure is None, reply.failure
    return out


def test_slots_are_the_modules_that_have_a_forward(program: ModuleProgram) -> None:
    table = program.slots()
    assert "blocks" not in table.names()
    assert {"model", "blocks.1", "blocks.1.up", "head", "embed"} <= set(table.names())
    block = next(slot for slot in table.slots if slot.name == "blocks.1")
    assert (block.stands_for, block.signature) == ("Block", "(x)")
    assert "gelu" in program.reference_source("blocks.1")
    assert "class Net" in program.reference_source("model")


def test_a_template_does_what_the_reference_does(program: ModuleProgram) -> None:
    text = program.part_template("blocks.1")
    source = replace(part("pass"), files=(("part.py", text),))
    before = window(program)
    program.install("candidate", candidate(source, Numerics.TOLERANCE), Artefacts(), 0)
    assert torch.equal(window(program), before)
    assert program._sides["candidate"].counts() == {f"blocks.{index}": 1 for index in range(3)}
    program.uninstall("candidate")


def test_a_claim_of_a_class_gets_the_weights_of_each_slot(program: ModuleProgram, net: ModelRef, cache: Path) -> None:
    source = part(
        "return torch.nn.functional.linear(args[0], self.w['weight'], self.w.get('bias'))",
        claims='["**"]', replaces="Linear", setup="self.w = ctx.weights",
    )  # fmt: skip
    text = source.text().replace(
        "    def prepare", "    def weights(self, w, params):\n        return dict(w)\n    def prepare"
    )
    wanted = candidate(replace(source, files=(("part.py", text),)))
    built = build_candidate(wanted, net, module_names(net), [(0, 1, 2)], cache_dir=cache)
    slots = set(built.parts[0].derived[0])
    assert slots == {f"blocks.{index}.{name}" for index in range(3) for name in ("up", "down")} | {"head"}


def test_settings_of_language_models_mean_nothing_here(program: ModuleProgram) -> None:
    wanted = Candidate(settings={"kv_dtype": "bfloat16"}, numerics=Numerics.LOSSY)
    with pytest.raises(CandidateFailed, match="setting kv_dtype means nothing here"):
        program.install("candidate", wanted, Artefacts(), 0)


def test_what_is_compiled_are_blocks_that_repeat_or_the_whole(program: ModuleProgram) -> None:
    assert compiled_alone(program._tree) == ("blocks.0", "blocks.1", "blocks.2")
    assert compiled_alone(torch.nn.Sequential(torch.nn.Linear(2, 2))) == ("",)


def test_compiled_code_answers_alike_and_is_taken_off(tmp_path: Path) -> None:
    """One product, for which no C++ has to be compiled."""
    path = tmp_path / "one.py"
    path.write_text("import torch\ndef load():\n    return torch.nn.Linear(8, 8), {'a': torch.randn(2, 8)}\n")
    small = open_program(prepare_module(str(path), cache_dir=tmp_path))
    assert isinstance(small, ModuleProgram)
    before = window(small, 0)
    small.install("candidate", Candidate(settings={"compile_mode": "default"}), Artefacts(), 0)
    assert "forward" in small._sides["candidate"].net.model.__dict__
    assert torch.allclose(window(small, 0), before, atol=1e-5)
    small.uninstall("candidate")
    assert torch.equal(window(small, 0), before)
    assert small.state()["trees"] == ""


def test_a_part_that_answers_wrongly_is_seen_by_the_judge(module_engine: ModuleEngine, served: Deployment) -> None:
    wrong = candidate(part("found = self.reference(*args, **kwargs)\nfound['logits'][-1, -1] += 1e-6\nreturn found"))
    result = module_engine.measure(order(served, wrong))
    assert result.failure is None
    assert [check.bit_equal for check in result.checks if check.against == "incumbent"] == [False, False]


def test_a_reload_is_proven(module_engine: ModuleEngine) -> None:
    honest = candidate(part("return self.reference(*args, **kwargs)"))
    proof = module_engine.verify_reload(AS_LOADED, honest)
    assert proof.holds, proof.reason
    assert proof.windows == 2
