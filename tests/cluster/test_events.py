"""The event log: order, durability, one writer, torn ends, rotation, a full disk."""

from __future__ import annotations

import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster.events import KINDS, EventLog, EventReader, last_seq_of, read_events, writer_of
from hotpass.decode import DecodeError, from_plain
from hotpass.errors import InputError, LedgerError
from hotpass.records.candidate import AS_LOADED, Candidate, PartSource, PartUse
from hotpass.records.measurement import Attempt, Verdict
from tests.search.builders import attempt


def seqs(folder: Path, after: int = 0) -> list[int]:
    return [event.seq for event in read_events(folder, after)]


def test_events_come_back_in_order_with_what_was_put_in(tmp_path: Path) -> None:
    times = iter([10.0, 11.5])
    with EventLog.open(tmp_path, clock=lambda: next(times)) as log:
        assert log.append("post", {"text": "naïve\u2028ünïcode \n \r", "n": 3}) == 1
        assert log.append_durable("decision", {"value": None}) == 2
        assert log.synced_seq == 2
        first, second = log.read()
    assert (first.seq, first.time, first.kind, first.schema_version) == (1, 10.0, "post", 1)
    assert first.payload == {"text": "naïve\u2028ünïcode \n \r", "n": 3}
    assert (second.seq, second.payload) == (2, {"value": None})
    lines = (tmp_path / "000001.jsonl").read_bytes().splitlines()
    assert list(json.loads(lines[0])) == ["seq", "time", "schema_version", "kind", "payload"]


def test_records_come_back_as_records(tmp_path: Path) -> None:
    made = attempt("c" * 64, AS_LOADED.id, 1.5, gates={"logits": "pass"})
    candidate = Candidate(
        parts=(PartUse(source=PartSource(name="p", files=(("part.py", "x = 'é'\r\n"),)), params={"n": 2, "f": True}),),
        settings={"threads": 2},
    )
    with EventLog.open(tmp_path) as log:
        log.append("attempt", made)
        log.append("proposal", {"candidate": candidate})
        log.append("measurement", {"max_abs": math.inf, "rest": [math.nan, -math.inf]})
    one, two, three = read_events(tmp_path)
    assert from_plain(Attempt, one.payload) == made
    assert from_plain(Candidate, two.payload["candidate"]) == candidate
    assert three.payload["max_abs"] == "Infinity"
    assert from_plain(float, "-Infinity") == -math.inf  # type: ignore[arg-type]
    tampered = {**two.payload["candidate"], "settings": {"threads": 1}}
    with pytest.raises(DecodeError, match=r"Candidate.id"):
        from_plain(Candidate, tampered)
    with pytest.raises(DecodeError, match="no field 'wrong'"):
        from_plain(Attempt, {**one.payload, "wrong": 1})
    with pytest.raises(DecodeError, match=r"Attempt.verdict: 'fine'"):
        from_plain(Attempt, {**one.payload, "verdict": "fine"})


def test_an_unknown_kind_or_payload_adds_nothing(tmp_path: Path) -> None:
    with EventLog.open(tmp_path) as log:
        with pytest.raises(ValueError, match="not one of"):
            log.append("thought", {})
        with pytest.raises(TypeError):
            log.append("post", ["no", "mapping"])
        with pytest.raises(TypeError):
            log.append("post", {"engine": object()})
        assert log.append("post", {}) == 1
    assert seqs(tmp_path) == [1]


def test_a_reopened_log_goes_on_counting(tmp_path: Path) -> None:
    for expected in (1, 2, 3):
        with EventLog.open(tmp_path) as log:
            assert log.append("post", {}) == expected
            assert log.quarantined == ()
    assert seqs(tmp_path) == [1, 2, 3]


def test_segments_rotate_and_read_as_one(tmp_path: Path) -> None:
    with EventLog.open(tmp_path, segment_bytes=400) as log:
        for i in range(40):
            log.append("post", {"i": i})
    assert len(list(tmp_path.glob("*.jsonl"))) > 5
    assert [event.payload["i"] for event in read_events(tmp_path)] == list(range(40))
    assert seqs(tmp_path, after=33) == [34, 35, 36, 37, 38, 39, 40]
    with EventLog.open(tmp_path, segment_bytes=400) as log:
        assert log.append("post", {}) == 41
    (first,) = list(tmp_path.glob("000001.jsonl"))
    first.unlink()
    assert seqs(tmp_path)[0] > 1, "a log whose beginning was archived still reads"


