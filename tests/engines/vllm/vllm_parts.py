"""Parts for vLLM's tree, written out for tests."""

from __future__ import annotations

from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse


def part(name: str, claims: str, signature: str, body: str, *, prepare: str = "pass", more: str = "") -> Candidate:
    """A part for vLLM's tree: `body` is the text of its forward after `signature`, `more` goes into the decorator."""
    text = (
        "import ctypes, torch\n"
        "from hotpass import part\n\n"
        f"@part(engine='vllm', claims=[{claims!r}], {more})\n"
        "class Part:\n"
        "    def prepare(self, ctx, params):\n"
        "        self.ctx, self.reference = ctx, ctx.reference()\n"
        f"        {prepare}\n"
        f"    def forward(self, {signature}):\n"
        f"        {body}\n"
    )
    source = PartSource(name=name, files=(("part.py", text),))
    return Candidate(parts=(PartUse(source=source),), numerics=Numerics.TOLERANCE)
