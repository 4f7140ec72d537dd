"""Code that inductor makes of a candidate is made ahead, by a process of its own, and is found by the engine's child; only that
candidate's own, and only while every byte is as it was hashed."""

from __future__ import annotations

import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from actors.builder import BuilderServer
from actors.spec import EngineSpec, make_builder
from engines import build_compile, compile_cache
from engines.build import CandidateBuilder, find_compiler
from engines.build_compile import CompileSetup, needs_compiling
from engines.build_compile_worker import Request
from engines.decoder_engine import DecoderEngine
from engines.program import CandidateFailed
from hotpass.canonical import to_plain
from hotpass.records.candidate import Candidate, PartSource, PartUse
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, Side, Tier

ROOT = Path(__file__).resolve().parents[2]

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")

HEAD = "import torch\nfrom hotpass import part\n\n"
KEEPS = """
@part(engine="decoder", claims=["model.layers.*.{child}"])
class Kept:
    def prepare(self, ctx, params):
        self.reference = ctx.reference()
        {prepare}

    def forward(self, *args, **kwargs):
        return self.reference(*args, **kwargs)
"""


def kept(child: str, prepare: str = "pass", head: str = HEAD) -> PartUse:
    """A part that does what stood there before, so that inductor has the less to compile."""
    text = head + KEEPS.format(child=child, prepare=prepare)
    return PartUse(source=PartSource(name=f"kept-{child}".replace("_", "-"), files=(("part.py", text),)))


NORMS = Candidate(parts=(kept("mlp"), kept("self_attn")), settings={"compile_mode": "default"})
"""Two norms of each layer are all that is left to compile: one kernel."""

SPEC = EngineSpec(kind="decoder", name="tiny", threads=1)


@pytest.fixture(scope="module")
def decoding(deployment: Deployment) -> Deployment:
    """Decode alone: one graph."""
    shapes = replace(deployment.shapes, rows=deployment.shapes.rows[:1])
    return replace(deployment, shapes=shapes)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("builds")


@pytest.fixture(scope="module")
def builder(decoding: Deployment, cache: Path) -> CandidateBuilder:
    made = make_builder(replace(SPEC, cache_dir=str(cache)), decoding)
    assert isinstance(made, CandidateBuilder)
    return made


@pytest.fixture(scope="module")
def compiled(builder: CandidateBuilder) -> Path:
    """What a builder made of `NORMS`, once for this module."""
    found = builder.compile_ahead(NORMS, builder.build(NORMS, 60.0).parts, 300.0)
    assert found is not None
    return found


CHILD = """
import json, sys
from pathlib import Path
import torch
from engines.build_compile_worker import Request
from engines.decoder.program import DecoderProgram
from engines.prepare.store import open_weights
from engines.program import Artefacts
from hotpass.decode import from_plain

request = from_plain(Request, json.loads(Path(sys.argv[1]).read_text()))
program = DecoderProgram()
layers = range(request.model.num_layers)
program.load(request.model, open_weights(request.model), [(0, 1), tuple(layers)], "cpu", request.threads, request.plan)
artefacts = Artefacts(native=({}, {}), derived=({}, {}), compiled=sys.argv[2])
has_compiled = []
for side, cut in (("candidate", 0), ("candidate", 1), ("incumbent", 1)):
    report = program.install(side, request.candidate, artefacts, cut)
    has_compiled.append("compile" in report.phases_ms)
from torch._dynamo.utils import counters
print(json.dumps([counters["inductor"], has_compiled]))
"""


