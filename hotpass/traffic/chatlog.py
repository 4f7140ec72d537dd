"""One line of an OpenAI-style request log as a request that keeps its text.

Taken: a request body (`messages` or `prompt`) at the top, under `request`, `body` or `request.body`; an answer under
`response` as text, as a completion object or under `response.body`; `usage` beside either; `created` or `timestamp`.
Not done here: chat templates. Messages become `role: content` paragraphs; the tokenizer of the deployment counts them later.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from hotpass.traffic.records import NO_INPUT, NO_OUTPUT, NOT_TEXT, Lengths, Request
from hotpass.traffic.where import Skipped, Where

BYTES_PER_TOKEN = 4
"""Of English text, as OpenAI's help page on tokens puts it; used only where a log has neither usage nor a tokenizer at hand."""

_MILLISECONDS_FROM = 1e11
"""Numbers above this are epochs in ms: as seconds they would lie beyond the year 5000."""


def parse_chat_line(where: Where, record: Mapping[str, Any]) -> tuple[Request | Skipped, bool]:
    """The request (or why it cannot be used), and whether the line had a time. Raises InputError."""
    asked, answered = _request_body(record), _answer_body(record)
    if "messages" not in asked and "prompt" not in asked:
        where.refuse("messages", sorted(record), "is missing", "a request has messages or prompt")
    arrival = _time_ms(where, record, answered)
    usage = _usage(where, record, answered)
    text = _messages(where, asked["messages"]) if "messages" in asked else _prompt(where, asked["prompt"])
    if text is None:
        return Skipped(NOT_TEXT, sum(usage.values())), arrival is not None
    response = _answer_text(record, answered)
    input_tokens = usage.get("prompt_tokens", estimated_tokens(text))
    output_tokens = usage.get("completion_tokens", estimated_tokens(response or ""))
    if input_tokens == 0 or output_tokens == 0:
        return Skipped(NO_INPUT if input_tokens == 0 else NO_OUTPUT, input_tokens + output_tokens), arrival is not None
    request = Request(
        arrival_ms=arrival or 0.0,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        text=text,
        response=response,
        lengths=Lengths.GIVEN if len(usage) == 2 else Lengths.ESTIMATED,
    )
    return request, arrival is not None


def estimated_tokens(text: str) -> int:
    """Tokens of a text by its bytes, rounded up; 0 for no text."""
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def _request_body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    for body in (record, record.get("request"), record.get("body")):
        if isinstance(body, Mapping) and ("messages" in body or "prompt" in body):
            return body
    nested = record.get("request")
    inner = nested.get("body") if isinstance(nested, Mapping) else None
    return inner if isinstance(inner, Mapping) else {}


def _answer_body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = record.get("response")
    if not isinstance(answer, Mapping):
        return {}
    inner = answer.get("body")
    return inner if isinstance(inner, Mapping) else answer


def _usage(where: Where, record: Mapping[str, Any], answered: Mapping[str, Any]) -> dict[str, int]:
    usage = record.get("usage") or answered.get("usage") or {}
    if not isinstance(usage, Mapping):
        where.refuse("usage", usage, "is not an object", "write prompt_tokens and completion_tokens, or leave it out")
    names = ("prompt_tokens", "completion_tokens")
    return {name: where.count(f"usage.{name}", usage[name]) for name in names if usage.get(name) is not None}


def _messages(where: Where, messages: object) -> str | None:
    if not isinstance(messages, list) or not messages:
        where.refuse("messages", messages, "is not a list of messages", "write [{role, content}, …]")
    paragraphs = []
    for message in messages:
        if not isinstance(message, Mapping) or "role" not in message:
            where.refuse("messages", message, "is not a message", "write {role, content}")
        content = _content(message.get("content"))
        if content is None:
            return None
        paragraphs.append(f"{message['role']}: {content}")
    return "\n\n".join(paragraphs)


def _content(content: object) -> str | None:
    """Text of a message; None when a part of it is not text. A message that only calls tools has no text."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part["text"] for part in content if _is_text(part)]
    return "".join(parts) if len(parts) == len(content) else None


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _prompt(where: Where, prompt: object) -> str | None:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not prompt:
        where.refuse("prompt", prompt, "is not text", "write the prompt as a string")
    return prompt[0] if len(prompt) == 1 and isinstance(prompt[0], str) else None


def _answer_text(record: Mapping[str, Any], answered: Mapping[str, Any]) -> str | None:
    if isinstance(record.get("response"), str):
        return str(record["response"])
    choices = answered.get("choices") or record.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
        return None
    message = choices[0].get("message")
    text = message.get("content") if isinstance(message, Mapping) else choices[0].get("text")
    return text if isinstance(text, str) else None


def _time_ms(where: Where, record: Mapping[str, Any], answered: Mapping[str, Any]) -> float | None:
    places = ((record, "timestamp"), (record, "created"), (answered, "created"))
    name, value = next(((name, body[name]) for body, name in places if body.get(name) is not None), ("", None))
    if value is None:
        return None
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            where.refuse(name, value, "is not a time", "write seconds since 1970 or 2026-01-31T12:00:00Z")
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000.0
    number = where.number(name, value)
    return number if number > _MILLISECONDS_FROM else number * 1000.0
