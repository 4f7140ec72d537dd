"""From what a model wrote to a tool call, or to one precise sentence about what is wrong with it. Never raises for a reply.

A model without native tool calls writes one JSON object, `{"tool": name, "arguments": {…}}`, alone, in a fence, or amid prose. Long
source is easier to write outside of JSON: a ```python fence (and ```cpp fences) beside the object fill a part that has no `source`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotpass.errors import InputError
from search.agents.llm import Reply
from search.agents.tools import find_tool

_THOUGHT = re.compile(r"<think(?:ing)?>.*?</think(?:ing)?>", re.DOTALL)
_FENCE = re.compile(r"```([A-Za-z+]*)[^\n]*\n(.*?)```", re.DOTALL)
MAX_TRIED = 200
"""Opening braces that are tried as the beginning of the object."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """A call that is well formed; its arguments are checked by the tool."""

    tool: str
    arguments: dict[str, Any]
    call_id: str = ""
    """Of a native call; empty for one in text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """What to tell the model."""

    problem: str
    call_id: str = ""
    """Of the native call that it is about; empty for text."""


def tool_use(reply: Reply) -> ToolUse | Unusable:
    """The first call of a reply."""
    if reply.cut_off:
        return Unusable(
            problem="Your reply was cut off by its token limit, so nothing of it was used. Send a shorter one."
        )
    if reply.calls:
        call = reply.calls[0]
        return _checked(call.name, call.arguments, call.call_id)
    text = _THOUGHT.sub("", reply.text).strip()
    if not text:
        return Unusable(problem="Your reply was empty. " + FORM)
    fences = _FENCE.findall(text)
    for candidate in _objects(text):
        if isinstance(candidate.get("tool"), str):
            found = _checked(candidate["tool"], candidate.get("arguments", {}), "")
            if isinstance(found, ToolUse):
                _fill_sources(found.arguments, fences)
            return found
    if "{" in text and '"tool"' in text:
        return Unusable(problem="Your reply holds no valid JSON object (a quote, comma or brace is missing). " + FORM)
    return Unusable(problem="Your reply calls no tool. " + FORM)


FORM = 'Reply with one JSON object: {"tool": "<name>", "arguments": {…}}.'


def _checked(name: str, arguments: Any, call_id: str) -> ToolUse | Unusable:
    try:
        find_tool(name)
    except InputError as error:
        return Unusable(problem=f"{error}.", call_id=call_id)
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}", strict=False)
        except ValueError as error:
            return Unusable(problem=f"The arguments of {name} are no valid JSON: {error}.", call_id=call_id)
    if not isinstance(arguments, dict):
        return Unusable(problem=f"The arguments of {name} are no JSON object.", call_id=call_id)
    return ToolUse(tool=name, arguments=arguments, call_id=call_id)


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """Every JSON object that begins at some brace of the text, outermost first. Raw line breaks in strings are taken."""
    decoder, position = json.JSONDecoder(strict=False), 0
    for _ in range(MAX_TRIED):
        start = text.find("{", position)
        if start < 0:
            return
        try:
            found, position = decoder.raw_decode(text, start)
        except (ValueError, RecursionError):
            position = start + 1
            continue
        if isinstance(found, dict):
            yield found


def _fill_sources(arguments: dict[str, Any], fences: list[tuple[str, str]]) -> None:
    """Python fences become the sources of parts that have none, in order; C++ fences the files that a lone part names as empty."""
    python = [body for language, body in fences if language.lower() in ("python", "py")]
    given = arguments.get("parts") if isinstance(arguments.get("parts"), list) else [arguments.get("part")]
    for part in given or ():
        if isinstance(part, dict) and not part.get("source") and python:
            part["source"] = python.pop(0)
    cpp = [body for language, body in fences if language.lower() in ("cpp", "c++", "cxx", "c")]
    for part in given or ():
        files = part.get("files") if isinstance(part, dict) else None
        if isinstance(files, dict):
            for name in [name for name, text in files.items() if not text][: len(cpp)]:
                files[name] = cpp.pop(0)
