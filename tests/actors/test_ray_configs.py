"""The files of ray_configs as far as no cluster is needed: shells parse them, Ray and hotpass know their options, versions agree."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.cli import build_parser

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "ray_configs"
SCRIPTS = ("local-head.sh", "submit.sh")


def words(name: str) -> list[list[str]]:
    """Commands of a file, one list of words each; comments are left out and continued lines joined."""
    text = (CONFIGS / name).read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def ray_start_options() -> set[str]:
    from ray.scripts.scripts import start

    return {option for parameter in start.params for option in parameter.opts}


def options_of(command: list[str]) -> set[str]:
    return {word.split("=")[0] for word in command if word.startswith("--")}


def test_every_file_is_explained_and_tested() -> None:
    names = {path.name for path in CONFIGS.iterdir()} - {"README.md"}
    assert names == {*SCRIPTS, "machines.yaml", "kuberay-job.yaml"}
    readme = (CONFIGS / "README.md").read_text()
    assert not [name for name in names if name not in readme]


@pytest.mark.parametrize("name", SCRIPTS)
def test_shells_parse_the_scripts(name: str) -> None:
    subprocess.run(["sh", "-n", str(CONFIGS / name)], check=True)


def test_the_local_head_has_options_that_ray_knows_and_listens_on_this_machine_only() -> None:
    (start,) = [command for command in words("local-head.sh") if command[:2] == ["ray", "start"]]
    assert options_of(start) <= ray_start_options()
    assert {"--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"} <= set(start)
    exported = {command[1].split("=")[0] for command in words("local-head.sh") if command[0] == "export"}
    assert exported == {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_USAGE_STATS_ENABLED", "RAY_worker_niceness"}


def test_submitting_passes_every_argument_on(tmp_path: Path) -> None:
    """The script runs; only `ray` is another program, which prints what it was called with."""
    fake = tmp_path / "ray"
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\npwd\n')
    fake.chmod(0o755)
    given = ["--model", "some model", "--traffic", "chat"]
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", str(CONFIGS / "submit.sh"), *given], env=env, capture_output=True, text=True, check=True
    )
    *called, folder = done.stdout.splitlines()
    assert called[called.index("--") + 1 :] == ["hotpass", "compile", *given]
    assert called[:3] == ["job", "submit", "--address"]
    assert Path(folder) == ROOT, "the checkout is the working directory that is uploaded"


def test_the_cluster_of_machines_is_valid_for_ray_up() -> None:
    import jsonschema
    import ray.autoscaler

    schema = json.loads((Path(ray.autoscaler.__path__[0]) / "ray-schema.json").read_text())
    config: dict[str, Any] = yaml.safe_load((CONFIGS / "machines.yaml").read_text())
    jsonschema.Draft7Validator(schema).validate(config)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])
    starts = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    started = [shlex.split(text) for text in starts if " start " in text]
    assert len(started) == 2
    for command in started:
        assert options_of(command) <= ray_start_options()
        assert "RAY_worker_niceness=0" in command
    assert "--dashboard-host=127.0.0.1" in started[0]


def test_the_kubernetes_job_runs_a_command_that_hotpass_knows_on_the_ray_that_it_pins() -> None:
    job: dict[str, Any] = yaml.safe_load((CONFIGS / "kuberay-job.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    parsed = build_parser().parse_args(arguments)
    assert (program, parsed.command) == ("hotpass", "compile")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (pinned,) = [re.findall(r"==(.+)", need)[0] for need in project["dependencies"] if need.startswith("ray[")]
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    assert head["resources"]["requests"] == head["resources"]["limits"], "cores of its own need a guaranteed pod"
    assert head["image"].endswith(f":{project['version']}")
    assert parsed.out.startswith(head["volumeMounts"][0]["mountPath"]), "the campaign outlives the pod"
    assert yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]
