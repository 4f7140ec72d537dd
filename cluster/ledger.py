"""MLflow as the face of a campaign: a mirror of the event log, made from behind by one thread of its own.

    event log ──EventReader──► mirror thread ──► runs.Story ──► MLflow client (explicit run ids only) ──► SQLite or a server
                                    └──► passes/*.parquet (derived from the log), uploaded under the campaign's run

The loop never waits for MLflow: it writes the log, and the mirror reads that. What MLflow did not get (a server that is away, a kill)
is mirrored later from the log, each attempt in exactly one run. What is not here: what a run shows (`cluster.runs`).

The only module that imports mlflow, and only when a mirror is opened. What is read back from MLflow: `cluster.mirrored`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cluster.events import Event, EventReader, last_seq_of, writer_of
from cluster.passes import EVENTS, PASSES, PassWriter
from cluster.runs import NOTE, CampaignFacts, RunContent, Story, prepared_views, result_metrics
from cluster.tracking import local_folder, made_whole, one_line, resolve_uri, use_write_ahead_log
from hotpass.errors import MachineError
from search.agents.exchange import FOLDER as REPLIES

BATCH = 64
"""Events mirrored between two notes of how far the mirror is."""
POLL_SECONDS = 0.5
TOLD_SECONDS = 5.0
"""Of draining, after which people read how long it will take."""
RETRY_SECONDS = (1.0, 2.0, 5.0, 15.0, 60.0)
MAX_PARAM, MAX_TAG = 500, 2000
"""Characters; anything longer is a file under `long/`, whole."""
MIRRORED = "mirrored_seq"
"""Tag of the campaign's run: events up to this one are mirrored."""
UPLOADED = "passes_mirrored_seq"
VIEW_TAG = "mlflow.sharedViewState."
"""MLflow keeps shared states of its table of runs as tags of the experiment, under this and a key."""
LAST_FILES = ("result.json", "report.html")


