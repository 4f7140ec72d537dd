"""Candidates as folders, and measured passes as tables."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from cluster.events import EventLog, read_events
from cluster.journal import proposal_payload
from cluster.passes import PASS_COLUMNS, PassWriter, read_passes
from cluster.store import (
    CandidateWriter,
    load_candidate,
    load_candidates,
    read_candidate_folder,
    restored,
    save_candidate,
)
from hotpass.decode import json_safe
from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate, Numerics, PartSource, PartUse, Proposal
from tests.search.builders import part

TEXT = (
    "from hotpass import part\n\n@part(engine='decoder', claims=['model'], params={'bits': [32, 4], 'act': [None, 'int8']},\n"
    "      native={'step': 'step.cpp'}, numerics_when={'act=int8': 'lossy'})\nclass P:\n    def forward(self, x): ...\n"
)
SOURCE = PartSource(
    name="cpp: model/ü", files=(("part.py", TEXT), ("step.cpp", '// tab\t \\ "quoted" é\r\n'), ("sub/a.h", "\n"))
)
CANDIDATE = Candidate(
    parts=(
        PartUse(source=SOURCE, params={"bits": 4, "act": None}),
        PartUse(source=part("mlp", ["model.layers.*.mlp"])),
    ),
    settings={"threads": 2, "compile_mode": "default"},
    parallelism={"tp": 2},
    numerics=Numerics.TOLERANCE,
)


def test_a_candidate_comes_back_byte_for_byte(tmp_path: Path) -> None:
    folder = save_candidate(tmp_path, CANDIDATE)
    assert load_candidate(tmp_path, CANDIDATE.id) == CANDIDATE
    assert (folder / "parts/0-cpp-model-" / "step.cpp").read_bytes() == SOURCE.text("step.cpp").encode()
    before = (folder / "candidate.toml").stat().st_mtime_ns
    assert save_candidate(tmp_path, CANDIDATE) == folder
    assert (folder / "candidate.toml").stat().st_mtime_ns == before
    save_candidate(tmp_path, AS_LOADED)
    assert load_candidates(tmp_path) == {CANDIDATE.id: CANDIDATE, AS_LOADED.id: AS_LOADED}
    assert sorted(path.name for path in (tmp_path / "candidates").iterdir()) == sorted([CANDIDATE.id, AS_LOADED.id])


def test_a_changed_source_or_setting_is_noticed(tmp_path: Path) -> None:
    folder = save_candidate(tmp_path, CANDIDATE)
    source = folder / "parts/0-cpp-model-" / "step.cpp"
    original = source.read_bytes()
    source.write_bytes(original + b" ")
    with pytest.raises(InputError, match="is not the hash of its sources"):
        load_candidate(tmp_path, CANDIDATE.id)
    source.write_bytes(original)
    toml = folder / "candidate.toml"
    toml.write_text(toml.read_text().replace('"threads" = 2', '"threads" = 1'))
    with pytest.raises(InputError, match="does not belong to this content"):
        load_candidate(tmp_path, CANDIDATE.id)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths that were made durable, in order."""
    found: list[Path] = []
    fsync = os.fsync

    def note(fd: int) -> None:
        found.append(Path(os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", note)
    return found


def test_each_source_is_made_durable_once_and_candidates_cost_no_trip_to_the_disk(
    tmp_path: Path, synced: list[Path]
) -> None:
    writer = CandidateWriter(tmp_path)
    writer.save(CANDIDATE)
    assert synced == []
    writer.sync()
    folder = tmp_path.resolve() / "sources" / SOURCE.sha256
    assert {folder / "part.py", folder / "step.cpp", folder / "sub/a.h", folder / "sub", folder} <= set(synced)
    assert {folder.parent, tmp_path.resolve()} <= set(synced)
    synced.clear()
    writer.save(Candidate(parts=(PartUse(source=SOURCE, params={"bits": 32, "act": None}),)))
    writer.sync()
    assert synced == []


def test_what_a_dead_writer_left_is_made_durable_by_the_next(tmp_path: Path, synced: list[Path]) -> None:
    CandidateWriter(tmp_path).save(CANDIDATE)
    again = CandidateWriter(tmp_path)
    again.save(CANDIDATE)
    again.sync()
    assert tmp_path.resolve() / "sources" / SOURCE.sha256 / "step.cpp" in synced


@pytest.mark.parametrize("harm", ["gone", "emptied", "cut"])
def test_a_candidate_that_a_loss_of_power_took_comes_back_from_log_and_sources(tmp_path: Path, harm: str) -> None:
    writer = CandidateWriter(tmp_path)
    whole = Candidate(settings={"threads": 1})
    folder = writer.save(CANDIDATE)
    writer.save(whole)
    writer.sync()
    proposals = [json_safe(proposal_payload(Proposal(candidate=c, proposer="optuna"))) for c in (CANDIDATE, whole)]
    if harm == "gone":
        shutil.rmtree(folder)
    elif harm == "emptied":
        (folder / "candidate.toml").write_bytes(b"")
    else:
        (folder / "parts/0-cpp-model-" / "step.cpp").write_bytes(b"// tab")
    assert restored(tmp_path, proposals) == [folder]
    assert load_candidates(tmp_path) == {CANDIDATE.id: CANDIDATE, whole.id: whole}
    assert restored(tmp_path, proposals) == []


def test_a_candidate_without_its_sources_stays_to_be_reported(tmp_path: Path) -> None:
    folder = save_candidate(tmp_path, CANDIDATE)
    (folder / "candidate.toml").write_bytes(b"")
    proposal = json_safe(proposal_payload(Proposal(candidate=CANDIDATE, proposer="optuna")))
    (tmp_path / "sources" / SOURCE.sha256).mkdir(parents=True)
    (tmp_path / "sources" / SOURCE.sha256 / "part.py").write_text("cut")
    assert restored(tmp_path, [proposal]) == []
    with pytest.raises(InputError):
        load_candidate(tmp_path, CANDIDATE.id)


@pytest.mark.parametrize("path", ["../out.py", "/etc/x.py", "a/../../b.py"])
def test_a_source_cannot_lead_out_of_its_folder(tmp_path: Path, path: str) -> None:
    source = PartSource(name="p", files=(("part.py", TEXT), (path, "x")))
    with pytest.raises(InputError, match="leads out"):
        save_candidate(tmp_path, Candidate(parts=(PartUse(source=source),)))
    assert list((tmp_path / "candidates").glob("*")) == []


def write_persons_folder(folder: Path, toml: str) -> Path:
    (folder / "parts/mine").mkdir(parents=True)
    (folder / "parts/mine/part.py").write_text(TEXT)
    (folder / "parts/mine/step.cpp").write_text("int x;\n")
    (folder / "candidate.toml").write_text(toml)
    return folder


def test_a_persons_folder_needs_no_ids(tmp_path: Path) -> None:
    toml = 'settings = { threads = 1, chunk_tokens = 512 }\n[[parts]]\nname = "mine"\nparams = { act = "int8" }\n'
    found = read_candidate_folder(write_persons_folder(tmp_path, toml))
    assert found.settings == {"threads": 1}
    assert found.parts[0].params == {"bits": 32, "act": "int8"}
    assert found.numerics is Numerics.LOSSY


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("setings = { threads = 1 }\n", "'setings' is not known; known: schema, id"),
        ('[[parts]]\nname = "mine"\nparam = { a = 1 }\n', "'parts.0.param' is not known; known: name, folder"),
        ('[[parts]]\nname = "other"\n', "does not exist"),
        ('[[parts]]\nname = "mine"\nparams = { bits = 5 }\n', "is not an allowed value"),
        ("settings = { thread = 1 }\n", "did you mean 'threads'"),
        ("settings = { threads = 0 }\n", "whole number of at least 1"),
        ('numerics = "exact"\n', "is not a class"),
        ("parts = 3\n", "cannot be used"),
        ("[[parts\n", "is not TOML"),
        ("schema = 2\n", "reads schema 1"),
        (f'id = "{"0" * 64}"\n', "does not belong"),
    ],
)
def test_a_wrong_candidate_file_is_one_clear_sentence(tmp_path: Path, toml: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_candidate_folder(write_persons_folder(tmp_path, toml))
    assert "\n" not in str(caught.value).split("TOML")[0]


def block(index: int, order: str) -> dict[str, object]:
    row = {
        "phase": "decode", "num_seqs": 2, "query_tokens": 2, "context_mean": 64, "context_max": 80, "steps_share": 1.0,
        "tokens_share": 1.0,
    }  # fmt: skip
    return {
        "row": row, "round_index": index, "order": order, "incumbent_ms": [10.0, 11.0], "candidate_ms": [5.0, 6.0],
        "steps_per_window": 8, "child_clock_ratio": 1.0, "layers": 4,
    }  # fmt: skip


def measurement(candidate_id: str, blocks: int) -> dict[str, object]:
    result = {
        "engine": "engine-0",
        "environment": {"hardware_id": "h", "threads": 2, "thread_env": {}, "versions": {}, "cuda_visible_devices": ""},
        "blocks": [block(i, "ABBA" if i % 2 == 0 else "BAAB") for i in range(blocks)],
        "simulated": False,
    }
    return {
        "assignment": 0, "candidate_id": candidate_id, "incumbent_id": AS_LOADED.id, "tier": "fast", "purpose": "search",
        "result": result,
    }  # fmt: skip


def test_passes_have_one_row_a_window_in_the_order_in_which_they_ran(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "events", clock=lambda: 7.0) as log:
        log.append("post", {})
        log.append("measurement", measurement("c1", 2))
    frame = read_passes(tmp_path, dtype="bfloat16")
    assert tuple(frame.columns) == PASS_COLUMNS
    assert list(zip(frame["round"], frame["window"], frame["side"], frame["ms_per_step"], strict=True)) == [
        (0, 0, "incumbent", 10.0), (0, 1, "candidate", 5.0), (0, 2, "candidate", 6.0), (0, 3, "incumbent", 11.0),
        (1, 0, "candidate", 5.0), (1, 1, "incumbent", 10.0), (1, 2, "incumbent", 11.0), (1, 3, "candidate", 6.0),
    ]  # fmt: skip
    first = frame.iloc[0]
    assert (first["seq"], first["time"], first["dtype"], first["threads"], first["layers"]) == (
        2,
        7.0,
        "bfloat16",
        2,
        4,
    )
    assert (first["candidate"], first["kind"], first["context_max"]) == ("c1", "measured", 80)


def test_files_and_log_together_hold_each_pass_once(tmp_path: Path) -> None:
    with EventLog.open(tmp_path / "events") as log:
        writer = PassWriter(tmp_path, "float32", rows_per_file=16)
        for i in range(10):
            log.append("measurement", measurement(f"c{i}", 1))
        written = [path for event in log.read() if (path := writer.add(event))]
        assert [path.name for path in written] == ["000000001-000000004.parquet", "000000005-000000008.parquet"]
        again = PassWriter(tmp_path, "float32", rows_per_file=16)
        assert again.last_seq == 8
        assert [again.add(event) for event in log.read()] == [None] * 10
        assert len(read_passes(tmp_path)) == 40
        assert again.flush() == tmp_path / "passes/000000009-000000010.parquet"
        assert again.flush() is None
    frame = read_passes(tmp_path)
    assert list(frame.groupby("seq").size()) == [4] * 10
    assert set(frame["dtype"]) == {"float32"}
    written[0].write_bytes(b"torn")
    assert len(read_passes(tmp_path)) == 40, "the log has what a damaged file should have held"
    assert len(list(read_events(tmp_path / "events"))) == 10
