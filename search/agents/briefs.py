"""What each agent looks at: one brief an agent, so that several of them do not all have the same idea."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Brief:
    name: str
    """The agent is `agent:<name>`."""
    text: str
    """What it is told."""


BRIEFS: tuple[Brief, ...] = (
    Brief(name="mlp", text="The MLP: gate, up and down projection and the activation between them. Fuse, reorder, avoid copies."),
    Brief(name="attention", text="Attention: projections, rotary embedding, KV writes, scores and sums over the cache, for these batch sizes."),
    Brief(name="memory", text="Memory traffic: bytes read and written a step. Layouts, packing, streaming each weight once, no temporaries."),
    Brief(name="overhead", text="Launch and call overhead: many small calls a step. Fuse norms, residuals and reshapes; keep buffers; do less in Python."),
    Brief(name="numerics", text="Numerics: what the policy allows and nobody uses. Other orders of summation, wider accumulators, cheaper exact forms."),
    Brief(name="model", text="The whole forward pass (slot `model`): one flat implementation that knows shapes and phases, or a whole layer at once."),
    Brief(name="settings", text="Engine settings together with known parts: what they change for each other, at these shapes and threads."),
    Brief(name="head", text="Ends of the model: embedding, last norm and the output projection, where the vocabulary is large."),
)  # fmt: skip


def brief_of(index: int) -> Brief:
    """Of the agent with that number, from 0; beyond the list they begin again, with a number in the name."""
    brief, again = BRIEFS[index % len(BRIEFS)], index // len(BRIEFS)
    return brief if not again else Brief(name=f"{brief.name}-{again + 1}", text=brief.text)
