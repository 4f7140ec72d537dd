"""Candidates as folders: `candidate.toml` and the sources of its parts.

    candidates/<id>/candidate.toml, parts/<n>-<name>/…      written whole or not at all, verified by hash when read

A person's candidate has the same form: `candidate.toml` beside the parts that it names, ids and hashes optional.
What is not here: the log (`cluster.events`), the durable texts of parts (`cluster.sources`), measured passes (`cluster.passes`), and
which candidate is good.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Container, Iterable, Mapping
from pathlib import Path
from typing import Any

import pydantic

from cluster.sources import SourceStore, inside, sync_folder, write_file
from hotpass.errors import InputError, LedgerError
from hotpass.parts import declaration, read_part
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse, Value
from hotpass.settings import DEFAULTS, check_setting
from search.space import make_candidate

SCHEMA = 1
FILE = "candidate.toml"
CANDIDATES = "candidates"


class _PartEntry(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    name: str
    folder: str = ""
    """Relative to candidate.toml; `parts/<name>`, or `<name>`, when absent."""
    files: list[str] | None = None
    sha256: str = ""
    params: dict[str, Any] = {}


class _CandidateFile(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    schema_: int = pydantic.Field(default=SCHEMA, alias="schema")
    id: str = ""
    label: str = ""
    """For readers; not read back."""
    numerics: str = ""
    settings: dict[str, Any] = {}
    parallelism: dict[str, int] = {}
    parts: list[_PartEntry] = []


def save_candidate(folder: Path, candidate: Candidate) -> Path:
    """Write a candidate into the campaign in `folder`, and return its own folder. Durable when it returns; nothing when it is there.

    Raises InputError for a source path that leads out of the part's folder, LedgerError when the disk refuses.
    """
    target = Path(folder) / CANDIDATES / candidate.id
    if not (target / FILE).exists():
        _place_candidate(target, candidate)
        try:
            sync_folder(target)
        except OSError as error:
            raise LedgerError(f"candidate {candidate.short_id} cannot be made durable: {error.strerror}") from error
    return target


class CandidateWriter:
    """Writes what a campaign proposes, for hundreds of candidates a second. Used by one thread.

    The log's proposal says everything of a candidate but the texts of its parts. So these are what is made durable, each once; the
    candidates' own folders are for readers, and `restored` makes again what a loss of power took of them.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._sources = SourceStore(folder)

    def save(self, candidate: Candidate) -> Path:
        """Visible when it returns; after `sync` and with its proposal in the log never lost. Raises as `save_candidate`."""
        target = self.folder / CANDIDATES / candidate.id
        for use in candidate.parts:
            self._sources.keep(use.source)
        if not (target / FILE).exists():
            _place_candidate(target, candidate)
        return target

    def sync(self) -> None:
        """The sources of everything saved so far survive a loss of power. Raises LedgerError."""
        self._sources.sync()


def restored(folder: Path, proposals: Iterable[Mapping[str, Any]]) -> list[Path]:
    """Candidates of the log (`proposals`: payloads) whose folders a loss of power took or tore, made again; where they are.

    What cannot be made again stays as it is, for `load_candidate` to report.
    """
    made, sources = [], SourceStore(folder)
    for payload in proposals:
        key = payload["candidate_id"]
        try:
            load_candidate(folder, key)
        except InputError:
            candidate = _proposed(sources, payload)
            if candidate is not None and candidate.id == key:
                target = Path(folder) / CANDIDATES / key
                shutil.rmtree(target, ignore_errors=True)
                made.append(save_candidate(folder, candidate))
    return made


def _proposed(sources: SourceStore, payload: Mapping[str, Any]) -> Candidate | None:
    """The candidate of a proposal; None when the text of a part is not there."""
    uses = []
    for part in payload["parts"]:
        source = sources.find(part["name"], part["sha256"])
        if source is None:
            return None
        uses.append(PartUse(source=source, params=part["params"]))
    return Candidate(
        parts=tuple(uses),
        settings=payload["settings"],
        parallelism=payload.get("parallelism", {}),
        numerics=Numerics(payload["numerics"]),
    )


