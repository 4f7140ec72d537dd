"""Optuna's side of a study: making one, walking a space with a trial, seeds. Only public Optuna, the same on 4.5 and on 5.0."""

from __future__ import annotations

import warnings

import optuna
from optuna.distributions import CategoricalDistribution

from hotpass.canonical import content_hash
from search.space import Choices, Space, Suggest, answers


def fresh_study(name: str, storage: str | None, *, seed: int, startup_trials: int, num_values: int) -> optuna.Study:
    """An empty study of that name with a TPE sampler, all of whose values are maximised.

    One left by an earlier session goes: the ledger is what is rebuilt from, not it.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(
            n_startup_trials=startup_trials, multivariate=True, group=False, constant_liar=True, seed=seed
        )
    if storage is not None and name in optuna.get_all_study_names(storage):
        optuna.delete_study(study_name=name, storage=storage)
    directions = ["maximize"] * num_values
    return optuna.create_study(storage=storage, study_name=name, sampler=sampler, directions=directions)


def sampler_of(trial: optuna.Trial) -> Suggest:
    """Answers of a walk drawn by the trial's sampler."""
    return lambda name, texts: str(trial.suggest_categorical(name, texts))


def asked_of(space: Space, choices: Choices) -> tuple[dict[str, str], dict[str, CategoricalDistribution]]:
    """What a walk with these answers asks of the sampler: answers and distributions, by name."""
    answered: dict[str, str] = {}
    distributions: dict[str, CategoricalDistribution] = {}
    answer = answers(choices)

    def suggest(name: str, texts: tuple[str, ...]) -> str:
        answered[name], distributions[name] = answer(name, texts), CategoricalDistribution(texts)
        return answered[name]

    space.walk(suggest, choices)
    return answered, distributions


def derive_seed(campaign_seed: int, *path: str | int) -> int:
    """A seed of its own for each use, the same for the same path: `derive_seed(7, "agent", 3)`. Below 2³¹."""
    return int(content_hash([campaign_seed, *path])[:15], 16) % (2**31)
