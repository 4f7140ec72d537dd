"""Keys of LLM providers: taken out of this process's environment, carried to the proposers that use them, and shown nowhere.

    take_keys(os.environ) ─► {name: Secret} ─► proposer actor ─► give_keys(os.environ)

An environment that holds no key can be inherited, recorded or printed. What is not here: engines' processes, which inherit a list of
harmless variables only (`engines.threading_env`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, MutableMapping

_KEY_NAME = re.compile(r"(_|^)(API_KEY|API_TOKEN|APIKEY|SECRET_KEY|CLIENT_SECRET|AUTH_TOKEN)$")
"""Variables in which LLM providers' keys are kept."""
_SHARED_NAME = re.compile(r"^AWS_(ACCESS_KEY_ID|SECRET_ACCESS_KEY|SESSION_TOKEN|BEARER_TOKEN_BEDROCK)$")
"""Keys that agents may need and this process too (an artefact store of MLflow): copied, not taken."""

OWN_KEY = "HOTPASS_LLM_API_KEY"
"""Key of the server at `--llm-api-base`, when it wants one."""

_HIDDEN = "[key]"
MIN_CHARS = 6
"""A shorter value is no key, and hiding it would spoil ordinary text."""


class Secret:
    """A text that does not show itself: not in repr, not in str, not in a format, not as JSON."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return _HIDDEN

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return _HIDDEN

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return (type(self), (self._value,))


def take_keys(environ: MutableMapping[str, str]) -> dict[str, Secret]:
    """Every provider's key; those that only LLMs need are gone from the environment."""
    shared = {name: Secret(environ[name]) for name in environ if _SHARED_NAME.search(name)}
    names = [name for name in environ if _KEY_NAME.search(name.upper())]
    return shared | {name: Secret(environ.pop(name)) for name in names}


def give_keys(keys: Mapping[str, Secret], environ: MutableMapping[str, str]) -> None:
    """Into the environment of a process that talks to providers, and runs nobody's code."""
    for name, secret in keys.items():
        environ[name] = secret.reveal()


def hidden(text: str, keys: Iterable[Secret]) -> str:
    """The text without any of the keys, should a server have repeated one in its answer."""
    for secret in keys:
        value = secret.reveal()
        if len(value) >= MIN_CHARS:
            text = text.replace(value, _HIDDEN)
    return text
