"""What InferenceX (formerly InferenceMAX) publishes about its deployments, for rows of its measurements that do not say it.

    row (model, system, engine, lengths, clients, GPUs of a worker) ──► its public configuration and launch scripts ──► columns filled in

Two thirds of the public sample come from that harness, whose exports dropped columns: numbers of workers, attention data parallelism, and
whether the engine drafted tokens (so that two rows with equal columns differ by a factor of two). Its configuration says all three
(`inferencex.txt`), rows of its database say it of the same points (they have no drafts), its launch scripts say what is common to its runs: cache types, tokens of a chunk, limits, how long schedulers hold prompts
back. Nothing here looks at a measured time. A row that several deployments fit takes the first, without drafts where there is one, and stays
`open`. Rows of others are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd

SOURCES = ("source_file=20", "db-dump")
"""How the source of its rows begins."""
MEAN_LENGTH = 0.9
"""Of the lengths that it names: it draws them evenly between 0.8 and 1.0 of these (its README: RANDOM_RANGE_RATIO 0.8)."""
HOPPER = ("h100_sxm", "h200_sxm")
TIMEOUT_STEPS = 60.0
"""TensorRT-LLM with attention data parallelism waits so many steps for a prompt on every rank (`attention_dp_config.timeout_iters`)."""
DRAFTED_ON: Mapping[tuple[str, str, str, str], tuple[str, ...]] = {
    ("agg", "trtllm", "b200_sxm", "fp4"): ("2026-01-14", "1.2.0rc6.post3"),
    ("agg", "trtllm", "b200_sxm", "fp8"): ("2026-01-14", "1.2.0rc6.post3"),
    ("agg", "trtllm", "h200_sxm", "fp8"): ("2026-01-14",),
    ("disagg", "sglang", "b200_sxm", "fp8"): ("2026-02-13",),
    ("disagg", "sglang", "b200_sxm", "fp4"): ("2026-02-11T22",),
}
"""(mode, engine, system, precision) → days and images of which all DeepSeek runs drafted: its scripts with and without drafts were
released apart."""
PLAIN_ON: Mapping[tuple[str, str, str, str], tuple[str, ...]] = {
    ("disagg", "sglang", "b200_sxm", "fp8"): ("2026-02-07",),
    ("disagg", "sglang", "b200_sxm", "fp4"): ("2026-02-11T01",),
}
"""The same for runs without drafts."""
LAYOUTS: Mapping[str, tuple[bool, bool]] = {"tp": (False, False), "tep": (False, True), "dp": (True, False), "dep": (True, True)}  # fmt: skip
"""Word → whether attention is data parallel, whether experts are spread."""

SIDES = ("prefill", "decode")
WORKER = ("num_workers", "tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
"""Columns of one side."""

Key = tuple[str, str, str, str, int, int]
Point = tuple[Key, float, float, float]
"""A key with clients and GPUs of both workers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One disaggregated deployment of the configuration."""

    clients: frozenset[int]
    prefill_workers: int
    prefill: str
    """Layout of a worker, as `dep4`."""
    decode_workers: int
    decode: str
    drafts: int

    def fits(self, clients: float, prefill_gpus: float, spread: bool, decode_gpus: float) -> bool:
        word, gpus = _split(self.prefill)
        return (
            int(clients) in self.clients and gpus == prefill_gpus and _split(self.decode)[1] == decode_gpus
            and (LAYOUTS[word][1] == spread or gpus == 1)
        )  # fmt: skip


def is_its(row: pd.Series) -> bool:
    """Whether that harness measured the row."""
    return str(row.get("silicon_data_source", "")).startswith(SOURCES)


def completed(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with what is published of their deployments: columns as in the public sample, and `drafts`, `cache_bytes`,
    `chunk_tokens`, `max_sequences`, `poll_steps`, `fill_steps`, `open` (1: several deployments fit)."""
    donors = _donors(rows)
    filled = pd.DataFrame([_filled(row, donors) for _, row in rows.iterrows()], index=rows.index)
    made = rows.copy()
    for name in map(str, filled):
        made[name] = filled[name].combine_first(rows[name].astype(float)) if name in rows else filled[name]
    return made


