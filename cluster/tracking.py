"""Where MLflow keeps a campaign: tracking addresses, checked before anything starts. MLflow itself is not imported here."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path

from hotpass.errors import InputError, LedgerError

HEALTH_SECONDS = 10


def resolve_uri(folder: Path, tracking_uri: str) -> tuple[str, str | None]:
    """The tracking URI, absolute; and where artefacts of a new experiment go (None: the server decides). Raises InputError."""
    if not tracking_uri:
        folder.mkdir(parents=True, exist_ok=True)
        return f"sqlite:///{folder / 'mlflow.db'}", (folder / "mlartifacts").as_uri()
    scheme, _, rest = tracking_uri.partition("://")
    if scheme == "sqlite" and rest.startswith("/"):
        path = Path(rest[1:]).absolute()
        return f"sqlite:///{path}", (path.parent / "mlartifacts").as_uri()
    if scheme in ("http", "https"):
        try:
            with urllib.request.urlopen(f"{tracking_uri.rstrip('/')}/health", timeout=HEALTH_SECONDS) as answer:
                answer.read()
        except (OSError, ValueError) as error:
            remedy = "start the server, or leave the option out to use SQLite beside the campaign"
            raise InputError("--tracking-uri", tracking_uri, f"does not answer ({one_line(error)})", remedy) from None
        return tracking_uri.rstrip("/"), None
    if scheme in ("postgresql", "mysql", "mssql", "databricks") or tracking_uri == "databricks":
        return tracking_uri, None
    remedy = "give http://host:port, sqlite:////absolute/path.db, or leave the option out"
    raise InputError("--tracking-uri", tracking_uri, "is not a tracking server or database", remedy)


def made_whole(uri: str, make: Callable[[str], object]) -> None:
    """A SQLite store that is not there yet: made by `make` (uri → its tables) under another name, and only then in its place.

    A disk that fills while MLflow makes its tables would leave some of them, and MLflow never opens such a store again. Another campaign
    may make the same one meanwhile: the first one stays.
    """
    path = Path(uri.removeprefix("sqlite:///"))
    if not uri.startswith("sqlite:///") or path.exists():
        return
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        make(f"sqlite:///{temporary}")
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        for left in temporary.parent.glob(f"{temporary.name}*"):
            left.unlink(missing_ok=True)


def local_folder(artifact_uri: str) -> Path | None:
    """The folder that an artefact address names on this machine; None when a server or another store keeps it."""
    scheme, host, path, *_ = urllib.parse.urlparse(artifact_uri)
    return Path(urllib.request.url2pathname(path)) if scheme in ("file", "") and not host and path else None


def use_write_ahead_log(uri: str) -> None:
    """Readers (a UI) and the one writer of a SQLite store then do not lock each other out. The mode stays with the file."""
    if uri.startswith("sqlite:///"):
        try:
            with contextlib.closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
                database.execute("PRAGMA journal_mode=WAL")
        except sqlite3.Error as error:
            raise LedgerError(f"{uri} cannot be used: {error}") from error


def one_line(error: BaseException) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    return (text[:200] + "…" if len(text) > 200 else text) or type(error).__name__
