"""A small module given as a file, the deployment that serves it, and a loaded engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.module.prepare import module_facts, prepare_module
from engines.module_engine import ModuleEngine, module_shapes
from hotpass.records.candidate import Candidate, Numerics, PartSource, PartUse
from hotpass.records.deployment import Deployment, HardwareRef, ModelRef, Serving, TrafficRef
from hotpass.records.measurement import Tier

RECIPE = '''
import torch

from engines.module.recipe import Example


class Block(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.up = torch.nn.Linear(size, 2 * size)
        self.down = torch.nn.Linear(2 * size, size)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(torch.nn.Module):
    """Logits and the best token of each position."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 32)
        self.blocks = torch.nn.ModuleList(Block(32) for _ in range(3))
        self.head = torch.nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, ids, mask, *, gain=1.0):
        x = self.embed(ids) * self.scale * mask[..., None] * gain
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return {"logits": logits, "best": logits.argmax(-1)}


def load():
    return Net(), {
        "one": {"ids": torch.randint(0, 50, (1, 7)), "mask": torch.ones(1, 7)},
        "many": Example({"ids": torch.randint(0, 50, (4, 9)), "mask": torch.ones(4, 9), "gain": 2.0}, share=3.0),
    }
'''


def part(
    body: str, *, claims: str = '["model"]', replaces: str = "", setup: str = "self.reference = ctx.reference()"
) -> PartSource:
    """`body` is the text of its forward."""
    lines = "\n".join(f"        {line}" for line in body.splitlines())
    text = (
        "import ctypes, torch\n"
        "from hotpass import part\n"
        f"@part(engine='module', claims={claims}, replaces='{replaces}', numerics='bit-identical')\n"
        "class Planted:\n"
        f"    def prepare(self, ctx, params):\n        {setup}\n"
        f"    def forward(self, *args, **kwargs):\n{lines}\n"
    )
    return PartSource(name="planted", files=(("part.py", text),))


def candidate(source: PartSource, numerics: Numerics = Numerics.BIT_IDENTICAL) -> Candidate:
    return Candidate(parts=(PartUse(source=source),), numerics=numerics)


def deployment_of(model: ModelRef) -> Deployment:
    return Deployment(
        model=model,
        traffic=TrafficRef(
            name="examples", source_format="examples", content_hash="0", num_requests=1, dropped={}, content_valid=True
        ),
        hardware=HardwareRef(
            name="cpu", device="cpu", num_devices=1, isa=(), last_level_cache_bytes=1 << 25, memory_bytes=1 << 33
        ),
        serving=Serving(engine="module"),
        concurrency=1,
        shapes=module_shapes(module_facts(model).examples),
    )


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("modules")


@pytest.fixture(scope="session")
def recipe_file(cache: Path) -> Path:
    path = cache / "net.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="session")
def net(cache: Path, recipe_file: Path) -> ModelRef:
    return prepare_module(str(recipe_file), cache_dir=cache)


@pytest.fixture(scope="session")
def served(net: ModelRef) -> Deployment:
    return deployment_of(net)


@pytest.fixture(scope="session")
def module_engine(served: Deployment, cache: Path) -> Iterator[ModuleEngine]:
    with ModuleEngine("net", threads=1, window_ms=2.0, aa_seconds=0.1, cache_dir=str(cache)) as engine:
        engine.load(served, Tier.FAST)
        yield engine