def clients_of(row: pd.Series) -> float:
    """Concurrency that the row's source names; 0 where it names none."""
    said = str(row.get("silicon_data_source", "")).partition("silicon_concurrency=")[2].partition(";")[0]
    return float(said) if said.isdigit() else 0.0


def _donors(rows: pd.DataFrame) -> dict[Point, list[dict[str, float]]]:
    """Point → the deployments that rows tell of it, each once."""
    found: dict[Point, list[dict[str, float]]] = {}
    names = [f"{side}_{name}" for side in SIDES for name in WORKER]
    if set(names) <= set(rows):
        for _, row in rows[rows[names].notna().all(axis=1)].iterrows():
            told = {name: float(row[name]) for name in names}
            first, second = (told[f"{side}_tp_size"] * told[f"{side}_attention_dp_size"] for side in SIDES)
            point: Point = (_key(row), clients_of(row), first, second)
            if is_its(row) and told not in found.setdefault(point, []):
                found[point].append(told)
    return found


def _filled(row: pd.Series, donors: Mapping[Point, list[dict[str, float]]]) -> dict[str, float]:
    """Columns to fill in: of the deployment where the row leaves it open, and what its launch scripts set."""
    if not is_its(row):
        return {}
    clients = clients_of(row)
    made = dict(_script(row, clients))
    deepseek = "DeepSeek" in str(row["model_path"])
    if row["mode"] != "disagg":
        return made | ({"drafts": _drafts(row, clients), "open": _unclear(row, clients)} if deepseek else {})
    if not pd.isna(row.get("decode_num_workers")):
        return made
    found = [run for run in _runs().get(_key(row), ()) if run.fits(clients, *_gpus(row))]
    drafted = _drafted(row)
    if drafted is not None:
        found = [run for run in found if bool(run.drafts) is drafted] or found
    if not found:
        told = donors.get((_key(row), clients, float(row["prefill_tp_size"]), float(row["decode_tp_size"])), [])
        return made | ({**told[0], "drafts": 0.0, "open": float(len(told) > 1)} if told else {})
    run = found[0]
    made |= {"drafts": float(run.drafts), "open": float(len(found) > 1)}
    for side, workers, layout in (("prefill", run.prefill_workers, run.prefill), ("decode", run.decode_workers, run.decode)):  # fmt: skip
        made |= {f"{side}_{name}": value for name, value in {"num_workers": float(workers), **sizes(layout)}.items()}
    return made


def sizes(layout: str) -> dict[str, float]:
    """Columns of a layout, as `dep8`."""
    word, gpus = _split(layout)
    data_parallel, spread = LAYOUTS[word]
    return {
        "tp_size": 1.0 if data_parallel else float(gpus), "attention_dp_size": float(gpus) if data_parallel else 1.0,
        "moe_tp_size": 1.0 if spread else float(gpus), "moe_ep_size": float(gpus) if spread else 1.0,
    }  # fmt: skip


def _split(layout: str) -> tuple[str, int]:
    word = layout.rstrip("0123456789")
    return word, int(layout[len(word) :])


def _gpus(row: pd.Series) -> tuple[float, bool, float]:
    """GPUs of a prefill worker, whether its experts are spread, GPUs of a decode worker: the columns that such rows have."""
    spread = float(row.get("prefill_moe_ep_size") or 1) > 1
    return float(row["prefill_tp_size"]), spread, float(row["decode_tp_size"])


def _key(row: pd.Series) -> Key:
    name = "deepseek" if "DeepSeek" in str(row["model_path"]) else str(row["model_path"]).rpartition("/")[2][:7]
    return name, str(row["system"]), str(row["backend"]), str(row["precision"]), int(row["isl"]), int(row["osl"])


def _names(row: pd.Series) -> tuple[str, str, str, str]:
    return str(row["mode"]), str(row["backend"]), str(row["system"]), str(row["precision"])


def _ran_on(row: pd.Series, days: tuple[str, ...]) -> bool:
    said = str(row["silicon_data_source"])
    return any(f"measured={day}" in said or str(row.get("backend_version")) == day for day in days)


