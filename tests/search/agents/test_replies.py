"""Replies become a tool call or one precise sentence, whatever a model writes."""

from __future__ import annotations

import json

import pytest

from search.agents.llm import NativeCall, Reply
from search.agents.replies import ToolUse, Unusable, tool_use
from search.agents.scripted import tool_text


def said(text: str) -> ToolUse | Unusable:
    return tool_use(Reply(text=text))


SLOTS = ToolUse(tool="slots", arguments={})


@pytest.mark.parametrize(
    "text",
    [
        tool_text("slots"),
        "```json\n" + tool_text("slots") + "\n```",
        "Let me look at {slots} first.\n" + tool_text("slots") + "\nThen I go on.",
        '<think>maybe {"tool": "post"}?</think>' + tool_text("slots"),
        '{"reason": "I must look", "tool": "slots", "arguments": {}}',
        '{"tool": "slots"}',
        '{"tool": "slots", "arguments": "{}"}',
    ],
)
def test_a_call_is_found_alone_fenced_and_amid_prose(text: str) -> None:
    assert said(text) == SLOTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "was empty"),
        ("   \n", "was empty"),
        ("<think>hm</think>", "was empty"),
        ("I would fuse the gate.", "calls no tool"),
        ('{"tool": "slots", "arguments": {', "no valid JSON"),
        ('{"tool": "slots" "arguments": {}}', "no valid JSON"),
        ('{"tool": "submit", "arguments": {}}', "did you mean 'submit_proposal'"),
        ('{"tool": "release", "arguments": {}}', "tool 'release' does not exist"),
        ('{"tool": "slots", "arguments": [1]}', "are no JSON object"),
        ('{"tool": "slots", "arguments": "{"}', "no valid JSON"),
        ("{" * 5000, "calls no tool"),
        ('{"tool": ' * 2000, "no valid JSON"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_sentence(text: str, says: str) -> None:
    found = said(text)
    assert isinstance(found, Unusable)
    assert says in found.problem


def test_a_reply_that_was_cut_off_is_not_used_at_all() -> None:
    found = tool_use(Reply(text=tool_text("slots"), cut_off=True))
    assert isinstance(found, Unusable)
    assert "cut off" in found.problem


def test_source_may_stand_in_fences_beside_the_object_and_line_breaks_may_be_raw() -> None:
    call = {
        "tool": "submit_proposal",
        "arguments": {"hypothesis": "h", "parts": [{"name": "a", "files": {"a.cpp": ""}}]},
    }
    found = said(f"{json.dumps(call)}\n```python\nimport os\n```\n```cpp\nint f();\n```")
    assert isinstance(found, ToolUse)
    assert found.arguments["parts"] == [{"name": "a", "source": "import os\n", "files": {"a.cpp": "int f();\n"}}]
    raw = said('{"tool": "quick_check", "arguments": {"part": {"name": "a", "source": "x = 1\ny = 2"}}}')
    assert isinstance(raw, ToolUse)
    assert raw.arguments["part"]["source"] == "x = 1\ny = 2"


def test_native_calls_keep_their_id_and_are_checked_alike() -> None:
    good = tool_use(Reply(text="", calls=(NativeCall(call_id="c1", name="slots", arguments=""),)))
    assert good == ToolUse(tool="slots", arguments={}, call_id="c1")
    bad = tool_use(Reply(text="", calls=(NativeCall(call_id="c2", name="slots", arguments='{"a'),)))
    assert isinstance(bad, Unusable)
    assert bad.call_id == "c2"
