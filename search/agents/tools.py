"""What a proposer can do, as one typed table. Our agents, `hotpass tool` and `hotpass mcp` are three faces of it.

    name + JSON arguments ─► checked by the tool's model ─► method of the Desk ─► plain JSON, or one sentence that says what is wrong

A tool reads what the campaign recorded, or hands something in; it never measures, decides, releases, exports or changes a policy,
and there is no tool that reads traffic. Whoever calls it, the judge, the leases and the budgets are the same.

What is not here: how an answer is found (the `Desk`, which `cluster.desk` makes of a campaign folder) and who calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from hotpass.canonical import Json
from hotpass.errors import InputError, nearest
from search.board import MAX_CHARS, MAX_REFERENCES

Value = str | int | float | bool | None

MAX_SOURCE_CHARS = 200_000
"""Of all files of one part."""
NAME = r"^[a-z0-9][a-z0-9._-]{0,47}$"
FILE_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}"


class Arguments(BaseModel):
    """Of one tool: unknown names are refused, so that a misspelt argument is never dropped in silence."""

    model_config = ConfigDict(extra="forbid")


class ReadBoard(Arguments):
    kind: Literal["finding", "hypothesis", "warning", "question"] | None = Field(None, description="only this kind")
    about: str | None = Field(None, description="only posts that name this candidate (id or its beginning)")
    before: int | None = Field(None, description="only posts with a smaller number: to read further back")
    limit: int = Field(20, ge=1, le=100, description="newest first")


class WritePost(Arguments):
    kind: Literal["finding", "hypothesis", "warning", "question"]
    text: str = Field(min_length=1, max_length=MAX_CHARS, description="what others should know; no source code")
    candidates: list[str] = Field([], max_length=MAX_REFERENCES, description="ids of the candidates that it is about")
    evidence: list[int] = Field([], max_length=MAX_REFERENCES, description="numbers of the attempts that it rests on")


class NoArguments(Arguments):
    pass


class SlotSource(Arguments):
    slot: str = Field(description="slot or claim pattern, as model.layers.*.mlp")
    what: Literal["template", "reference"] = Field(
        "template", description="template: a runnable part to start from; reference: the engine's own class"
    )
    from_line: int = Field(1, ge=1, description="first line to show, where a source is long")


class Catalogue(Arguments):
    part: str | None = Field(None, description="name of one part, to read its source; without it all parts are listed")
    file: str = Field("part.py", description="which of its files")
    from_line: int = Field(1, ge=1, description="first line to show, where a source is long")


class Candidates(Arguments):
    order: Literal["best", "latest"] = "best"
    verdict: Literal["faster", "slower", "inconclusive", "incorrect", "invalid", "failed"] | None = None
    proposer: str | None = Field(None, description="only those whose proposer begins so, as agent:mlp")
    limit: int = Field(20, ge=1, le=100)


class OneCandidate(Arguments):
    candidate: str = Field(description="id, its beginning, `incumbent` or `loaded`")
    file: str | None = Field(None, description="also show this source, as name-of-part/part.py")
    from_line: int = Field(1, ge=1, description="first line to show, where a source is long")


class PartArgument(Arguments):
    """A new part by its source, or a known one by its name."""

    name: str = Field(pattern=NAME, description="lower case; of the catalogue, or new")
    source: str | None = Field(None, description="text of part.py; leave it out for a known part")
    files: dict[str, str] = Field({}, description="files beside part.py, as {'step.cpp': '…'}")
    params: dict[str, Value] = Field({}, description="values of declared parameters; defaults where left out")

    @pydantic.model_validator(mode="after")
    def _is_small(self) -> PartArgument:
        chars = len(self.source or "") + sum(map(len, self.files.values()))
        if chars > MAX_SOURCE_CHARS:
            raise ValueError(f"its sources have {chars} characters, at most {MAX_SOURCE_CHARS} are taken")
        if self.files and self.source is None:
            raise ValueError("files beside part.py need its source")
        for path in self.files:
            if not re.fullmatch(FILE_NAME, path) or path == "part.py":
                raise ValueError(f"{path!r} is no plain name of a file beside part.py")
        return self


class QuickCheck(Arguments):
    part: PartArgument


class SubmitProposal(Arguments):
    request_id: str = Field(
        min_length=1, max_length=64, description="of your choice; a second call with it changes nothing"
    )
    hypothesis: str = Field(min_length=1, max_length=500, description="why it should be faster, in one sentence")
    parts: list[PartArgument] = Field([], max_length=8)
    settings: dict[str, Value] = Field({}, description="engine settings that differ from those of `onto`")
    onto: str = Field(
        "incumbent",
        description="what it builds on: `incumbent` (default), `loaded` (nothing else), or a candidate's id. Its parts stay where yours leave room",
    )
    parents: list[str] = Field(
        [], max_length=MAX_REFERENCES, description="ids of other candidates that it learned from"
    )


class Result(Arguments):
    request_id: str | None = Field(None, description="of your own submission")
    candidate: str | None = Field(None, description="or any candidate's id")


class Desk(Protocol):
    """What a campaign answers its proposers. Every method may raise InputError; answers are plain JSON."""

    def deployment(self, author: str, asked: NoArguments) -> Json: ...
    def read_board(self, author: str, asked: ReadBoard) -> Json: ...
    def post(self, author: str, asked: WritePost) -> Json: ...
    def slots(self, author: str, asked: NoArguments) -> Json: ...
    def slot_source(self, author: str, asked: SlotSource) -> Json: ...
    def catalogue(self, author: str, asked: Catalogue) -> Json: ...
    def candidates(self, author: str, asked: Candidates) -> Json: ...
    def candidate(self, author: str, asked: OneCandidate) -> Json: ...
    def shapes(self, author: str, asked: NoArguments) -> Json: ...
    def profile(self, author: str, asked: NoArguments) -> Json: ...
    def quick_check(self, author: str, asked: QuickCheck) -> Json: ...
    def submit_proposal(self, author: str, asked: SubmitProposal) -> Json: ...
    def result(self, author: str, asked: Result) -> Json: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """One row of the table."""

    name: str
    """Also the method of `Desk` that answers."""
    arguments: type[Arguments]
    description: str
    """For whoever decides to call it, people and models alike."""

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments, references resolved: not every client follows them."""
        return _inlined(self.arguments.model_json_schema())