def _drafted(row: pd.Series) -> bool | None:
    """Whether its day or image says that it drafted; None: they do not say."""
    if _ran_on(row, DRAFTED_ON.get(_names(row), ())):
        return True
    return False if _ran_on(row, PLAIN_ON.get(_names(row), ())) else None


def _drafts(row: pd.Series, clients: float) -> float:
    """Of a DeepSeek run on the same GPUs: TensorRT-LLM's scripts draft three tokens, one with attention data parallelism."""
    if row["backend"] == "sglang":
        return 2.0 if _beyond_plain(row, clients) else 0.0
    return (1.0 if float(row.get("attention_dp_size") or 1) > 1 else 3.0) if _drafted(row) else 0.0


def _beyond_plain(row: pd.Series, clients: float) -> bool:
    """SGLang in fp8 on a B200: without drafts the configuration has at most 64 clients on eight GPUs, 4 at long prompts."""
    same = _names(row) == ("agg", "sglang", "b200_sxm", "fp8") and str(row.get("backend_version")) == "0.5.9"
    return same and row["tp_size"] == 8 and clients > (4 if row["isl"] > 4096 else 64)


def _unclear(row: pd.Series, clients: float) -> float:
    """Both scripts ran the same points on the same day (those of the database have no drafts)."""
    same = _names(row) == ("agg", "sglang", "b200_sxm", "fp8") and str(row.get("backend_version")) == "0.5.9"
    exported = not str(row["silicon_data_source"]).startswith("db-dump")
    return float(same and exported and row["tp_size"] == 8 and not _beyond_plain(row, clients))


def _script(row: pd.Series, clients: float) -> Iterator[tuple[str, float]]:
    """What the launch scripts set: bytes of a cached value, tokens of a chunk, sequences at most, steps that prompts are held back."""
    engine, hopper, model, isl = row["backend"], row["system"] in HOPPER, str(row["model_path"]), float(row["isl"])
    if engine == "trtllm":
        yield "cache_bytes", 2.0 if hopper and "gpt-oss" in model else 1.0
        yield "chunk_tokens", 20000.0 if "gpt-oss" in model else max(8192.0, isl + clients + 64)
        if "Llama" in model and isl == row["osl"] and row["tp_size"] < 8:
            yield "fill_steps", 20.0
    elif engine == "sglang":
        yield "cache_bytes", 2.0 if hopper and "Qwen" not in model else 1.0
        yield "chunk_tokens", 32768.0 if hopper or row["precision"] == "fp8" else 16384.0
        if row["mode"] != "disagg" and not hopper and "GLM" not in model:
            yield "poll_steps", 30.0 if clients >= 16 else 10.0
            yield "max_sequences", 256.0
    else:
        yield "cache_bytes", 1.0 if "Llama" in model or not (hopper or row["precision"] == "int4") else 2.0
        doubled = not hopper and ("MiniMax" in model or "Kimi" in model)
        yield "chunk_tokens", 2.0 * isl if doubled else 8192.0


@cache
def _runs() -> Mapping[Key, tuple[Run, ...]]:
    """The configuration's deployments by what rows say of them."""
    made: dict[Key, list[Run]] = {}
    section: list[Run] = []
    for line in Path(__file__).with_name("inferencex.txt").read_text(encoding="utf-8").splitlines():
        head = re.fullmatch(r"\[(\S+) (\S+) (\S+) (\S+) (\d+)x(\d+)\]", line)
        if head:
            section = made.setdefault((head[1], head[2], head[3], head[4], int(head[5]), int(head[6])), [])
        elif line and not line.startswith("#"):
            clients, prefill, decode, drafts = (part.split() for part in line.split("|"))
            run = Run(
                clients=frozenset(map(int, clients)), prefill_workers=int(prefill[0]), prefill=prefill[1],
                decode_workers=int(decode[0]), decode=decode[1], drafts=int(drafts[0]),
            )  # fmt: skip
            section.append(run)
    return {key: tuple(runs) for key, runs in made.items()}
