"""Folders of processes that were killed are removed by the next start; those of the living, of others and of no maker stay."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from engines.held_folder import ENGINE, HeldFolder, remove_if_abandoned

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import sys, time
from engines.held_folder import HeldFolder
folder = HeldFolder("hotpass-engine-", sys.argv[1])
(folder.path / "hotpass-child-x").mkdir()
print(folder.path, flush=True)
time.sleep(600)
"""

JUDGE = """
import sys, time
from engines.held_folder import HeldFolder
from engines.threading_env import process_environment
from engines.zygote import Zygote
folder = HeldFolder("hotpass-engine-", sys.argv[1])
(folder.path / "torchinductor_root").mkdir()
zygote = Zygote(process_environment(1) | {"TMPDIR": str(folder.path)})
zygote.prepare(())
print(folder.path, zygote.pid, flush=True)
time.sleep(600)
"""


def started(program: str, room: Path) -> tuple[subprocess.Popen[str], list[str]]:
    """A process, and the words that it printed first."""
    process = subprocess.Popen([sys.executable, "-c", program, str(room)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def killed(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_what_a_killed_process_held_goes_with_the_next_start_and_not_before(tmp_path: Path) -> None:
    process, (held,) = started(HOLDER, tmp_path)
    with HeldFolder(ENGINE, tmp_path) as own:
        assert Path(held, "hotpass-child-x").is_dir(), "its holder lives"
        killed(process)
        assert Path(held).is_dir()
        with HeldFolder(ENGINE, tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted([own, other])
    assert list(tmp_path.iterdir()) == []


def test_a_killed_engine_leaves_no_folder_beyond_the_next_start(tmp_path: Path) -> None:
    """Its zygote, which outlives it by a moment, removes what it can still see abandoned."""
    judge, (folder, pid) = started(JUDGE, tmp_path)
    zygote = os.pidfd_open(int(pid))
    killed(judge)
    assert select.select([zygote], [], [], 60.0)[0]
    os.close(zygote)
    with HeldFolder(ENGINE, tmp_path):
        assert not Path(folder).exists()


def test_other_prefixes_and_links_are_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (tmp_path / f"{ENGINE}link").symlink_to(target)
    (tmp_path / "hotpass-leases").mkdir()
    with HeldFolder(ENGINE, tmp_path):
        assert target.is_dir()
        assert (tmp_path / "hotpass-leases").is_dir()
    assert not remove_if_abandoned(tmp_path / f"{ENGINE}link")
    assert target.is_dir()


def test_a_held_folder_is_nobodys_to_remove_and_closing_twice_is_nothing(tmp_path: Path) -> None:
    folder = HeldFolder(ENGINE, tmp_path)
    assert not remove_if_abandoned(folder.path)
    folder.close()
    folder.close()
    assert not folder.path.exists()


def test_where_no_locks_are_known_nothing_is_taken_for_abandoned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(fd: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("engines.held_folder.fcntl.flock", unknown)
    with HeldFolder(ENGINE, tmp_path) as first, HeldFolder(ENGINE, tmp_path) as second:
        assert first.is_dir()
        assert second.is_dir()
