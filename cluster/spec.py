"""What a user asks of a campaign: one flat record, from the command line, a campaign file or Python.

Precedence, highest first: command-line option or keyword argument, campaign file, default here. Nothing is looked up or
loaded in this module; `cluster.resolve` turns a spec into a deployment, once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotpass.errors import InputError, nearest
from hotpass.records.candidate import Numerics
from search.budget import parse_duration
from search.objectives import TOKENS_PER_S, parse_objectives

ENGINES = ("decoder", "module", "vllm", "fake")
MODULE_DEFAULTS = {"traffic": "examples", "numerics": Numerics.BIT_IDENTICAL.value}
"""Of a module: its examples stand for traffic, and science expects the very same bits unless it says otherwise."""
DEVICES = ("auto", "cpu", "cuda")
SAMPLERS = ("optuna", "random", "none")
TUNERS = ("none", "gp")
DURATIONS = ("budget", "engine_budget", "patience", "llm_turn")
"""Fields that are times as people write them."""
LLM_TOOLS = ("auto", "native", "text")
CONTROLS = ("none", "random", "optuna")


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignSpec:
    """A campaign as asked for."""

    model: str
    """An alias, a hub id, a folder or a GGUF file; of a module an alias, `FILE.py` or `module:function`."""
    traffic: str
    """A preset's name or a trace file; `examples` of a module."""
    budget: str = "5m"
    """Wall time from the engine's start to the result, as `90s`, `5m` or `1h30m`."""
    max_attempts: int = 0
    """Stop searching after this many attempts; 0 for no limit."""
    concurrency: int = 1
    """Clients of the closed loop whose steps are counted."""
    numerics: str = Numerics.TOLERANCE.value
    """The widest numerics class that may be proposed."""
    engine: str = "decoder"
    """`decoder`, `module` (any torch module with example inputs), or `fake` (simulated times; nothing is measured)."""
    device: str = "auto"
    """`cpu`, `cuda`, or `auto`: a GPU where there is one."""
    threads: int = 0
    """Threads of the deployment as loaded; 0 for the physical cores."""
    seed: int = 0
    """Of the proposals, of the inputs drawn and of the order of sides."""
    out: str = ""
    """Campaign folder; empty for `campaigns/<model>-<traffic>-<time>`."""
    continue_from: str = ""
    """Campaign folder whose winner is the first candidate here."""
    ray: bool = True
    """Engines and builders as Ray actors; False runs them in this process."""
    address: str = ""
    """Ray address; empty starts a local Ray."""
    tracking_uri: str = ""
    """MLflow server; empty for SQLite in the campaign folder."""
    baselines: bool = True
    """Measure transformers' own loop in the same session."""
    requests: int = 0
    """Requests of the trace to use; 0 for all."""
    parallelism: int = 1
    """Tensor-parallel degree; only 1 is implemented."""
    engines: int = 0
    """Engines that measure at once; 0 for one a memory-bandwidth domain: each GPU, or the CPU."""
    sampler: str = "optuna"
    """Who composes: `optuna`, `random` (untried candidates by chance), or `none`: only what agents and people hand in."""
    tuner: str = "none"
    """`gp`: beside the sampler, a Gaussian process over the parameters and settings of the incumbent, its parts fixed; `none` for none."""
    objective: str = TOKENS_PER_S
    """One or two of `search.objectives`, by comma; the first is what verdicts and claims are about."""
    control: str = "none"
    """`random` or `optuna`: a search of its own without agents, to compare with; `none` for none."""
    control_share: float = 0.2
    """Of the engine time, for the control."""
    warm_start: str = ""
    """Campaign folder or `mlflow:ID`, whose parts are tried here too, ordered by what they were worth there."""
    engine_budget: str = ""
    """Engine time of the search, as `budget`; empty for no such limit."""
    target_speedup: float = 0.0
    """Stop once the incumbent is surely so many times as fast as the deployment as loaded; 0 for no target."""
    agents: int = 0
    """LLM agents that propose beside the search; 0 for none."""
    llm: str = ""
    """Their model, as litellm names it; `openai/<name>` for a server at `llm_api_base`."""
    llm_api_base: str = ""
    """OpenAI-compatible server; empty for the provider's own."""
    llm_max_tokens: int = 0
    """Tokens that all agents together may read and write, over all sessions; 0 for no limit."""
    llm_max_usd: float = 0.0
    """Money that they may spend; a model of unknown price needs `llm_max_tokens` too. 0 for no limit."""
    llm_context: int = 0
    """Window of the model in tokens; 0 for what litellm knows, else 8,192."""
    llm_tools: str = "auto"
    """`native` tool calls, JSON in the `text`, or `auto`: native where litellm knows that the model has them."""
    llm_turn: str = "5m"
    """Deadline of one proposal over all requests and retries."""
    patience: str = ""
    """Stop after so long without a new incumbent; empty for half of the search's time (and 60 attempts)."""

    def __post_init__(self) -> None:
        one_of("numerics", self.numerics, [kind.value for kind in Numerics])
        one_of("engine", self.engine, list(ENGINES))
        one_of("device", self.device, list(DEVICES))
        if self.engine == "module" and (self.traffic, self.concurrency) != (MODULE_DEFAULTS["traffic"], 1):
            given = f"{self.traffic}, {self.concurrency} clients"
            raise InputError(
                "traffic",
                given,
                "is not a module's",
                "leave --traffic and --concurrency out: its examples are its load",
            )
        parse_duration(self.budget)
        at_least("concurrency", self.concurrency, 1)
        for name in ("max_attempts", "threads", "requests", "seed", "engines"):
            at_least(name, getattr(self, name), 0)
        one_of("sampler", self.sampler, list(SAMPLERS))
        one_of("tuner", self.tuner, list(TUNERS))
        one_of("control", self.control, list(CONTROLS))
        parse_objectives(self.objective)
        self._check_agents()
        for name in ("engine_budget", "patience"):
            if getattr(self, name):
                parse_duration(getattr(self, name), name)
        if not 0 < self.control_share < 1:
            raise InputError("control_share", self.control_share, "is no share", "give a number between 0 and 1")
        if self.target_speedup and self.target_speedup <= 1:
            raise InputError("target_speedup", self.target_speedup, "is no speedup", "give a number above 1")
        if self.parallelism != 1:
            raise InputError(
                "parallelism", self.parallelism, "is not implemented", "leave it at 1: one engine process per machine"
            )

    def _check_agents(self) -> None:
        one_of("llm_tools", self.llm_tools, list(LLM_TOOLS))
        parse_duration(self.llm_turn, "llm_turn")
        for name in ("agents", "llm_max_tokens", "llm_context"):
            at_least(name, getattr(self, name), 0)
        if self.llm_max_usd < 0:
            raise InputError("llm_max_usd", self.llm_max_usd, "is below 0", "give an amount of money in USD")
        if bool(self.agents) != bool(self.llm):
            field, remedy = ("llm", "give --llm MODEL") if self.agents else ("agents", "give --agents N")
            raise InputError(field, getattr(self, field), "is missing: agents and their LLM go together", remedy)
        if "@" in self.llm_api_base or "?" in self.llm_api_base:
            problem = "holds more than an address, and is recorded"
            raise InputError("llm_api_base", "(hidden)", problem, "put the key into HOTPASS_LLM_API_KEY")

    @property
    def llm_turn_seconds(self) -> float:
        return parse_duration(self.llm_turn, "llm_turn")

    @property
    def budget_seconds(self) -> float:
        return parse_duration(self.budget)


