"""Commands that look back at campaigns: `status`, `best`, `replay`, `compare`. Their options, and those that steer a search, are here too."""

from __future__ import annotations

import argparse
import datetime
import json
import sys
from pathlib import Path
from typing import Any

from hotpass.decode import json_safe


def status(arguments: argparse.Namespace) -> int:
    """What a campaign does, found and spent; one object for programs."""
    from cluster.plan import read_plan
    from cluster.standing import standing_lines, standing_of

    folder = Path(arguments.folder)
    standing = standing_of(folder)
    if arguments.json:
        print(json.dumps(json_safe(standing)))
    else:
        sys.stdout.writelines(line + "\n" for line in standing_lines(standing, read_plan(folder)))
    return 0


def best(arguments: argparse.Namespace) -> int:
    """What a campaign claims; exit code 1 when it claims nothing."""
    from cluster.best import claim_in
    from cluster.live import span

    claim = claim_in(arguments.campaign, arguments.tracking_uri or "")
    if arguments.json:
        print(json.dumps(json_safe({"campaign": arguments.campaign, "best": claim})))
    elif claim is None:
        print("no best: nothing was measured cold, was faster, and passed every gate")
    else:
        rate = f", {claim.tokens_per_s:.1f} tokens/s" if claim.tokens_per_s else ""
        print(f"{span(claim.speedup_vs_loaded)} as loaded{rate}: {claim.label} ({claim.candidate_id[:10]})")
        print("gates passed: " + ", ".join(claim.gates))
    return int(claim is None)


def replay(arguments: argparse.Namespace) -> int:
    """Exit code 1 when a decision would be another one now."""
    from cluster.plan import read_plan
    from cluster.replay import replay as again
    from search.catalogue import load_catalogue

    folder = Path(arguments.folder)
    found = again(folder, load_catalogue(read_plan(folder).deployment.hardware.device))
    if arguments.json:
        print(json.dumps(json_safe(found)))
        return int(bool(found.differing))
    print(f"{sum(found.same.values())} decisions found again: " + ", ".join(f"{n} {d}" for d, n in found.same.items()))
    for item in found.differing:
        print(f"  event {item.seq}, {item.decision}: {item.recorded} then, {item.now} now")
    return int(bool(found.differing))


def compare(arguments: argparse.Namespace) -> int:
    """Exit code 3 when the winners cannot be compared."""
    from cluster.campaign import Running
    from cluster.comparing import compare_plan, differences, measure_winners, read_campaigns, why_not_comparable
    from cluster.live import make_view, span
    from cluster.resolve import CAMPAIGNS

    campaigns = read_campaigns([Path(folder) for folder in arguments.folders])
    differing = {str(c.folder): differences(campaigns[0], c) for c in campaigns[1:]}
    reason = why_not_comparable(campaigns)
    pairs = []
    if not reason and not arguments.list:
        now = datetime.datetime.now(datetime.UTC)
        out = Path(arguments.out) if arguments.out else CAMPAIGNS / f"compare-{now:%Y%m%d-%H%M%S}"
        running = Running(plan=compare_plan(campaigns[0].plan, out))
        running.view = make_view(running.plan, quiet=arguments.json)
        try:
            pairs = measure_winners(running, campaigns)
        finally:
            running.view.close()
    if arguments.json:
        line: dict[str, Any] = {"differences": differing, "reason": reason, "pairs": pairs}
        print(json.dumps(json_safe(line)))
        return 3 if reason else 0
    for folder, found in differing.items():
        print(f"{folder} against {campaigns[0].folder}:" + ("" if found else " no difference"))
        for name, (here, there) in found.items():
            print(f"  {name}: {there!r} instead of {here!r}")
    for pair in pairs:
        said = span(pair.attempt.speedup) if pair.attempt.speedup else pair.attempt.reason
        print(f"{pair.candidate} over {pair.over}: {pair.attempt.verdict} {said}")
    if reason:
        print(reason)
    return 3 if reason else 0


def search_options(parser: argparse.ArgumentParser) -> None:
    """Of `hotpass compile`: who searches, for what, and when it is enough."""
    group = parser.add_argument_group("search")
    group.add_argument("--sampler", metavar="S", help="who composes: optuna (default), random, or none")
    group.add_argument(
        "--tuner",
        metavar="T",
        help="gp: a Gaussian process over the incumbent's parameters and settings (default none)",
    )
    group.add_argument(
        "--objective", metavar="O", help="tokens_per_s (default), or two: tokens_per_s,ttft or tokens_per_s,tpot"
    )
    group.add_argument("--control", metavar="C", help="a search without agents to compare with: random, optuna or none")
    group.add_argument("--control-share", type=float, metavar="X", help="of the engine time, for it (default 0.2)")
    group.add_argument(
        "--warm-start", metavar="FROM", help="earlier campaign (folder, or mlflow:ID) whose parts are tried here too"
    )
    group.add_argument("--engines", type=int, metavar="N", help="that measure at once (default: one a GPU, or one)")
    group.add_argument("--engine-budget", metavar="TIME", help="stop after so much engine time")
    group.add_argument("--target-speedup", type=float, metavar="X", help="stop once surely X times as fast as loaded")
    group.add_argument("--patience", metavar="TIME", help="stop after so long without a new incumbent")


def add_commands(commands: Any) -> None:
    """`status`, `best`, `replay` and `compare`; `commands` is argparse's subparsers."""
    parser = commands.add_parser("status", help="what a campaign does, found and spent")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run="cluster.commands.hindsight:status")
    parser = commands.add_parser("best", help="the one best of a campaign: cold, faster, every gate passed")
    parser.add_argument("campaign", metavar="DIR|mlflow:ID", help="its folder; or its id or name in MLflow")
    parser.add_argument("--tracking-uri", metavar="URI", help="MLflow that has it, with mlflow:ID")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run="cluster.commands.hindsight:best")
    parser = commands.add_parser("replay", help="the policy again over what a campaign recorded: the same decisions?")
    parser.add_argument("folder", metavar="DIR")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run="cluster.commands.hindsight:replay")
    parser = commands.add_parser("compare", help="how campaigns differ, and their winners measured in one session")
    parser.add_argument("folders", nargs="+", metavar="DIR")
    parser.add_argument("--list", action="store_true", help="list the differences, measure nothing")
    parser.add_argument("--out", metavar="DIR", help="folder that the measurements are recorded in")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run="cluster.commands.hindsight:compare")
