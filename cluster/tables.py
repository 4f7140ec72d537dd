"""A campaign as a table and as a picture, for Python users. pandas and matplotlib are loaded when they are asked for."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from cluster.plan import Plan
from cluster.state import SEARCHING, CampaignState
from hotpass.records.measurement import Purpose, Verdict

if TYPE_CHECKING:
    import matplotlib.figure
    import pandas

COLUMNS = (
    "elapsed_seconds", "candidate", "label", "proposer", "tier", "purpose", "verdict", "speedup_vs_loaded", "low", "high",
    "kind", "speedup_vs_incumbent", "incumbent", "tokens_per_second", "max_abs", "rounds", "seconds", "numerics", "reason",
)  # fmt: skip


def attempts_table(state: CampaignState) -> pandas.DataFrame:
    """One row an attempt, A/A included (purpose `aa`)."""
    import pandas

    rows = []
    for row in state.attempts:
        attempt, info = row.attempt, state.candidates.get(row.attempt.candidate_id)
        loaded, own = row.speedup_vs_loaded, attempt.speedup
        rows.append(
            {
                "elapsed_seconds": row.elapsed_seconds,
                "candidate": attempt.candidate_id,
                "label": state.label_of(attempt.candidate_id),
                "proposer": info.proposer if info else "",
                "tier": attempt.tier.value,
                "purpose": attempt.purpose.value,
                "verdict": attempt.verdict.value,
                "speedup_vs_loaded": loaded.value if loaded else float("nan"),
                "low": loaded.low if loaded else float("nan"),
                "high": loaded.high if loaded else float("nan"),
                "kind": own.kind if own else "",
                "speedup_vs_incumbent": own.value if own else float("nan"),
                "incumbent": attempt.incumbent_id,
                "tokens_per_second": attempt.tokens_per_second if attempt.tokens_per_second else float("nan"),
                "max_abs": attempt.numerics_measured.get("max_abs", float("nan")),
                "rounds": attempt.rounds,
                "seconds": attempt.seconds,
                "numerics": info.numerics if info else "bit-identical",
                "reason": attempt.reason,
            }
        )
    return pandas.DataFrame(rows, columns=list(COLUMNS))


def plot_progress(state: CampaignState, plan: Plan) -> matplotlib.figure.Figure:
    """Every timed attempt over campaign time, and the best so far as a step line. No display is needed."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that a notebook shows by itself, without pyplot and its global state."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    figure = Shown(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    timed = [row for row in state.search_attempts() if row.speedup_vs_loaded and row.attempt.purpose in SEARCHING]
    for verdict, colour in (
        (Verdict.SLOWER, "#b8b8b8"),
        (Verdict.INCONCLUSIVE, "#7aa6c2"),
        (Verdict.FASTER, "#2e7d32"),
    ):
        found = [row for row in timed if row.attempt.verdict is verdict]
        axes.scatter(
            [row.elapsed_seconds for row in found],
            [row.speedup_vs_loaded.value for row in found if row.speedup_vs_loaded],
            s=18, color=colour, label=verdict.value, zorder=3,
        )  # fmt: skip
    times = [0.0, *(step.elapsed_seconds for step in state.incumbents), state.elapsed_seconds]
    values = [1.0, *(step.speedup_vs_loaded.value for step in state.incumbents)]
    axes.step(times, [*values, values[-1]], where="post", color="#2e7d32", linewidth=1.5, label="incumbent")
    best = state.best_so_far()
    if best is not None and best.speedup_vs_loaded is not None and best.attempt.purpose is Purpose.COLD:
        estimate = best.speedup_vs_loaded
        axes.errorbar(
            [best.elapsed_seconds], [estimate.value],
            yerr=[[estimate.value - estimate.low], [estimate.high - estimate.value]],
            fmt="D", color="#b3471d", capsize=3, label="cold", zorder=4,
        )  # fmt: skip
    kind = "simulated" if plan.spec.engine == "fake" else "measured"
    axes.set_xlabel("campaign time, s")
    axes.set_ylabel(f"× as loaded ({kind})")
    axes.set_title(
        f"{plan.deployment.model.name} · {plan.deployment.traffic.name} · {plan.deployment.hardware.name}",
        loc="left",
        fontsize=10,
    )
    axes.axhline(1.0, color="#888", linewidth=0.8, linestyle=":")
    axes.legend(frameon=False, fontsize=8)
    return figure