TOOLS: tuple[Tool, ...] = (
    Tool(name="deployment", arguments=NoArguments, description="Model, machine, numerics policy and engine settings."),
    Tool(name="read_board", arguments=ReadBoard, description="Posts of other proposers and people, newest first."),
    Tool(name="post", arguments=WritePost, description="Tell the others what you found, suspect, warn of or want to know."),
    Tool(name="slots", arguments=NoArguments, description="Places where code can be replaced, with class and signature."),
    Tool(name="slot_source", arguments=SlotSource, description="A runnable part to start from, or the reference's source."),
    Tool(name="catalogue", arguments=Catalogue, description="Parts that exist already, or the source of one of them."),
    Tool(name="candidates", arguments=Candidates, description="What was tried, with verdicts and speedups over as loaded."),
    Tool(name="candidate", arguments=OneCandidate, description="One candidate: parts, settings, every attempt, sources."),
    Tool(name="shapes", arguments=NoArguments, description="Which steps the traffic makes, how often, and how long each takes."),
    Tool(name="profile", arguments=NoArguments, description="Where the time goes, and how far it is from what the machine allows."),
    Tool(
        name="quick_check",
        arguments=QuickCheck,
        description="Syntax, declaration and a small numerics check of one part in a confined process. Not a verdict.",
    ),
    Tool(
        name="submit_proposal",
        arguments=SubmitProposal,
        description="Hand in a candidate to be measured and judged. Answers at once; ask for the result later.",
    ),
    Tool(name="result", arguments=Result, description="Verdict, speedup and reason of a submission, or where it stands."),
)  # fmt: skip

BY_NAME = {tool.name: tool for tool in TOOLS}


def find_tool(name: str) -> Tool:
    """Raises InputError naming the nearest tool."""
    if name not in BY_NAME:
        raise InputError("tool", name, "does not exist", nearest(str(name), list(BY_NAME)))
    return BY_NAME[name]


def call_tool(desk: Desk, author: str, name: str, arguments: Mapping[str, Any] | str) -> Json:
    """The tool's answer as plain JSON. Raises InputError, in one sentence, for whatever is wrong with the call."""
    tool = find_tool(name)
    asked = checked(tool, arguments)
    return getattr(desk, tool.name)(author, asked)


def checked(tool: Tool, arguments: Mapping[str, Any] | str) -> Arguments:
    """The arguments as the tool's model. Raises InputError naming the first that is wrong, and what it may be."""
    where = tool.name
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            raise InputError(
                where, arguments, f"has arguments that are no JSON: {error}", "send one JSON object"
            ) from None
    try:
        return tool.arguments.model_validate(arguments)
    except pydantic.ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join([where, *map(str, first["loc"])])
        known = ", ".join(tool.arguments.model_fields) or "none"
        raise InputError(place, first["input"], f"cannot be used: {first['msg']}", f"arguments are: {known}") from None


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with its own definitions put in the place of references, and without titles, which say nothing."""
    definitions = schema.pop("$defs", {})

    def resolved(node: Any) -> Any:
        if isinstance(node, dict):
            if "$ref" in node:
                return resolved(definitions[node["$ref"].rsplit("/", 1)[-1]])
            return {k: resolved(v) for k, v in node.items() if not (k == "title" and isinstance(v, str))}
        return [resolved(item) for item in node] if isinstance(node, list) else node

    found: dict[str, Any] = resolved(schema)
    return found