def test_a_missing_segment_is_not_skipped(tmp_path: Path) -> None:
    with EventLog.open(tmp_path, segment_bytes=300) as log:
        for i in range(20):
            log.append("post", {"i": i})
    (tmp_path / "000002.jsonl").write_bytes(b"")
    with pytest.raises(LedgerError, match="events are missing"):
        seqs(tmp_path)


def test_a_follower_sees_each_event_once_as_it_comes(tmp_path: Path) -> None:
    reader = EventReader(tmp_path)
    assert reader.poll() == []
    seen: list[int] = []
    with EventLog.open(tmp_path, segment_bytes=300) as log:
        for i in range(30):
            log.append("post", {"i": i})
            if i % 3 == 0:
                seen += [event.seq for event in reader.poll(limit=2)]
        log.sync()
        assert [event.seq for event in reader.poll(upto=25)][-1] == 25
        seen = [*seen, *range(len(seen) + 1, 26)]
        seen += [event.seq for event in reader.poll()]
    assert seen == list(range(1, 31))


def test_a_reader_leaves_out_a_line_that_is_being_written(tmp_path: Path) -> None:
    with EventLog.open(tmp_path) as log:
        log.append("post", {"i": 0})
        with (tmp_path / "000001.jsonl").open("ab") as file:
            file.write(b'{"seq":2,"time":1.0,"sch')
            file.flush()
            assert seqs(tmp_path) == [1]


@pytest.mark.parametrize("torn", [b'{"seq":4,"time"', b"\0" * 50, b"\0\0\0\n", b'{"seq":4}\n', b"\xff\xfe garbage"])
def test_a_torn_end_is_put_aside_and_reported(tmp_path: Path, torn: bytes) -> None:
    with EventLog.open(tmp_path) as log:
        for i in range(3):
            log.append("post", {"i": i})
    with (tmp_path / "000001.jsonl").open("ab") as file:
        file.write(torn)
    with EventLog.open(tmp_path) as log:
        (moved,) = log.quarantined
        assert moved.parent == tmp_path / "quarantine"
        assert moved.read_bytes() == torn
        assert log.append("post", {}) == 4
    assert seqs(tmp_path) == [1, 2, 3, 4]


def test_any_cut_of_the_file_loses_only_what_lies_behind_it(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with EventLog.open(whole) as log:
        for i in range(12):
            log.append("post", {"i": i, "text": "x" * (i * 7 % 40)})
    data = (whole / "000001.jsonl").read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == 10]
    rng = random.Random(0)
    for cut in {*rng.sample(range(len(data)), 40), *ends}:
        folder = tmp_path / f"cut{cut}"
        folder.mkdir()
        (folder / "000001.jsonl").write_bytes(data[:cut])
        kept = sum(end <= cut for end in ends)
        with EventLog.open(folder) as log:
            assert log.last_seq == kept
            assert log.append("post", {"i": "next"}) == kept + 1
        assert seqs(folder) == list(range(1, kept + 2))


def test_damage_before_good_events_is_refused(tmp_path: Path) -> None:
    with EventLog.open(tmp_path) as log:
        for i in range(3):
            log.append("post", {"i": i})
    path = tmp_path / "000001.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"garbage\n" + lines[2])
    with pytest.raises(LedgerError, match="damaged"):
        EventLog.open(tmp_path)
    with pytest.raises(LedgerError, match="damaged"):
        seqs(tmp_path)
    assert writer_of(tmp_path) is None, "the refused open let the lock go"


def test_events_of_a_later_schema_are_refused(tmp_path: Path) -> None:
    (tmp_path / "000001.jsonl").write_text('{"seq":1,"time":1.0,"schema_version":99,"kind":"post","payload":{}}\n')
    with pytest.raises(LedgerError, match="schema version 99"):
        seqs(tmp_path)


def test_a_second_writer_is_refused_with_the_process_that_writes(tmp_path: Path) -> None:
    with EventLog.open(tmp_path):
        assert writer_of(tmp_path) == os.getpid()
        with pytest.raises(InputError, match=str(os.getpid())):
            EventLog.open(tmp_path)
        code = (
            "import sys; from pathlib import Path; from cluster.events import EventLog\n"
            "try: EventLog.open(Path(sys.argv[1]))\n"
            "except Exception as error: print(type(error).__name__, error)"
        )
        said = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
        assert said.stdout.startswith("InputError")
        assert f"process {os.getpid()}" in said.stdout
    assert writer_of(tmp_path) is None
    EventLog.open(tmp_path).close()


