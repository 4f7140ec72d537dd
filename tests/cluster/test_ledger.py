"""The mirror in MLflow: what it shows, that it shows it once, and that it is true after any death. Real SQLite stores."""

from __future__ import annotations

import json
import math
import re
import shutil
import socket
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.events import last_seq_of, read_events
from cluster.ledger import UPLOADED, VIEW_TAG, Mirror, catch_up, import_mlflow, open_mirror
from cluster.mirrored import read_back
from cluster.passes import read_passes
from cluster.runs import Story, result_metrics
from cluster.store import load_candidate
from cluster.tracking import made_whole, resolve_uri
from hotpass.errors import InputError
from hotpass.records.measurement import Verdict
from tests.cluster.written import FACTS, Writer, candidate, no_trouble, runs_of, write_campaign


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An initialised SQLite store: making one takes seconds, a copy none."""
    folder = tmp_path_factory.mktemp("store")
    import_mlflow().MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}").search_experiments()
    return folder / "mlflow.db"


@pytest.fixture
def campaign(tmp_path: Path, empty_store: Path) -> Path:
    folder = tmp_path / "tiny-chat"
    folder.mkdir()
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


def mirrored(folder: Path) -> Mirror:
    """Mirror what the log has, and end."""
    mirror = open_mirror(folder, FACTS, note=no_trouble)
    assert mirror.close()
    return mirror


def by_name(folder: Path) -> dict[str, Any]:
    found = {run.info.run_name: run for run in runs_of(f"sqlite:///{folder / 'mlflow.db'}")}
    return found


def test_a_campaign_is_one_run_with_a_child_an_attempt(campaign: Path) -> None:
    write_campaign(campaign).log.close()
    mirror = mirrored(campaign)
    runs = by_name(campaign)
    parent = runs.pop("tiny-chat")
    assert parent.info.run_id == mirror.run_id
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["role"] == "campaign"
    assert {run.data.tags["mlflow.parentRunId"] for run in runs.values()} == {mirror.run_id}
    assert Counter(run.data.tags["role"] for run in runs.values()) == {"attempt": 8, "baseline": 1, "aa": 1}
    fast = runs["whole(bits=4)"]
    assert fast.data.metrics["speedup"] == 5.5
    assert fast.data.metrics["speedup_low"] == pytest.approx(5.39)
    assert fast.data.metrics["tokens_per_s"] == 550
    assert fast.data.metrics["cost/reload_ms"] == 32
    assert fast.data.metrics["ms/decode n2 q2 c256"] == pytest.approx(41 / 5.5)
    tags = ("verdict", "tier", "purpose", "numerics", "proposer", "reason", "gates")
    assert [fast.data.tags[tag] for tag in tags] == [
        "faster", "fast", "search", "tolerance", "screening", "measured", "logits: pass",
    ]  # fmt: skip
    assert fast.data.params["parts"] == "whole(bits=4)"
    assert fast.info.end_time - fast.info.start_time == 4000
    assert runs["whole(bits=4) · slow"].data.tags["tier"] == "slow"
    assert runs["cold · whole(bits=4)"].data.tags["purpose"] == "cold"
    assert runs["mlp + threads=1"].info.status == "FAILED"
    assert runs["mlp"].info.status == "FINISHED", "an incorrect candidate ran; it is its verdict that says so"
    assert parent.data.metrics["claim/speedup_vs_loaded_low"] == 5.3


def test_what_is_not_finite_is_a_tag_and_never_a_metric(campaign: Path) -> None:
    write_campaign(campaign).log.close()
    mirrored(campaign)
    wrong = by_name(campaign)["mlp"]
    assert "error/max_abs" not in wrong.data.metrics
    assert "speedup" not in wrong.data.metrics
    assert wrong.data.tags["not_finite/error/max_abs"] == "inf"
    assert all(math.isfinite(value) for run in by_name(campaign).values() for value in run.data.metrics.values())


def test_the_campaigns_own_series_have_a_point_an_attempt(campaign: Path) -> None:
    write_campaign(campaign).log.close()
    mirror = mirrored(campaign)
    client = import_mlflow().MlflowClient(tracking_uri=mirror.tracking_uri)
    best = sorted(
        (point.step, point.value) for point in client.get_metric_history(mirror.run_id, "best so far/speedup")
    )
    assert best == [(1, 2.8), (2, 2.8), *[(step, 5.5) for step in range(3, 9)]]
    shape = client.get_metric_history(mirror.run_id, "by attempt/ms decode n1 q1 c256")
    assert sorted(point.step for point in shape) == [1, 2, 3, 4, 5, 8], "those without a time have no point"


def test_sources_and_passes_come_back_from_mlflow_alone(campaign: Path, tmp_path: Path) -> None:
    write_campaign(campaign).log.close()
    mirror = mirrored(campaign)
    client = import_mlflow().MlflowClient(tracking_uri=mirror.tracking_uri)
    run = by_name(campaign)["whole(bits=4)"]
    back = Path(client.download_artifacts(run.info.run_id, "candidate", str(tmp_path)))
    made = candidate(4)
    (tmp_path / "candidates").mkdir()
    back.rename(tmp_path / "candidates" / made.id)
    assert load_candidate(tmp_path, made.id) == made
    passes = read_back(mirror.tracking_uri, "tiny-chat")
    assert passes.equals(read_passes(campaign))
    assert set(passes["dtype"]) == {"float32"}
    assert len(passes) == 8 * 3 * 2 * 4, "eight measurements of three rounds over two shapes"
    with pytest.raises(InputError, match="is not there"):
        read_back(mirror.tracking_uri, "another")


def test_mirroring_again_changes_nothing(campaign: Path) -> None:
    write_campaign(campaign).log.close()
    mirrored(campaign)
    before = {name: run.to_dictionary() for name, run in by_name(campaign).items()}
    mirrored(campaign)
    after = {name: run.to_dictionary() for name, run in by_name(campaign).items()}
    before.pop("tiny-chat")
    after.pop("tiny-chat")
    assert after == before
    assert len(list(runs_of(f"sqlite:///{campaign / 'mlflow.db'}"))) == 11


def test_a_mirror_that_dies_between_two_attempts_goes_on_where_it_was(campaign: Path) -> None:
    writer = write_campaign(campaign, end=False)
    mirrored(campaign)
    assert by_name(campaign)["tiny-chat"].info.status == "KILLED", "a campaign without a result did not finish"
    writer.try_candidate(candidate(32, 2), 2.0)
    writer.end()
    writer.log.close()
    assert catch_up(campaign, FACTS)
    runs = by_name(campaign)
    assert runs["tiny-chat"].info.status == "FINISHED"
    assert runs["whole(bits=32) + threads=2"].data.metrics["speedup"] == 2.0
    assert len(runs) == 12
    assert len(list(runs_of(f"sqlite:///{campaign / 'mlflow.db'}"))) == 12
    assert len(read_back(f"sqlite:///{campaign / 'mlflow.db'}", FACTS.campaign_id)) == 9 * 24
    *_, last = read_events(campaign / "events")
    assert runs["tiny-chat"].data.tags[UPLOADED] == str(last.seq)


def test_statuses_are_true_after_a_death_in_the_middle_of_a_child(campaign: Path) -> None:
    writer = write_campaign(campaign)
    writer.log.close()
    mirror = mirrored(campaign)
    client = import_mlflow().MlflowClient(tracking_uri=mirror.tracking_uri)
    half = by_name(campaign)["whole(bits=32)"]
    client.update_run(half.info.run_id, status="RUNNING")
    client.update_run(mirror.run_id, status="RUNNING")
    tags = {"mlflow.parentRunId": mirror.run_id, "seq": "9999", "mlflow.runName": "orphan"}
    client.create_run(half.info.experiment_id, tags=tags)
    assert catch_up(campaign, FACTS)
    runs = by_name(campaign)
    assert runs["orphan"].info.status == "KILLED"
    assert runs["whole(bits=32)"].info.status == "FINISHED"
    assert runs["tiny-chat"].info.status == "FINISHED"
    assert "RUNNING" not in {run.info.status for run in runs.values()}
    assert len(runs) == 12


def test_a_running_campaign_is_left_to_its_own_mirror(campaign: Path) -> None:
    writer = write_campaign(campaign)
    assert not catch_up(campaign, FACTS)
    writer.log.close()


def test_values_too_long_for_mlflow_are_whole_in_a_file(campaign: Path) -> None:
    writer = Writer(campaign)
    reason = "no such instruction; " * 500
    writer.try_candidate(candidate(), verdict=Verdict.FAILED, reason=reason)
    writer.log.close()
    mirror = mirrored(campaign)
    run = by_name(campaign)["whole(bits=32)"]
    assert run.data.tags["reason"].endswith("… (whole in long/)")
    client = import_mlflow().MlflowClient(tracking_uri=mirror.tracking_uri)
    assert Path(client.download_artifacts(run.info.run_id, "long/tag reason.txt")).read_text() == reason


def test_an_assignment_without_an_attempt_is_no_run(campaign: Path) -> None:
    writer = Writer(campaign)
    writer.try_candidate(candidate(), finish=False)
    writer.log.close()
    mirrored(campaign)
    assert set(by_name(campaign)) == {"tiny-chat"}


def test_the_mirror_stands_still_while_it_is_paused(campaign: Path) -> None:
    mirror = open_mirror(campaign, FACTS, note=no_trouble)
    mirror.pause()
    writer = write_campaign(campaign)
    writer.log.close()
    mirror.go_on()
    assert mirror.close()
    assert len(by_name(campaign)) == 11


def test_a_store_that_fails_does_not_fail_the_campaign(campaign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    mirror = open_mirror(campaign, FACTS, note=said.append)
    real, failures = Mirror._write_child, iter(range(2))

    def fail_twice(self: Mirror, content: Any) -> None:
        if next(failures, None) is not None:
            raise ConnectionError("the server went away")
        real(self, content)

    monkeypatch.setattr(Mirror, "_write_child", fail_twice)
    write_campaign(campaign).log.close()
    assert mirror.close(timeout_seconds=60)
    assert [line for line in said if "went away" in line] == said[:1]
    assert len(list(runs_of(mirror.tracking_uri))) == 11


def test_a_campaign_that_was_faster_than_mlflow_says_how_long_the_rest_takes(
    campaign: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    door = threading.Event()
    real = Mirror._write_child

    def held(self: Mirror, content: Any) -> None:
        door.wait()
        real(self, content)

    def note(text: str) -> None:
        said.append(text)
        door.set()

    monkeypatch.setattr(Mirror, "_write_child", held)
    monkeypatch.setattr("cluster.ledger.TOLD_SECONDS", 0.0)
    write_campaign(campaign).log.close()
    last = last_seq_of(campaign / "events")
    mirror = open_mirror(campaign, FACTS, note=note)
    assert mirror.close()
    assert f"MLflow is {last} events behind" in said[0]
    assert "MLflow has all of the campaign now" in said[1]
    assert len(by_name(campaign)) == 11


def test_an_mlflow_that_makes_no_progress_is_left_behind(campaign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    door = threading.Event()
    monkeypatch.setattr(Mirror, "_write_child", lambda self, content: door.wait())
    write_campaign(campaign).log.close()
    mirror = open_mirror(campaign, FACTS, note=said.append)
    try:
        assert not mirror.close(timeout_seconds=0.0)
        assert "the log has all of it" in said[-1]
    finally:
        door.set()


def test_a_store_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    uri, made = f"sqlite:///{tmp_path / 'mlflow.db'}", list[str]()

    def half(address: str) -> None:
        Path(address.removeprefix("sqlite:///")).write_bytes(b"half a store")
        raise OSError("the disk is full")

    def whole(address: str) -> None:
        made.append(address)
        Path(address.removeprefix("sqlite:///")).write_bytes(b"whole")

    with pytest.raises(OSError, match="disk is full"):
        made_whole(uri, half)
    assert list(tmp_path.iterdir()) == []
    made_whole(uri, whole)
    made_whole(uri, whole)
    assert len(made) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mlflow.db"]
    assert (tmp_path / "mlflow.db").read_bytes() == b"whole"
    made_whole("http://127.0.0.1:1", whole)
    assert len(made) == 1


def test_an_unreachable_server_is_refused_at_the_start(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(InputError, match="does not answer"):
            open_mirror(tmp_path, FACTS, tracking_uri=address)
    for wrong in ("mlruns", "sqlite://relative.db", "ftp://x"):
        with pytest.raises(InputError, match="is not a tracking server"):
            resolve_uri(tmp_path, wrong)
    assert resolve_uri(tmp_path, "")[0] == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_server_that_goes_away_is_said_and_the_log_keeps_all(tmp_path: Path) -> None:
    class OnlyHealthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), OnlyHealthy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        said: list[str] = []
        folder = tmp_path / "c"
        write_campaign(folder).log.close()
        mirror = open_mirror(folder, FACTS, tracking_uri=f"http://127.0.0.1:{server.server_port}", note=said.append)
        assert not mirror.close(timeout_seconds=60)
        assert mirror.lag
        assert "does not take events" in said[0]
        assert "the log has all of it" in said[-1]
        assert len(read_passes(folder)) == 8 * 24
    finally:
        server.shutdown()
        server.server_close()


def test_prepared_views_show_what_people_compare(campaign: Path) -> None:
    write_campaign(campaign).log.close()
    mirror = mirrored(campaign)
    client = import_mlflow().MlflowClient(tracking_uri=mirror.tracking_uri)
    experiment = client.get_experiment_by_name(FACTS.experiment)
    attempts = json.loads(experiment.tags[f"{VIEW_TAG}hotpass-attempts"])
    assert attempts["selectedColumns"][1:4] == ["metrics.`speedup`", "metrics.`speedup_low`", "metrics.`speedup_high`"]
    shown = client.search_runs([experiment.experiment_id], attempts["searchFilter"])
    assert len(shown) == 10
    logged = {f"metrics.`{name}`" for run in shown for name in run.data.metrics}
    logged |= {f"tags.`{name}`" for run in shown for name in run.data.tags}
    logged |= {f"params.`{name}`" for run in shown for name in run.data.params}
    assert set(attempts["selectedColumns"][1:]) <= logged, "no column is empty by a misspelling"
    assert f"{VIEW_TAG}hotpass-campaigns" in experiment.tags
    assert by_name(campaign)["tiny-chat"].data.metrics["speedup"] == 5.5
    assert "`speedup`" in experiment.tags["mlflow.note.content"]


def test_claims_that_do_not_exist_are_absent() -> None:
    assert result_metrics({"best": None}) == {}
    metrics = result_metrics({"best": {"tokens_per_s": 2.0, "speedup_vs_best_same_class": None}})
    assert metrics == {"claim/tokens_per_s": 2.0, "tokens_per_s": 2.0}
    assert Story().best == 1.0


def test_only_the_client_with_explicit_runs_is_used() -> None:
    import cluster.ledger

    text = Path(cluster.ledger.__file__).read_text()
    fluent = r"mlflow\.(start_run|log_\w+|set_tags?|set_experiment|set_tracking_uri|active_run|end_run)\b"
    assert not re.findall(fluent, text)
    assert not re.findall(r"\.log_(metric|param)\(", text), "points go in batches"