class Mirror:
    """A running mirror. Made by `open_mirror`; `close` drains it."""

    def __init__(
        self, folder: Path, facts: CampaignFacts, uri: str, artifacts: str | None, note: Callable[[str], None]
    ) -> None:
        self.folder = folder
        self.facts = facts
        self.tracking_uri = uri
        self._artifacts = artifacts
        self._note = note
        self._reader = EventReader(folder / EVENTS)
        self._passes = PassWriter(folder, facts.dtype)
        self._story = Story()
        self._closing = threading.Event()
        self._may_run = threading.Event()
        self._may_run.set()
        self._stuck = ""
        self._pending: list[Event] = []
        self._children: dict[int, str] = {}
        self._finished: set[int] = set()
        self._series: list[Any] = []
        self._parent = ""
        self._mirrored = 0
        self._steps = 0
        """Counts whatever gets done: who waits sees by it that something moves."""
        self._uploaded = 0
        self._client: Any = None
        self._thread = threading.Thread(target=self._run, name="mlflow-mirror", daemon=True)

    @property
    def run_id(self) -> str:
        """Of the campaign's own run; empty until MLflow answered for the first time."""
        return self._parent

    @property
    def lag(self) -> str:
        """Why the mirror is behind, empty while it keeps up."""
        return self._stuck

    def pause(self) -> None:
        """Stand still at the next event: a measurement runs on the same cores."""
        self._may_run.clear()

    def go_on(self) -> None:
        self._may_run.set()

    def close(self, timeout_seconds: float = 60.0) -> bool:
        """Mirror what is left, end the campaign's run with its true status; says how long that takes where it is more than a moment.

        `timeout_seconds`: without any progress, after which MLflow is left behind. False then: the log has everything, and the next
        mirror of this campaign goes on."""
        self._may_run.set()
        self._closing.set()
        told = self._drain(timeout_seconds)
        done = not self._thread.is_alive() and not self._stuck
        if not done:
            self._note(
                f"MLflow at {self.tracking_uri} has the campaign up to event {self._mirrored} ({self._stuck or 'slow'}); "
                f"the log has all of it, and `hotpass ui {self.folder}` mirrors the rest"
            )
        elif told:
            self._note(f"MLflow has all of the campaign now, {told:.0f} s after its end")
        return done

    def _drain(self, timeout_seconds: float) -> float:
        """Wait as long as events go in. Seconds that it took if people were told to wait, else 0."""
        began = moved = now = time.monotonic()
        first, steps = self._mirrored, self._steps
        told = False
        while self._thread.is_alive() and now - moved < timeout_seconds:
            self._thread.join(min(POLL_SECONDS, timeout_seconds))
            now = time.monotonic()
            if self._steps != steps:
                steps, moved = self._steps, now
            if not told and now - began > TOLD_SECONDS and self._thread.is_alive():
                told = True
                seen = self._mirrored
                behind, rate = last_seq_of(self.folder / EVENTS) - seen, (seen - first) / (now - began)
                time_left = f"about {behind / rate:.0f} s at {rate:.0f} a second" if rate else "unknown how long"
                self._note(f"the campaign is over, MLflow is {behind} events behind: {time_left}")
        return now - began if told else 0.0

    def start(self) -> None:
        self._thread.start()

    # On the mirror's thread from here on ---------------------------------------------------------------------------

    def _run(self) -> None:
        # One that works beside measurements takes what they leave. Linux gives each thread its own priority.
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        failures = 0
        while True:
            ending = self._closing.is_set()
            try:
                self._may_run.wait()
                if not self._parent:
                    self._open_runs()
                moved = self._mirror_batch()
                self._stuck, failures = "", 0
                if ending and not moved:
                    self._end()
                    return
                if moved:
                    continue
            except Exception as error:  # the campaign goes on whatever MLflow, its store or its server does
                if not failures:
                    self._note(
                        f"MLflow at {self.tracking_uri} does not take events ({one_line(error)}); it will be tried again"
                    )
                self._stuck = one_line(error)
                failures += 1
                if ending and failures > 2:
                    return
            self._closing.wait(RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1] if failures else POLL_SECONDS)

    def _open_runs(self) -> None:
        """The experiment, the campaign's run (found again or made), and what of its children is already there."""
        mlflow = import_mlflow()
        made_whole(self.tracking_uri, lambda uri: mlflow.MlflowClient(tracking_uri=uri).search_experiments())
        client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        self._steps += 1
        found = client.get_experiment_by_name(self.facts.experiment)
        experiment = found.experiment_id if found else client.create_experiment(self.facts.experiment, self._artifacts)
        if not found:
            client.set_experiment_tag(experiment, "mlflow.note.content", NOTE)
            client.set_experiment_tag(experiment, "mlflow.experimentKind", "custom_model_development")
            for key, state in prepared_views().items():
                client.set_experiment_tag(experiment, f"{VIEW_TAG}{key}", json.dumps(state))
            use_write_ahead_log(self.tracking_uri)
        where = f"tags.campaign_id = '{self.facts.campaign_id}' and tags.role = 'campaign'"
        runs = client.search_runs([experiment], where, max_results=1)
        if runs:
            parent, tags = runs[0].info.run_id, runs[0].data.tags
            client.update_run(parent, status="RUNNING")
        else:
            parent, tags = self._make_parent(client, experiment), {}
        self._mirrored, self._uploaded = int(tags.get(MIRRORED, 0)), int(tags.get(UPLOADED, 0))
        self._client, self._experiment = client, experiment
        if runs:
            self._reconcile(parent)
        self._parent = parent

    def _make_parent(self, client: Any, experiment: str) -> str:
        tags = {
            "mlflow.runName": self.facts.name,
            "mlflow.source.name": "hotpass",
            "mlflow.note.content": NOTE,
            "role": "campaign",
            "campaign": self.facts.name,
            "campaign_id": self.facts.campaign_id,
            **self.facts.tags,
        }
        run_id = str(client.create_run(experiment, tags={k: v[:MAX_TAG] for k, v in tags.items()}).info.run_id)
        from mlflow.entities import Param

        client.log_batch(run_id, params=[Param(k, v[:MAX_PARAM]) for k, v in self.facts.params.items()])
        if (self.folder / "campaign.json").is_file():
            client.log_artifact(run_id, str(self.folder / "campaign.json"))
        return run_id

    def _reconcile(self, parent: str) -> None:
        """Children by the event that they mirror. One that has no such event in the log never was an attempt: it was killed."""
        known = {event.seq for event in self._all_events() if event.kind in ("attempt", "measurement")}
        for run in children_of(self._client, self._experiment, parent):
            seq = int(run.data.tags.get("seq", 0))
            if seq in known and seq not in self._children:
                self._children[seq] = run.info.run_id
                if run.info.status != "RUNNING":
                    self._finished.add(seq)
            elif run.info.status == "RUNNING":
                self._client.set_tag(run.info.run_id, "reason", "its attempt is not in the campaign's log")
                self._client.set_terminated(run.info.run_id, status="KILLED")

    def _all_events(self) -> Iterator[Event]:
        reader = EventReader(self.folder / EVENTS)
        while events := reader.poll(limit=BATCH):
            yield from events

    def _mirror_batch(self) -> bool:
        """Some events further; False when there are none. What fails stays pending, and is done again as a whole."""
        self._pending = self._pending or self._reader.poll(limit=BATCH)
        if not self._pending and self._reader.last_seq <= self._mirrored:
            return False
        while self._pending:
            self._may_run.wait()
            event = self._pending[0]
            content = self._story.run_of(event)
            if content and (
                event.seq > self._mirrored or (event.seq in self._children and event.seq not in self._finished)
            ):
                self._write_child(content)
            self._passes.add(event)
            series = self._story.apply(event)
            self._pending.pop(0)
            self._steps += 1
            if event.seq > self._mirrored:
                self._series += [(name, value, step, event) for name, (value, step) in series.items()]
        self._write_series()
        self._upload_passes()
        if self._reader.last_seq > self._mirrored:
            self._client.set_tag(self._parent, MIRRORED, str(self._reader.last_seq))
            self._mirrored = self._reader.last_seq
        return True

    def _write_child(self, content: RunContent) -> None:
        """One run, complete when it is ended; found again if an earlier try made it."""
        from mlflow.entities import Metric, Param, RunTag

        if content.seq in self._finished:
            return
        told = {name: _shortened(value, MAX_TAG) for name, value in content.tags.items() if value}
        run_id, folder = self._children.get(content.seq), None
        if run_id is None:
            tags = {
                "mlflow.parentRunId": self._parent,
                "mlflow.runName": content.name[:250],
                "mlflow.source.name": "hotpass",
                "campaign_id": self.facts.campaign_id,
                "seq": str(content.seq),
                **told,
            }
            info = self._client.create_run(self._experiment, start_time=content.start_ms, tags=tags).info
            run_id, folder = info.run_id, local_folder(info.artifact_uri)
            self._children[content.seq] = run_id
            told = {}  # in one go with the run: every call is a transaction of its own
        long = {f"tag {k}": v for k, v in content.tags.items() if len(v) > MAX_TAG}
        long |= {f"param {k}": v for k, v in content.params.items() if len(v) > MAX_PARAM}
        for name, text in long.items():
            self._client.log_text(run_id, text, f"long/{name.replace('/', '-')}.txt")
        self._client.log_batch(
            run_id,
            metrics=[Metric(name, value, content.end_ms, content.step) for name, value in content.metrics.items()],
            params=[Param(name, _shortened(value, MAX_PARAM)) for name, value in content.params.items()],
            tags=[RunTag(name, value) for name, value in told.items()],
        )
        sources = self.folder / "candidates" / content.candidate_id
        if content.candidate_id and sources.is_dir() and folder is not None:
            # What the client does with it too, after it has read the whole run again.
            shutil.copytree(sources, folder / "candidate", dirs_exist_ok=True)
        elif content.candidate_id and sources.is_dir():
            self._client.log_artifacts(run_id, str(sources), "candidate")
        self._client.set_terminated(run_id, status="FAILED" if content.failed else "FINISHED", end_time=content.end_ms)
        self._finished.add(content.seq)

    def _write_series(self) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, round(event.time * 1000), step) for name, value, step, event in self._series]
        for start in range(0, len(metrics), 1000):  # MLflow takes at most 1,000 metrics at once
            self._client.log_batch(self._parent, metrics=metrics[start : start + 1000])
        self._series = []

    def _upload_passes(self) -> None:
        for path in sorted((self.folder / PASSES).glob("*.parquet")):
            last = int(path.stem.split("-")[1])
            if last > self._uploaded:
                self._client.log_artifact(self._parent, str(path), PASSES)
                self._client.set_tag(self._parent, UPLOADED, str(last))
                self._uploaded = last

    def _end(self) -> None:
        """What is only known at the end, and a status that is true."""
        from mlflow.entities import Metric, RunTag

        self._passes.flush()
        self._upload_passes()
        result = self._story.result
        if result is not None:
            now = round(_mtime(self.folder / EVENTS) * 1000)
            metrics = [Metric(name, value, now, 0) for name, value in result_metrics(result).items()]
            best = result.get("best") or {}
            tags = [
                RunTag("verdict", str(result.get("verdict") or "none")),
                RunTag("winner", str(best.get("candidate", "none"))),
                RunTag("winner_label", _shortened(str(best.get("label", "")), MAX_TAG)),
                RunTag("claim_kind", str(best.get("kind", ""))),
                RunTag("gates", json.dumps(result.get("gates") or {})[:MAX_TAG]),
            ]
            self._client.log_batch(self._parent, metrics=metrics, tags=tags)
        for name in LAST_FILES:
            if (self.folder / name).is_file():
                self._client.log_artifact(self._parent, str(self.folder / name))
        if (self.folder / REPLIES).is_dir():
            self._client.log_artifacts(self._parent, str(self.folder / REPLIES), REPLIES)
        self._client.set_terminated(self._parent, status="FINISHED" if result is not None else "KILLED")


