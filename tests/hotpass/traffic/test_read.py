"""Readers: what each format becomes, what is refused, and that nothing is lost without a count."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path

import pytest

from hotpass.errors import InputError
from hotpass.traffic import Dropped, Lengths, Request, read_traffic

MOONCAKE = [
    {"timestamp": 27, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3027, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]},
    {"timestamp": 3027, "input_length": 600, "output_length": 1, "hash_ids": [0, 9]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:04.0319600,3180,8\n2023-11-16 18:17:03.9799600,4808,10\n"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,ChatGPT,1087,0,1087,API log\n"
    "118.5,GPT-4,417,276,693,Conversation log\n"
)


def json_lines(path: Path, records: list[dict[str, object]]) -> Path:
    path.write_text("\n".join(json.dumps(record) for record in records) + "\n", encoding="utf-8")
    return path


def words(text: str) -> list[int]:
    """A tokenizer of one token a word."""
    return list(range(len(text.split())))


def test_mooncake_keeps_prefix_chains_and_infers_the_block_size(tmp_path: Path) -> None:
    traffic = read_traffic(json_lines(tmp_path / "trace.jsonl", MOONCAKE))
    assert traffic.requests == (
        Request(arrival_ms=0, input_tokens=1100, output_tokens=5, prefix_hashes=(0, 1, 2), block_tokens=512),
        Request(arrival_ms=3000, input_tokens=1024, output_tokens=7, prefix_hashes=(0, 1), block_tokens=512),
        Request(arrival_ms=3000, input_tokens=600, output_tokens=1, prefix_hashes=(0, 9), block_tokens=512),
    )
    assert traffic.ref.source_format == "mooncake"
    assert traffic.ref.content_valid is False
    assert traffic.has_clock


def test_mooncake_with_full_blocks_only(tmp_path: Path) -> None:
    records = [{"timestamp": 0, "input_length": 47, "output_length": 2, "hash_ids": [3, 4]}]
    assert read_traffic(json_lines(tmp_path / "t", records)).requests[0].block_tokens == 16


def test_mooncake_without_chains(tmp_path: Path) -> None:
    request = read_traffic(
        json_lines(tmp_path / "t", [{"timestamp": 0, "input_length": 47, "output_length": 2}])
    ).requests[0]
    assert (request.prefix_hashes, request.block_tokens) == ((), 0)


def test_azure_is_ordered_by_arrival(tmp_path: Path) -> None:
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    traffic = read_traffic(path)
    assert [(r.arrival_ms, r.input_tokens, r.output_tokens) for r in traffic.requests] == [
        (0, 4808, 10),
        (52.0, 3180, 8),
    ]
    assert traffic.ref.source_format == "azure"


def test_burstgpt_counts_failed_requests(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text("\ufeff" + BURSTGPT, encoding="utf-8")
    traffic = read_traffic(path)
    assert [(r.arrival_ms, r.input_tokens, r.output_tokens) for r in traffic.requests] == [
        (0, 472, 18),
        (113_500, 417, 276),
    ]
    assert traffic.dropped == {"no-output": Dropped(requests=1, tokens=1087)}
    assert traffic.ref.source_format == "burstgpt"


def test_gzip_reads_as_plain(tmp_path: Path) -> None:
    (tmp_path / "t.csv.gz").write_bytes(gzip.compress(AZURE.encode()))
    (tmp_path / "t.csv").write_text(AZURE)
    packed, plain = read_traffic(tmp_path / "t.csv.gz"), read_traffic(tmp_path / "t.csv")
    assert packed.requests == plain.requests
    assert packed.ref.content_hash == plain.ref.content_hash


def test_content_hash_follows_what_is_replayed(tmp_path: Path) -> None:
    first = read_traffic(json_lines(tmp_path / "a", MOONCAKE)).ref.content_hash
    changed = [dict(MOONCAKE[0], output_length=6), *MOONCAKE[1:]]
    assert read_traffic(json_lines(tmp_path / "b", changed)).ref.content_hash != first


class TestDropping:
    """What is left out is counted by reason, in requests and tokens, and nothing is clipped."""

    def test_beyond_context_counts_input_and_output(self, tmp_path: Path) -> None:
        traffic = read_traffic(json_lines(tmp_path / "t", MOONCAKE), max_context=1031)
        assert [request.context for request in traffic.requests] == [1031, 601]
        assert traffic.dropped == {"beyond-context": Dropped(requests=1, tokens=1105)}
        assert traffic.ref.dropped == {"beyond-context": 1}

    def test_limit_and_context_together(self, tmp_path: Path) -> None:
        traffic = read_traffic(json_lines(tmp_path / "t", MOONCAKE), max_context=1031, limit=1)
        assert [request.context for request in traffic.requests] == [1031]
        assert traffic.requests[0].arrival_ms == 0
        assert traffic.ref.dropped == {"beyond-context": 1, "beyond-limit": 1}

    def test_requests_add_up(self, tmp_path: Path) -> None:
        traffic = read_traffic(json_lines(tmp_path / "t", MOONCAKE), max_context=1031, limit=1)
        all_tokens = sum(int(str(r["input_length"])) + int(str(r["output_length"])) for r in MOONCAKE)
        assert traffic.tokens + sum(d.tokens for d in traffic.dropped.values()) == all_tokens

    def test_nothing_left_is_refused_with_the_counts(self, tmp_path: Path) -> None:
        with pytest.raises(InputError, match=r"no usable request \(3 beyond-context\).*preset 'chat'"):
            read_traffic(json_lines(tmp_path / "t", MOONCAKE), max_context=100)


class TestRequestLogs:
    def test_text_usage_and_time_are_kept(self, tmp_path: Path) -> None:
        record: dict[str, object] = {
            "created": 1_700_000_000,
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
            "response": "Because it is.",
            "usage": {"prompt_tokens": 12, "completion_tokens": 4},
        }
        later = dict(record, created=1_700_000_002.5)
        traffic = read_traffic(json_lines(tmp_path / "log.jsonl", [record, later]))
        assert traffic.requests[0] == Request(
            arrival_ms=0.0,
            input_tokens=12,
            output_tokens=4,
            text="system: Be brief.\n\nuser: Why?",
            response="Because it is.",
            lengths=Lengths.GIVEN,
        )
        assert traffic.requests[1].arrival_ms == 2500.0
        assert traffic.ref.content_valid is True

    def test_a_tokenizer_counts_and_the_claim_is_kept(self, tmp_path: Path) -> None:
        usage = {"prompt_tokens": 12, "completion_tokens": 4}
        path = json_lines(tmp_path / "log", [{"prompt": "one two three", "response": "four five", "usage": usage}])
        request = read_traffic(path, encode=words).requests[0]
        assert (request.input_tokens, request.output_tokens, request.lengths) == (3, 2, Lengths.COUNTED)
        assert request.asked_input_tokens == 12

    def test_without_usage_lengths_are_estimated_and_say_so(self, tmp_path: Path) -> None:
        request = read_traffic(json_lines(tmp_path / "log", [{"prompt": "x" * 41, "response": "yes!"}])).requests[0]
        assert (request.input_tokens, request.output_tokens, request.lengths) == (11, 1, Lengths.ESTIMATED)

    @pytest.mark.parametrize(
        "record",
        [
            {
                "prompt": "hello there",
                "choices": [{"text": "hi"}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 1},
            },
            {
                "request": {"prompt": ["hello there"]},
                "response": {
                    "choices": [{"message": {"content": "hi"}}],
                    "usage": {"prompt_tokens": 2, "completion_tokens": 1},
                },
            },
            {
                "body": {"prompt": "hello there"},
                "response": {
                    "body": {
                        "choices": [{"text": "hi"}],
                        "usage": {"prompt_tokens": 2, "completion_tokens": 1},
                        "created": 7,
                    }
                },
            },
        ],
        ids=["flat", "nested", "batch"],
    )
    def test_common_layouts(self, tmp_path: Path, record: dict[str, object]) -> None:
        request = read_traffic(json_lines(tmp_path / "log", [record])).requests[0]
        assert (request.text, request.response, request.input_tokens, request.output_tokens) == (
            "hello there",
            "hi",
            2,
            1,
        )

    def test_what_is_not_text_is_counted(self, tmp_path: Path) -> None:
        image = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "x"}}]
        records: list[dict[str, object]] = [
            {"messages": [{"role": "user", "content": image}], "usage": {"prompt_tokens": 90, "completion_tokens": 9}},
            {"prompt": [1, 2, 3], "response": "hm"},
            {"prompt": "no answer was logged"},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "fine"}]}], "response": "good"},
        ]
        traffic = read_traffic(json_lines(tmp_path / "log", records))
        assert [request.text for request in traffic.requests] == ["user: fine"]
        assert traffic.dropped == {
            "no-output": Dropped(requests=1, tokens=5),
            "not-text": Dropped(requests=2, tokens=99),
        }

    @pytest.mark.parametrize(
        ("time", "arrival"), [("2023-11-14T22:13:21.5Z", 1500.0), (1_700_000_001_500, 1500.0), ("1700000001.5", 1500.0)]
    )
    def test_spellings_of_time(self, tmp_path: Path, time: object, arrival: float) -> None:
        records: list[dict[str, object]] = [
            {"timestamp": 1_700_000_000, "prompt": "a", "response": "b"},
            {"timestamp": time, "prompt": "a", "response": "b"},
        ]
        assert read_traffic(json_lines(tmp_path / "log", records)).requests[1].arrival_ms == arrival

    def test_time_on_some_lines_only_is_refused(self, tmp_path: Path) -> None:
        records: list[dict[str, object]] = [
            {"created": 1, "prompt": "a", "response": "b"},
            {"prompt": "a", "response": "b"},
        ]
        with pytest.raises(InputError, match=r"log\.jsonl line 2: created .* is missing"):
            read_traffic(json_lines(tmp_path / "log.jsonl", records))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}\n{"timestamp": 0', "line 2: text .* is not JSON"),
        (
            '{"timestamp": 0, "input_length": -5, "output_length": 5}',
            "line 1: input_length '-5' is not a number of at least 0",
        ),
        (
            '{"timestamp": 0, "input_length": 5.5, "output_length": 5}',
            "line 1: input_length '5.5' is not a whole number",
        ),
        ('{"timestamp": 0, "input_length": 5}', r"line 1: output_length '\(nothing\)'"),
        ('{"input_length": 5, "output_length": 5}', "line 1: timestamp"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5, "hash_ids": ["a"]}', "hash_ids .* whole numbers"),
        ('{"lengths": 5}', "line 1: fields .* belong to no known format"),
        ('{"prompt": 3, "response": "x"}', "line 1: prompt '3' is not text"),
        ('{"messages": [], "response": "x"}', "line 1: messages .* is not a list of messages"),
        (AZURE + "yesterday,3,4\n", "line 4: TIMESTAMP 'yesterday' is not a time"),
        (AZURE + "2023-11-16 18:17:04,x,4\n", "line 4: ContextTokens 'x' is not a number"),
        (BURSTGPT + "9,GPT-4,17\n", "line 5: Response tokens"),
        ("a,b,c\n1,2,3\n", "is in none of the known formats; name the format: mooncake"),
        ("", "is in none of the known formats"),
    ],
)
def test_malformed_files_are_refused_by_line_and_field(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "trace.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_traffic(path)


def test_a_chain_that_does_not_fit_names_its_line(tmp_path: Path) -> None:
    records = [*MOONCAKE, {"timestamp": 9, "input_length": 600, "output_length": 1, "hash_ids": [0, 1, 2, 3, 4]}]
    with pytest.raises(InputError, match=r"line 4: hash_ids '5 blocks for 600 tokens' does not fit blocks of 512"):
        read_traffic(json_lines(tmp_path / "t", records))


def test_format_can_be_named_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    path = json_lines(tmp_path / "t", MOONCAKE)
    assert read_traffic(path, format="mooncake").ref.num_requests == 3
    with pytest.raises(InputError, match="column 'TIMESTAMP' is missing"):
        read_traffic(path, format="azure")
    with pytest.raises(InputError, match="did you mean 'mooncake'"):
        read_traffic(path, format="moncake")


def test_sources_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="neither a file nor a preset; give a trace file, or did you mean 'chat'"):
        read_traffic("chatt")
    with pytest.raises(InputError, match="is a folder"):
        read_traffic(tmp_path)
    (tmp_path / "torn.gz").write_bytes(gzip.compress(AZURE.encode())[:-9])
    with pytest.raises(InputError, match="not a whole gzip file"):
        read_traffic(tmp_path / "torn.gz")
    (tmp_path / "latin").write_bytes(b"\xe9\xe8")
    with pytest.raises(InputError, match=r"not UTF-8 text \(byte 0\)"):
        read_traffic(tmp_path / "latin")
    with pytest.raises(InputError, match="limit '0' is not possible"):
        read_traffic("chat", limit=0)


def test_records_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_traffic("chat", limit=1).requests[0].input_tokens = 3  # type: ignore[misc]
