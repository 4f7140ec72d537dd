"""`hotpass board` and `hotpass tool`: what people read from, and tell, a campaign that is running or done."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

from cluster.campaign import Running, opened_journal
from cluster.desk import CampaignDesk
from cluster.events import writer_of
from cluster.intake import Intake
from cluster.journal import FOLDER
from cluster.live import clock_text
from cluster.plan import read_plan
from cluster.store import save_candidate
from hotpass.canonical import Json
from search.agents.tools import TOOLS, call_tool, find_tool
from search.inbox import Inbox

PERSON = "person"
"""Author of what is posted or submitted from the command line."""


def board(arguments: argparse.Namespace) -> int:
    """Show the board, or post to it with --post; a running campaign records the post when it next looks."""
    folder = Path(arguments.folder)
    desk = CampaignDesk(folder)
    if arguments.post is not None:
        post = {
            "kind": arguments.kind or "finding",
            "text": sys.stdin.read() if arguments.post == "-" else arguments.post,
            "candidates": arguments.candidates,
            "evidence": arguments.evidence,
        }
        call_tool(desk, PERSON, "post", post)
        if writer_of(folder / FOLDER) is None:
            _record(folder)
        return 0
    asked = {"kind": arguments.kind, "about": arguments.about, "limit": arguments.limit}
    found = call_tool(desk, PERSON, "read_board", asked)
    if arguments.json:
        print(json.dumps(found, ensure_ascii=False))
    else:
        sys.stdout.writelines(f"{line}\n" for post in reversed(found["posts"]) for line in _lines(post))
        if not found["posts"]:
            print("no posts", file=sys.stderr)
    return 0


def tool(arguments: argparse.Namespace) -> int:
    """Call one of the proposers' tools and print its answer as JSON; without a name, list them."""
    if arguments.name is None:
        for each in TOOLS:
            print(f"{each.name:<16} {each.description}")
        return 0
    wanted = find_tool(arguments.name)
    if arguments.schema:
        print(json.dumps(wanted.schema, ensure_ascii=False))
        return 0
    text = sys.stdin.read() if arguments.arguments == "-" else arguments.arguments
    print(json.dumps(call_tool(CampaignDesk(Path(arguments.folder)), PERSON, wanted.name, text), ensure_ascii=False))
    return 0


def _record(folder: Path) -> None:
    """Nobody writes the log now: this process does, for as long as it takes."""
    plan = read_plan(folder)
    here = replace(plan, spec=replace(plan.spec, out=os.fspath(folder)))
    with opened_journal(Running(plan=here)) as journal:
        Intake(Inbox(folder), journal, lambda candidate: save_candidate(folder, candidate)).take(0)


def _lines(post: dict[str, Json]) -> list[str]:
    """A post for people: a head, its text indented, and what its evidence says by the ledger."""
    head = f"#{post['number']}  {clock_text(post['minutes'] * 60)}  {post['kind'].upper()}  {post['author']}"
    about = f"  about {', '.join(post['candidates'])}" if post["candidates"] else ""
    lines = [head + about, *(f"    {line}" for line in post["text"].splitlines())]
    for item in post["evidence"]:
        speedup = item["speedup_over_loaded"]
        shown = f" · {speedup['value']:.2f} × over as loaded ({speedup['kind']})" if speedup else ""
        lines.append(f"    [{item['number']}] {item['candidate']} {item['verdict']}{shown}")
    return lines