def one_of(field: str, value: str, known: list[str]) -> str:
    """The value when it is known. Raises InputError naming the nearest otherwise."""
    if value not in known:
        raise InputError(field, value, "is not known", nearest(str(value), known))
    return value


def at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(field, value, f"is below {least}", f"give a whole number of at least {least}")


def make_spec(given: Mapping[str, Any], campaign_file: str | None = None) -> CampaignSpec:
    """A spec from what was given (None counts as not given) over a campaign file. Raises InputError."""
    fields = read_campaign_file(Path(campaign_file)) if campaign_file else {}
    fields |= {name: value for name, value in given.items() if value is not None}
    known = [item.name for item in dataclasses.fields(CampaignSpec)]
    for name in fields:
        if name not in known:
            raise InputError("campaign", name, "is not a field of a campaign", nearest(name, known))
    if fields.get("engine") == "module":
        fields = {**MODULE_DEFAULTS, **fields}
    for name in ("model", "traffic"):
        if not fields.get(name):
            raise InputError(name, "", "is missing", f"give --{name}, or {name} in the campaign file")
    return CampaignSpec(**fields)


def read_campaign_file(path: Path) -> dict[str, Any]:
    """Fields of a spec from TOML or YAML; a wrong key or type is one sentence. Raises InputError."""
    from pydantic import ConfigDict, TypeAdapter, ValidationError, create_model

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            "campaign file", path, f"cannot be read ({error.strerror})", "give a TOML or YAML file"
        ) from None
    content = _parsed(path, text)
    known = {item.name: item for item in dataclasses.fields(CampaignSpec)}
    for name in content:
        if name not in known:
            raise InputError(f"campaign file {path}: key", name, "is not known", nearest(str(name), list(known)))
    for name in DURATIONS:
        if not isinstance(content.get(name, ""), str):
            parse_duration(content[name], f"campaign file {path}: {name}")
    kinds: dict[str, Any] = {name: (_TYPES[str(known[name].type)], ...) for name in content}
    adapter = TypeAdapter(create_model("CampaignFile", __config__=ConfigDict(strict=True), **kinds))
    try:
        adapter.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        problem = f"is of the wrong type: {first['msg'][0].lower()}{first['msg'][1:]}"
        raise InputError(
            f"campaign file {path}: {name}", content[name], problem, f"write {_CALLED[str(known[name].type)]}"
        ) from None
    return content


_CALLED = {"str": "a text in quotes", "int": "a whole number", "bool": "true or false", "float": "a number"}
_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "float": float}


def _parsed(path: Path, text: str) -> dict[str, Any]:
    import tomllib

    import yaml

    try:
        content = tomllib.loads(text) if path.suffix == ".toml" else yaml.safe_load(text)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        first_line = str(error).splitlines()[0]
        raise InputError("campaign file", path, f"cannot be parsed: {first_line}", "correct the syntax") from None
    if not isinstance(content, dict):
        raise InputError("campaign file", path, "holds no keys", "write `model: …` and `traffic: …`")
    return content
