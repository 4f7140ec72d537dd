"""Real models from their wheels: what is served is what their authors' own code computes, and parts for them are right and faster."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from actors.slots import open_program
from engines.build import build_candidate
from engines.module.inputs import ModuleInputs
from engines.module.prepare import module_facts, prepare_module
from engines.module.program import ModuleProgram
from engines.prepare.store import MODULE_FILE
from engines.program import Artefacts, WindowInputs
from hotpass.errors import MachineError
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, Value
from hotpass.records.deployment import ModelRef
from search.catalogue import find_part

pytestmark = pytest.mark.slow


def fetched(name: str) -> ModelRef:
    """Prepared in the user's cache, as the language models are; skipped where PyPI cannot be reached."""
    try:
        return prepare_module(name)
    except MachineError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def silero() -> ModuleProgram:
    return opened("silero-vad")


@pytest.fixture(scope="module")
def antiberty() -> ModuleProgram:
    return opened("antiberty")


def opened(name: str) -> ModuleProgram:
    """With its weights where the keeper would have them: at 64 bytes, since sums of fp32 come out otherwise elsewhere on some CPUs."""
    program = open_program(fetched(name))
    assert isinstance(program, ModuleProgram)
    for weight in program._tree.parameters():
        weight.data = weight.data.clone()
        assert weight.data_ptr() % 64 == 0
    return program


def answers(program: ModuleProgram, row: int = 0) -> torch.Tensor:
    """[1, batch, width] of one step on the candidate's side."""
    example = program._examples[row]
    words = torch.from_numpy(ModuleInputs(program._examples, 5).steps(row, 1))
    out = torch.full((1, example.batch, example.width), float("nan"))
    reply = program.run_window("candidate", 0, row, WindowInputs(tokens=words, nonce="n"), out)
    assert reply.failure is None, reply.failure
    return out


def install(program: ModuleProgram, model: ModelRef, name: str, cache: Path, **params: Value) -> None:
    """A catalogue part with its derived weights, on the candidate's side."""
    source = find_part(name)
    candidate = Candidate(parts=(declaration(source).bind(source, params),))
    cut = tuple(range(model.num_layers))
    built = build_candidate(candidate, model, program.slots(), [cut], cache_dir=cache)
    derived = {
        slot: {name: tensor.clone() for name, tensor in load_file(path).items()}
        for slot, path in built.parts[0].derived[0].items()
    }
    program.install("candidate", candidate, Artefacts(native=({},), derived=(derived,)), 0)


def test_silero_serves_what_its_own_model_computes(silero: ModuleProgram) -> None:
    facts = module_facts(fetched("silero-vad"))
    theirs = torch.jit.load(Path(facts.recipe.folder) / "data" / "silero_vad.jit")
    audio = 0.1 * torch.randn(1, 20 * 512, generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        mine = silero._tree(audio)
        frames = [theirs(frame[None], 16000) for frame in audio[0].split(512)]
    assert mine.shape == (1, 20)
    assert torch.allclose(mine, torch.cat(frames, dim=1), atol=1e-5)
    assert float(mine.std()) > 0


def test_parts_for_silero(silero: ModuleProgram, tmp_path: Path) -> None:
    model, before = fetched("silero-vad"), answers(silero)
    install(silero, model, "traced", tmp_path)
    assert torch.equal(answers(silero), before)
    install(silero, model, "silero-stages", tmp_path)
    assert torch.equal(answers(silero), before)
    install(silero, model, "silero-frames", tmp_path)
    assert torch.allclose(answers(silero), before, atol=1e-6)
    silero.uninstall("candidate")
    assert torch.equal(answers(silero), before)


def test_antiberty_tells_antibodies_apart(antiberty: ModuleProgram) -> None:
    """Trastuzumab's heavy chain, and its light chain, by the model's own head."""
    chains = (
        "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
        "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    )  # fmt: skip
    letters = "ACDEFGHIKLMNPQRSTVWY"
    for index, chain in enumerate(chains):
        tokens = torch.tensor([[2, *(5 + letters.index(letter) for letter in chain), 3]])
        with torch.inference_mode():
            found = antiberty._tree(input_ids=tokens, attention_mask=torch.ones_like(tokens))
            hidden = found["residues"].argmax(-1)[0, 1:-1]
        assert int(found["chain"].argmax()) == index
        # unmasked, the model gives back nearly every residue: its weights are in their places
        assert float((hidden == tokens[0, 1:-1]).float().mean()) > 0.95


def test_parts_for_antiberty(antiberty: ModuleProgram, tmp_path: Path) -> None:
    model, before = fetched("antiberty"), answers(antiberty)
    assert (Path(model.folder) / MODULE_FILE).is_file()
    for part, slots in (
        ("bert-fused-qkv", [f"bert.encoder.layer.{index}.attention.self" for index in range(8)]),
        ("bert-encoder", ["bert.encoder"]),
    ):
        install(antiberty, model, part, tmp_path)
        assert torch.equal(answers(antiberty), before), part
        assert antiberty._sides["candidate"].counts() == dict.fromkeys(slots, 1)
    antiberty.uninstall("candidate")
    assert torch.equal(answers(antiberty), before)