def counted_in_a_child(builder: CandidateBuilder, compiled: str, work: Path) -> tuple[dict[str, int], list[bool]]:
    """Inductor's own counters in a fresh process that installs `NORMS` on two depths and both sides, with a KV pool of another size
    than the builder had; and whether each of these installs compiled."""
    setup = builder._setup
    assert setup is not None
    plan = replace(setup.plan, steps_per_window=(9,), serving_context=setup.plan.serving_context + 100)
    request = Request(
        program=setup.program, candidate=NORMS, model=setup.model, cut=(0, 1), plan=plan, device="cpu", threads=1, native=(), derived=(),
    )  # fmt: skip
    (work / "request.json").write_text(json.dumps(to_plain(request)))
    environment = {name: value for name, value in os.environ.items() if name not in compile_cache.CACHE_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(work / "request.json"), compiled],
        env={**environment, "TMPDIR": str(work), "HOTPASS_COMPILE_CACHE": str(work)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    counts, has_compiled = json.loads(done.stdout.splitlines()[-1])
    return counts, has_compiled


@pytest.mark.slow
@needs_compiler
def test_a_child_finds_every_graph_that_the_builder_compiled(
    builder: CandidateBuilder, compiled: Path, tmp_path: Path
) -> None:
    counts, has_compiled = counted_in_a_child(builder, str(compiled), tmp_path)
    assert counts.get("fxgraph_cache_miss", 0) == 0
    assert counts["fxgraph_cache_hit"] >= 3  # each depth and side finds it
    assert has_compiled == [False, False, False]
    assert builder.compiled(NORMS) == compiled  # nothing was written there


@pytest.mark.slow
@needs_compiler
def test_an_engine_takes_what_its_builder_made(decoding: Deployment, builder: CandidateBuilder, compiled: Path) -> None:
    with DecoderEngine("tiny", threads=1, builder=builder, window_ms=1.0, aa_seconds=0.05, pool_sets=1) as engine:
        engine.load(decoding, Tier.FAST)
        report = engine.install(Side.CANDIDATE, NORMS)
        assert "compile" not in report.phases_ms
        assert report.phases_ms["warm-up"] > 0
        engine.restore()
    assert builder.compiled(NORMS) == compiled


@pytest.mark.slow
@needs_compiler
def test_a_changed_file_is_not_given_out(builder: CandidateBuilder, compiled: Path) -> None:
    library = next(path for path in compiled.rglob("*.so"))
    content = library.read_bytes()
    assert library.stat().st_mode & 0o222 == 0
    library.chmod(0o644)
    try:
        library.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert builder.compiled(NORMS) is None
        library.write_bytes(content)
        assert builder.compiled(NORMS) == compiled
        planted = compiled / "torchinductor" / "planted.py"
        planted.write_text("")
        assert builder.compiled(NORMS) is None
        planted.unlink()
    finally:
        library.write_bytes(content)
        library.chmod(0o444)
    assert builder.compiled(NORMS) == compiled


def test_a_killed_compile_leaves_nothing_and_a_stale_lock_holds_nobody(decoding: Deployment, tmp_path: Path) -> None:
    """At once, at its deadline; the next candidate has a folder of its own, and the same one is tried again."""
    builder = make_builder(replace(SPEC, cache_dir=str(tmp_path)), decoding)
    assert isinstance(builder, CandidateBuilder)
    assert builder._setup is not None
    folder = build_compile._folder(NORMS, builder._setup, builder._cuts[builder._shallowest], tmp_path)
    folder.parent.mkdir(parents=True)
    folder.with_name(f".{folder.name}.lock").write_text("of a process that was killed")
    files = builder.build(NORMS, 60.0).parts
    for _ in range(2):
        with pytest.raises(CandidateFailed) as caught:
            builder.compile_ahead(NORMS, files, 0.0)
        assert caught.value.failure.kind is FailureKind.TIMEOUT
        assert [path.name for path in folder.parent.iterdir()] == [f".{folder.name}.lock"]
    assert builder.compiled(NORMS) is None
    other = Candidate(parts=NORMS.parts, settings={"compile_mode": "max-autotune-no-cudagraphs"})
    assert build_compile._folder(other, builder._setup, (0, 1), tmp_path) != folder


HANGING = """#!/bin/sh
case "$*" in *version*) exec c++ "$@" ;; esac
echo $$ $PPID > "$TMPDIR/begun.part" && mv "$TMPDIR/begun.part" "$TMPDIR/begun"
exec sleep 600
"""
"""What inductor takes for the C++ compiler: it says who it is and who called it, where alone it may write."""

COMPILING_BUILDER = """
import pickle, sys
from actors.spec import make_builder
spec, deployment, candidate = pickle.load(sys.stdin.buffer)
builder = make_builder(spec, deployment)
builder.compile_ahead(candidate, builder.build(candidate, 60.0).parts, 600.0)
"""


def hanging(folder: Path) -> Candidate:
    """Whose code inductor compiles with a compiler that never ends."""
    compiler = folder / "never-ends"
    compiler.write_text(HANGING)
    compiler.chmod(0o755)
    prepare = f"import torch._inductor.config; torch._inductor.config.cpp.cxx = ({str(compiler)!r},)"
    return Candidate(parts=(kept("mlp", prepare=prepare), kept("self_attn")), settings={"compile_mode": "default"})


def begun(room: Path) -> list[int]:
    """Descriptors of the compiler that a worker waits for, and of the worker."""
    end = time.monotonic() + 300
    while not (told := list(room.glob(".compiling-*/begun"))):
        assert time.monotonic() < end, "inductor never came to compile"
        time.sleep(0.05)
    return [os.pidfd_open(int(pid)) for pid in told[0].read_text().split()]


def all_ended(pidfds: list[int]) -> bool:
    ended = [bool(select.select([pidfd], [], [], 60.0)[0]) for pidfd in pidfds]
    for pidfd in pidfds:
        os.close(pidfd)
    return all(ended)


@needs_compiler
def test_a_builder_killed_while_inductor_compiles_takes_it_along_and_blocks_nobody(
    decoding: Deployment, tmp_path: Path
) -> None:
    """SIGKILL: no process, no lock, and nothing half-written that anybody would take for the candidate's code."""
    spec, candidate, room = replace(SPEC, cache_dir=str(tmp_path)), hanging(tmp_path), tmp_path / "compiled"
    killed = subprocess.Popen([sys.executable, "-c", COMPILING_BUILDER], stdin=subprocess.PIPE, cwd=ROOT)
    assert killed.stdin is not None
    with killed.stdin as stdin:
        stdin.write(pickle.dumps((spec, decoding, candidate)))
    compiling = begun(room)
    killed.kill()
    killed.wait()
    assert all_ended(compiling), "inductor or its compiler outlived the builder"
    builder = make_builder(spec, decoding)
    assert isinstance(builder, CandidateBuilder)
    assert [path for path in room.iterdir() if path.is_dir()], "the killed one could not tidy up"
    assert builder.compiled(candidate) is None
    with pytest.raises(CandidateFailed) as caught:
        builder.compile_ahead(candidate, builder.build(candidate, 60.0).parts, 0.0)
    assert caught.value.failure.kind is FailureKind.TIMEOUT, "it was its turn at once"
    assert [path for path in room.iterdir() if path.is_dir()] == []
    assert builder.compiled(candidate) is None


@needs_compiler
def test_a_compile_whose_own_process_is_killed_is_the_candidates_failure(decoding: Deployment, tmp_path: Path) -> None:
    builder = make_builder(replace(SPEC, cache_dir=str(tmp_path)), decoding)
    assert isinstance(builder, CandidateBuilder)
    candidate = hanging(tmp_path)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(builder.compile_ahead, candidate, builder.build(candidate, 60.0).parts, 600.0)
        compiler, worker = begun(tmp_path / "compiled")
        signal.pidfd_send_signal(worker, signal.SIGKILL)
        assert all_ended([compiler, worker])
        with pytest.raises(CandidateFailed, match="signal 9"):
            asked.result()
    assert [path for path in (tmp_path / "compiled").iterdir() if path.is_dir()] == []
    assert builder.compiled(candidate) is None


def test_what_a_candidate_does_while_it_is_compiled_is_its_failure_and_stays_in_its_folder(
    decoding: Deployment, tmp_path: Path
) -> None:
    escaped = tmp_path / "escaped"
    use = kept("mlp", prepare=f"open({str(escaped)!r}, 'w').write('x'); raise RuntimeError('written')")
    server = BuilderServer(replace(SPEC, cache_dir=str(tmp_path / "cache")), decoding, 60.0)
    built = server.build(Candidate(parts=(use,), settings={"compile_mode": "default"}))
    assert built.failure is not None
    assert built.failure.kind is FailureKind.INSTALL
    assert built.core_seconds > 0.5  # the worker imported torch
    if "written" in built.failure.message:
        pytest.skip("this kernel confines no files (Landlock)")
    assert "PermissionError" in built.failure.message
    assert not escaped.exists()


def test_a_link_shows_the_builders_file_and_takes_no_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = tmp_path / "made"
    (made / "torchinductor" / "ab").mkdir(parents=True)
    (made / "torchinductor" / "ab" / "kernel.so").write_bytes(b"code")
    (made / "torchinductor" / "ab" / "kernel.so").chmod(0o444)
    (made / "torchinductor" / "unknown.py").write_text("planted")
    (made / compile_cache.MANIFEST).write_text(json.dumps({"files": {"torchinductor/ab/kernel.so": "as hashed"}}))
    first, second = compile_cache.linked(made), compile_cache.linked(made)
    assert first != second
    shown = first / "torchinductor" / "ab" / "kernel.so"
    assert shown.read_bytes() == b"code"
    (first / "torchinductor" / "locks").mkdir()
    replacement = first / "other"
    replacement.write_bytes(b"poison")
    replacement.replace(shown)
    assert (second / "torchinductor" / "ab" / "kernel.so").read_bytes() == b"code"
    assert [path.name for path in (second / "torchinductor").iterdir()] == ["ab"]
    assert (made / "torchinductor" / "ab" / "kernel.so").read_bytes() == b"code"


@pytest.mark.parametrize(
    ("candidate", "device", "needed"),
    [
        (Candidate(), "cpu", False),
        (Candidate(settings={"compile_mode": "none", "threads": 1}), "cpu", False),
        (Candidate(settings={"compile_mode": "default"}), "cpu", True),
        (Candidate(parts=(kept("mlp"),)), "cpu", False),
        (Candidate(parts=(kept("mlp", prepare="self.reference = torch.compile(self.reference)"),)), "cpu", True),
        (Candidate(parts=(kept("mlp", head=f"import triton.language as tl\n{HEAD}"),)), "cpu", False),
        (Candidate(parts=(kept("mlp", head=f"from triton import jit\n{HEAD}"),)), "cuda", True),
    ],
)
def test_who_needs_a_compiler_in_the_child(candidate: Candidate, device: str, needed: bool) -> None:
    assert needs_compiling(candidate, device) is needed


def test_another_thread_count_is_another_code(builder: CandidateBuilder) -> None:
    setup = builder._setup
    assert isinstance(setup, CompileSetup)
    one, two = (build_compile._folder(NORMS, replace(setup, threads=n), (0, 1), "/c") for n in (1, 2))
    assert one != two
