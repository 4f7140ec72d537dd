"""What the kinds of operators really take on a campaign's machine, from its measured forward passes: `hotpass plan --validate FOLDER`.

    passes of the log ──► medians by shape and by what ran ──► costmodel.steps ──► factors by kind, engine and part

Rows are of one environment, the one with the most passes. A group is what ran: `as loaded`, or the names of a candidate's parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hotpass.errors import InputError
from hotpass.records.candidate import AS_LOADED, Candidate

if TYPE_CHECKING:
    import pandas as pd

    from costmodel.graph import ModelGraph
    from costmodel.operators.own import OwnTables
    from costmodel.steps import StepFit

LEAST_PASSES = 8
"""Of a shape and group, for its median to be learned from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """One fit, and what it was made of."""

    fit: StepFit
    zero_shot_error: float
    """Median absolute relative error of the kernels alone, before anything was learned."""
    groups: tuple[str, ...]
    num_passes: int


def learn_campaign(folder: Path, kernels: Path) -> Learned:
    """Raises InputError for what is no campaign, has no passes, or ran another machine's kernels."""
    from cluster.folder import all_candidates
    from cluster.passes import read_passes
    from cluster.plan import read_plan
    from costmodel.configs import load_graph
    from costmodel.operators.own import OwnTables
    from costmodel.plans import with_formats

    model = read_plan(folder).deployment.model
    if not model.folder:
        raise InputError(
            "--validate", folder, "ran a simulated model, which has no operators", "use a real engine's campaign"
        )
    narrow = model.dtype in ("bfloat16", "float16")
    graph = with_formats(load_graph(str(model.folder)), None if narrow else "fp32")
    known = {AS_LOADED.id: AS_LOADED, **all_candidates(folder)}
    return learn_passes(read_passes(folder), known, graph, OwnTables.read(kernels), kv_bytes=2.0 if narrow else 4.0)


def learn_passes(
    passes: pd.DataFrame, known: Mapping[str, Candidate], graph: ModelGraph, source: OwnTables, *, kv_bytes: float
) -> Learned:
    """From a table of `cluster.passes`. Raises InputError when nothing in it can be learned from."""
    import numpy as np

    from costmodel.steps import SHAPE, fit_steps, parts_of_steps, uncorrected

    ran = passes["candidate"].where(passes["side"] == "candidate", passes["incumbent"])
    labelled = passes.assign(group=[_group(known.get(key)) for key in ran])
    usable = labelled[
        (labelled["group"] != "") & labelled["phase"].isin(["decode", "prefill"]) & (labelled["kind"] == "measured")
    ]
    if not len(usable):
        raise InputError("measured passes", 0, "are too few to learn from", "run a campaign on a real engine")
    usable = usable[usable["environment"] == usable["environment"].mode()[0]]
    table = (
        usable.groupby([*SHAPE, "group", "environment"], sort=True)["ms_per_step"].agg(["median", "size"]).reset_index()
    )
    table = table[table["size"] >= LEAST_PASSES].rename(columns={"median": "ms"}).reset_index(drop=True)
    parts = parts_of_steps(graph, source, table, kv_bytes=kv_bytes, host_seconds=source.host_seconds)
    return Learned(
        fit=fit_steps(parts, table), zero_shot_error=float(np.median(np.abs(uncorrected(parts) / table["ms"] - 1))),
        groups=tuple(sorted(table["group"].unique())), num_passes=int(table["size"].sum()),
    )  # fmt: skip


def _group(candidate: Candidate | None) -> str:
    """Of parts alone: settings change how often an operator runs on how many threads, which is no kernel of its own. Empty: unknown."""
    if candidate is None or candidate.settings:
        return ""
    return " + ".join(use.source.name for use in candidate.parts) or "as loaded"
