"""Stored replies: whole, once, and none that was changed since."""

from __future__ import annotations

from pathlib import Path

from search.agents.exchange import FOLDER, Exchange, keep_exchange, read_exchanges
from search.agents.llm import NativeCall, Reply


def exchange(text: str, before: str = "") -> Exchange:
    call = NativeCall(call_id="c", name="slots", arguments="{}")
    said = ({"role": "assistant", "content": None, "tool_calls": [{"id": "c", "function": {"name": "slots"}}]},)
    reply = Reply(text=text, calls=(call,))
    return Exchange(author="agent:mlp", model="m", before=before, said=said, reply=reply)


def test_a_reply_comes_back_as_it_was_kept_and_twice_is_once(tmp_path: Path) -> None:
    made = exchange('ü "quoted"\n')
    assert keep_exchange(tmp_path, made) == keep_exchange(tmp_path, made)
    assert list(read_exchanges(tmp_path)) == [made]
    assert [path.name for path in (tmp_path / FOLDER).iterdir()] == [f"{made.sha256}.json"]


def test_what_was_changed_or_torn_is_passed_over(tmp_path: Path) -> None:
    kept, changed, torn = exchange("a"), exchange("b"), exchange("c")
    for made in (kept, changed, torn):
        keep_exchange(tmp_path, made)
    path = tmp_path / FOLDER / f"{changed.sha256}.json"
    path.write_text(path.read_text().replace('"b"', '"x"'))
    (tmp_path / FOLDER / f"{torn.sha256}.json").write_text('{"author": ')
    assert list(read_exchanges(tmp_path)) == [kept]
    assert list(read_exchanges(tmp_path / "nowhere")) == []