def _place_candidate(target: Path, candidate: Candidate) -> None:
    temporary = target.with_name(f".{candidate.id}.{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        _write_candidate(temporary, candidate)
        try:
            temporary.rename(target)
        except OSError:
            if not (target / FILE).exists():  # another writer of the same content may have been first
                raise
    except OSError as error:
        raise LedgerError(f"candidate {candidate.short_id} cannot be written to {target}: {error.strerror}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def load_candidate(folder: Path, candidate_id: str) -> Candidate:
    """A candidate of the campaign in `folder`, whose content is verified against its id. Raises InputError."""
    found = read_candidate_folder(Path(folder) / CANDIDATES / candidate_id)
    if found.id != candidate_id:
        raise InputError("candidate", candidate_id, f"has the content of {found.id}", "restore the folder from a copy")
    return found


def load_candidates(folder: Path) -> dict[str, Candidate]:
    """Every candidate of the campaign, by id, each verified."""
    paths = sorted((Path(folder) / CANDIDATES).glob(f"[!.]*/{FILE}"))
    return {path.parent.name: load_candidate(folder, path.parent.name) for path in paths}


def set_torn_aside(folder: Path, named: Container[str]) -> list[Path]:
    """Candidates that a crash left half-written, and that no event names, moved to `candidates/.torn/`; where they went.

    One that the log names is `restored`, not lost.
    """
    moved = []
    for path in sorted((Path(folder) / CANDIDATES).glob("[!.]*")):
        if path.name in named:
            continue
        try:
            load_candidate(folder, path.name)
        except InputError:
            target = path.parent / ".torn" / path.name
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            moved.append(path.rename(target))
    return moved


def read_candidate_folder(folder: Path, *, dtype: str = "float32") -> Candidate:
    """A candidate from a folder with candidate.toml, a campaign's or a person's.

    Parameters left out have their defaults, settings equal to the default are dropped. Without `numerics` in the file, the class
    follows from the declarations for a model of `dtype`. Raises InputError: unknown key, wrong type, missing source, hash mismatch.
    """
    folder = Path(folder)
    entry = _parsed(folder)
    uses = [_part_use(folder, part) for part in entry.parts]
    settings = {name: check_setting(name, _from_toml(value)) for name, value in entry.settings.items()}
    settings = {name: value for name, value in settings.items() if value != DEFAULTS[name]}
    derived = make_candidate(uses, settings, dtype, entry.parallelism)
    try:
        numerics = Numerics(entry.numerics) if entry.numerics else derived.numerics
    except ValueError:
        known = ", ".join(kind.value for kind in Numerics)
        raise InputError(
            f"{folder / FILE}: numerics", entry.numerics, "is not a class", f"use one of {known}"
        ) from None
    candidate = Candidate(parts=tuple(uses), settings=settings, parallelism=entry.parallelism, numerics=numerics)
    if entry.id not in ("", candidate.id):
        raise InputError(
            f"{folder / FILE}: id",
            entry.id,
            f"does not belong to this content ({candidate.id})",
            "remove the line `id`",
        )
    return candidate


def _write_candidate(folder: Path, candidate: Candidate) -> None:
    folder.mkdir(parents=True)
    lines = [
        f"schema = {SCHEMA}",
        f"id = {_toml(candidate.id)}",
        f"label = {_toml(candidate.label)}",
        f"numerics = {_toml(candidate.numerics.value)}",
    ]
    for title, table in (("settings", candidate.settings), ("parallelism", candidate.parallelism)):
        if table:
            lines += ["", f"[{title}]", *(f"{_toml(name)} = {_toml(value)}" for name, value in sorted(table.items()))]
    for index, use in enumerate(candidate.parts):
        where = f"parts/{index}-{re.sub(r'[^A-Za-z0-9._-]+', '-', use.source.name)[:60]}"
        lines += [
            "",
            "[[parts]]",
            f"name = {_toml(use.source.name)}",
            f"folder = {_toml(where)}",
            f"files = [{', '.join(_toml(path) for path, _ in use.source.files)}]",
            f"sha256 = {_toml(use.source.sha256)}",
            "params = { "
            + ", ".join(f"{_toml(name)} = {_toml(value)}" for name, value in sorted(use.params.items()))
            + " }",
        ]
        for path, text in use.source.files:
            write_file(folder / where / inside(use.source.name, path), text.encode())
    write_file(folder / FILE, ("\n".join(lines) + "\n").encode())


def _parsed(folder: Path) -> _CandidateFile:
    path = folder / FILE
    if not path.is_file():
        raise InputError("candidate", folder, f"has no {FILE}", "give a folder with candidate.toml and its parts")
    try:
        entry = _CandidateFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError("candidate", path, f"is not TOML: {error}", "correct it") from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(item) for item in first["loc"])
        if first["type"] == "extra_forbidden":
            known = _PartEntry if first["loc"][0] == "parts" else _CandidateFile
            names = ", ".join(field.alias or name for name, field in known.model_fields.items())
            raise InputError(f"{path}: key", where, "is not known", f"known: {names}") from None
        raise InputError(f"{path}: {where}", first["input"], f"cannot be used: {first['msg']}", "correct it") from None
    if entry.schema_ != SCHEMA:
        raise InputError(f"{path}: schema", entry.schema_, "is not known", f"this hotpass reads schema {SCHEMA}")
    return entry


def _part_use(folder: Path, entry: _PartEntry) -> PartUse:
    where = f"{folder / FILE}: part {entry.name}"
    places = [entry.folder] if entry.folder else [f"parts/{entry.name}", entry.name, f"{entry.name}.py"]
    root = next((folder / inside(entry.name, place) for place in places if (folder / place).exists()), None)
    if root is None:
        raise InputError(where, places[0], "does not exist", "put the part's sources there, or name their `folder`")
    if entry.files is None:
        read = read_part(root)
        source = PartSource(name=entry.name, files=read.files)
    else:
        source = PartSource(
            name=entry.name, files=tuple((path, _text(root / inside(entry.name, path))) for path in entry.files)
        )
    if entry.sha256 not in ("", source.sha256):
        raise InputError(
            where, entry.sha256, f"is not the hash of its sources ({source.sha256})", "restore or remove sha256"
        )
    return declaration(source).bind(source, {name: _from_toml(value) for name, value in entry.params.items()})


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        raise InputError("candidate: source", path, "is missing or not UTF-8 text", "restore it from a copy") from None


def _toml(value: Value) -> str:
    """TOML has no null, so None is a table that says so. JSON's escapes are TOML's, but for DEL."""
    if value is None:
        return "{ none = true }"
    return json.dumps(value).replace("\x7f", "\\u007f")


def _from_toml(value: Any) -> Value:
    if value == {"none": True}:
        return None
    if isinstance(value, (str, int, float, bool)):
        return value
    raise InputError("candidate: value", value, "is no text, number or boolean", "write a plain value")