def test_a_killed_writer_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from cluster.events import EventLog\n"
        "log = EventLog.open(Path(sys.argv[1]), segment_bytes=3000)\n"
        "while True:\n"
        "    print(log.append_durable('post', {'text': 'x' * 100}), flush=True)\n"
    )
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        acknowledged = 0
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged % 50 == 0:
                break
        assert writer_of(tmp_path) == process.pid
        process.send_signal(signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.wait()
        with EventLog.open(tmp_path) as log:
            assert log.last_seq >= acknowledged
            found = seqs(tmp_path)
            assert found == list(range(1, log.last_seq + 1))


def test_a_fork_cannot_write_and_does_not_hold_the_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from cluster.events import EventLog\n"
        "log = EventLog.open(Path(sys.argv[1]))\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try: log.append('post', {})\n"
        "    except Exception as error: print(type(error).__name__, error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0); print(log.append('post', {}))\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines()[0].startswith("LedgerError")
    assert said.splitlines()[1] == "1"


def test_threads_share_the_log(tmp_path: Path) -> None:
    with EventLog.open(tmp_path, segment_bytes=2000) as log:
        acknowledged: list[int] = []

        def write(who: int) -> None:
            for i in range(25):
                acknowledged.append(log.append_durable("post", {"who": who, "i": i}))

        threads = [threading.Thread(target=write, args=(who,)) for who in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(acknowledged) == list(range(1, 101))
    events = list(read_events(tmp_path))
    assert [event.seq for event in events] == list(range(1, 101))
    for who in range(4):
        assert [event.payload["i"] for event in events if event.payload["who"] == who] == list(range(25))


def test_waiting_threads_share_one_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLog.open(tmp_path) as log:
        inside, leave, calls = threading.Event(), threading.Event(), []
        real = os.fsync

        def slow(fd: int) -> None:
            calls.append(fd)
            if len(calls) == 1:
                inside.set()
                leave.wait(30)
            real(fd)

        log.append("post", {})
        monkeypatch.setattr(os, "fsync", slow)
        first = threading.Thread(target=log.sync)
        first.start()
        assert inside.wait(30)
        for _ in range(5):
            log.append("post", {})
        others = [threading.Thread(target=log.sync) for _ in range(5)]
        for thread in others:
            thread.start()
        leave.set()
        for thread in [first, *others]:
            thread.join()
        assert log.synced_seq == 6
        assert len(calls) == 2


def test_a_full_disk_takes_nothing_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLog.open(tmp_path) as log:
        log.append_durable("post", {"i": 0})
        real, room = os.write, [20]

        def short(fd: int, data: bytes) -> int:
            if not room:
                raise OSError(28, "No space left on device")
            return real(fd, data[: room.pop()])

        monkeypatch.setattr(os, "write", short)
        with pytest.raises(LedgerError, match="disk is full"):
            log.append("post", {"i": 1})
        assert seqs(tmp_path) == [1]
        monkeypatch.setattr(os, "write", real)
        assert log.append_durable("post", {"i": 2}) == 2
    assert [event.payload["i"] for event in read_events(tmp_path)] == [0, 2]


def test_a_failed_fsync_ends_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = EventLog.open(tmp_path)
    log.append_durable("post", {"i": 0})

    def fail(fd: int) -> None:
        raise OSError(5, "Input/output error")

    log.append("post", {"i": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", fail)
        with pytest.raises(LedgerError, match="durable"):
            log.sync()
    with pytest.raises(LedgerError, match="open it again"):
        log.append("post", {})
    assert log.synced_seq == 1
    log.close()
    with EventLog.open(tmp_path) as again:
        assert again.last_seq >= 1


def test_kinds_are_those_of_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs/design.md").read_text()
    assert f"kinds {', '.join(KINDS)}" in text
    assert attempt("a", "b", verdict=Verdict.FAILED).speedup is None


def test_the_last_event_is_found_at_the_end_of_the_last_segment(tmp_path: Path) -> None:
    assert last_seq_of(tmp_path) == 0
    with EventLog.open(tmp_path, segment_bytes=300) as log:
        for number in range(7):
            log.append("post", {"number": number})
        assert last_seq_of(tmp_path) == 7
    (path,) = sorted(tmp_path.glob("*.jsonl"))[-1:]
    with path.open("ab") as file:
        file.write(b'{"seq":8,"ti')
    assert last_seq_of(tmp_path) == 7