def open_mirror(
    folder: Path, facts: CampaignFacts, *, tracking_uri: str = "", note: Callable[[str], None] = lambda text: None
) -> Mirror:
    """Start mirroring the campaign in `folder` into its own SQLite, or to `tracking_uri`. Returns at once.

    `note` gets sentences for people. Raises InputError when the server cannot be reached now; once it was, it may go and come.
    """
    folder = Path(folder).resolve()
    uri, artifacts = resolve_uri(folder, tracking_uri)
    mirror = Mirror(folder, facts, uri, artifacts, note)
    mirror.start()
    return mirror


def catch_up(folder: Path, facts: CampaignFacts, *, tracking_uri: str = "", timeout_seconds: float = 600.0) -> bool:
    """Mirror what a campaign that no longer runs left unmirrored, and make its statuses true. False: it runs, or MLflow is away."""
    if writer_of(Path(folder) / EVENTS) is not None:
        return False
    return open_mirror(folder, facts, tracking_uri=tracking_uri).close(timeout_seconds)


def import_mlflow() -> Any:
    """mlflow, quiet, impatient, and without reporting home. Its own environment variables win where they are set."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        import mlflow
    except ImportError as error:
        raise MachineError(f"mlflow cannot be imported ({error}); install hotpass with its dependencies") from error
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    return mlflow


def children_of(client: Any, experiment: str, parent: str) -> Iterator[Any]:
    """Runs of the attempts and baselines of a campaign's run."""
    token = None
    while True:
        page = client.search_runs(
            [experiment], f"tags.`mlflow.parentRunId` = '{parent}'", max_results=1000, page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def _shortened(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 20] + "… (whole in long/)"


def _mtime(folder: Path) -> float:
    return max((path.stat().st_mtime for path in folder.glob("*.jsonl")), default=0.0)
