"""What parts to start from have in common, whichever engine's slot they are for: the frame, own weights, and the call of the reference.

What a kind of slot computes is the engine's to write out. Nothing of a part runs here.
"""

from __future__ import annotations

from collections.abc import Sequence

from engines.prepare.store import layer_of, with_layer

_FRAME = '''"""{slot}{of}: what {who} computes there, as a part. Change how; keep what is returned."""

import torch
import torch.nn.functional as F

from hotpass import part


@part(
    engine="{engine}",
    claims=["{claim}"],{replaces}{keeps}
    domain="True",
    numerics="tolerance",{reload}
)
class Start:
    """Say here why this should be faster than {whose}, and on which shapes it will not be."""
'''

OWN_WEIGHTS = """
    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w = ctx.weights
"""

OWN_NORM = """
    def weights(self, w, params):
        return dict(w)

    def prepare(self, ctx, params):
        self.w, self.eps = ctx.weights, ctx.config.rms_norm_eps
"""

REFERENCE = """
    def prepare(self, ctx, params):
        self.reference = ctx.reference()

    def forward(self, *args, **kwargs):
        return self.reference(*args, **kwargs)
"""


def starting_part(slot: str, body: str, *, engine: str, stands_for: str, keeps: Sequence[str] = ()) -> str:
    """Text of a part that claims the slot in every layer. `stands_for`: the class it replaces, empty where there is none."""
    layer = layer_of(slot)
    of_vllm = engine == "vllm"
    frame = _FRAME.format(
        slot=slot,
        of=" of vLLM's tree" if of_vllm else "",
        who="vLLM" if of_vllm else "the reference",
        whose="vLLM's own" if of_vllm else "the reference",
        engine=engine,
        claim=slot if layer is None else with_layer(slot, 0).replace(".0", ".*", 1),
        replaces=f'\n    replaces="{stands_for}",' if stands_for else "",
        keeps=f"\n    keeps={list(keeps)},".replace("'", '"') if keeps else "",
        reload='\n    reload="reweight",' if "def weights(" in body else "",
    )
    return frame + body


def with_reference(text: str, source: str, signature: str = "") -> str:
    """A part that calls the reference, with the reference's source below it to replace it with."""
    said = f", forward{signature}" if signature else ""
    lines = "".join(f"# {line}".rstrip() + "\n" for line in source.splitlines())
    return f"{text}\n\n# The reference{said}:\n#\n{lines}"
