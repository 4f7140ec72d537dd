"""`hotpass try` from the command line, on the fake engine: exit codes, parameters, candidates against each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.cli import main
from cluster.trying import make_wanted
from hotpass.errors import InputError
from tests.cluster.campaigns import part
from tests.cluster.test_cli import FAKE as CAMPAIGN
from tests.cluster.test_cli import last_line

FAKE = CAMPAIGN[: CAMPAIGN.index("--budget")]

# Names whose hash gives the fake engine of the command line this factor on its step time (`actors.spec.simulated_step_ms`).
QUICK, SLOW, SAME = "part-47", "part-114", "part-179"


def written(folder: Path, name: str, child: str = "mlp", params: str = "{}") -> str:
    """A part as a file of that name; the name is what the fake engine times by."""
    path = folder / f"{name}.py"
    path.write_text(part(name, child).text().replace("numerics='tolerance'", f"params={params}, numerics='tolerance'"))
    return str(path)


@pytest.mark.parametrize(
    ("name", "code", "verdict"),
    [(QUICK, 0, "faster"), (SLOW, 1, "slower"), ("crash-mlp", 1, "failed"), (SAME, 3, "inconclusive")],
)
def test_try_from_the_command_line_exits_by_verdict(
    name: str, code: int, verdict: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["try", written(tmp_path, name), *FAKE, "--out", str(tmp_path / "tried")]) == code
    out, err = capsys.readouterr()
    line = last_line(out)
    assert (line["verdict"], line["purpose"]) == (verdict, "cold" if code == 0 else "search")
    assert bool(line["gates"]) == (code == 0), "only what was faster comes to the gates"
    assert verdict.upper() in err
    assert main(["report", str(tmp_path / "tried")]) == 0
    assert main(["candidates", str(tmp_path / "tried")]) == 0
    assert name in capsys.readouterr().out


def test_try_binds_the_parameters_of_a_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiled = written(tmp_path, "tiled", params="{'tile': [1, 2, 4, 8], 'fuse': [False, True]}")
    out = ["--out", str(tmp_path / "tried"), "--quiet"]
    main(["try", tiled, "--param", "tile=4", "--param", "fuse=true", *FAKE, *out])
    line = last_line(capsys.readouterr().out)
    assert line["label"] == "tiled(fuse=True, tile=4)"
    for wrong, said in (
        ("tile=3", "tile"),
        ("tiel=4", "parameter 'tiel' is not declared; known: ['fuse', 'tile']"),
        ("tile", "--param 'tile' is not of the form K=V; write it as --param fuse=True"),
    ):
        assert main(["try", tiled, "--param", wrong, *FAKE, "--out", str(tmp_path / "none")]) == 2
        assert said in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "none").exists(), "wrong input leaves no folder"


def test_try_against_another_candidate_and_of_a_candidate_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "tried"
    assert main(["try", written(tmp_path, QUICK), *FAKE, "--out", str(folder), "--quiet"]) == 0
    quick = str(last_line(capsys.readouterr().out)["candidate"])
    slow = written(tmp_path, SLOW, "self_attn")
    assert main(["try", slow, "--in", str(folder), "--against", quick[:12], "--quiet"]) == 1
    line = last_line(capsys.readouterr().out)
    assert (line["against"], line["verdict"]) == (quick, "slower")
    again = ["try", str(folder / "candidates" / quick), *FAKE, "--out", str(tmp_path / "again"), "--quiet"]
    assert main(again) == 0
    assert last_line(capsys.readouterr().out)["candidate"] == quick
    elsewhere = ["--against", str(folder / "candidates" / quick), "--out", str(tmp_path / "third"), "--quiet"]
    assert main(["try", slow, *FAKE, *elsewhere]) == 1
    assert last_line(capsys.readouterr().out)["against"] == quick
    assert main(["try", slow, "--in", str(folder), "--against", "zzz"]) == 2
    assert main(["try", slow, *FAKE, "--against", quick[:12]]) == 2
    assert "give the campaign with --in DIR" in capsys.readouterr().err


def test_a_setting_of_the_serving_loop_is_tried_by_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cluster.journal import read_state

    folder = tmp_path / "tried"
    assert main(["try", "--set", "chunk_tokens=1024", *FAKE, "--out", str(folder), "--quiet"]) == 0
    line = last_line(capsys.readouterr().out)
    assert (line["purpose"], line["verdict"]) == ("cold", "faster")
    tiers = {row.attempt.tier for row in read_state(folder).search_attempts()}
    assert tiers == {"slow"}


def test_a_built_in_part_is_tried_by_its_name(tmp_path: Path) -> None:
    wanted = make_wanted("traced", ["threads=1"], ["optimize=true"], "float32")
    assert [(use.source.name, dict(use.params)) for use in wanted.parts] == [("traced", {"optimize": True})]
    assert wanted.settings == {"threads": 1}
    with pytest.raises(InputError, match="did you mean 'traced'"):
        make_wanted("tracd", [], [], "float32")
    for path in ("absent.py", str(tmp_path / "absent")):
        with pytest.raises(InputError, match="does not exist"):
            make_wanted(path, [], [], "float32")
