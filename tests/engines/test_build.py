"""What a candidate needs is built once, away from this process, and its faults are failures with the reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engines import build, build_native
from engines.build import Compiler, build_candidate, find_compiler
from engines.build_derived import derive_weights, derives_weights
from engines.build_run import BuildLimits, run_limited
from engines.build_worker import Job
from engines.prepare.model import prepare_model
from engines.prepare.store import open_weights
from engines.prepare.tiny import make_tiny_model
from engines.program import CandidateFailed
from hotpass.parts import declaration
from hotpass.records.candidate import Candidate, PartSource, PartUse, Value
from hotpass.records.deployment import ModelRef
from hotpass.records.measurement import Failure, FailureKind

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler on this machine")

ROOT = Path(__file__).parents[2]
ANSWER = '#include "base.h"\nextern "C" int answer() { return HP_BASE + (HP_TWICE ? BASE : 0); }\n'


def native_part(cpp: str = ANSWER, flags: tuple[str, ...] = (), file: str = "lib.cpp") -> PartSource:
    text = (
        "from hotpass import part\n"
        "@part(engine='decoder', claims=['model'], params={'base': [1, 20], 'twice': [False, True]},\n"
        f"      native={{'lib': {file!r}}}, native_flags={flags!r})\n"
        "class Native:\n    def forward(self, batch, kv): ...\n"
    )
    return PartSource(name="native", files=(("part.py", text), (file, cpp), ("base.h", "#define BASE 100\n")))


def built(source: PartSource, cache: Path, compiler: Compiler | None = None, **params: Value) -> dict[str, Path]:
    declared = declaration(source)
    use = declared.bind(source, params)
    return build.build_native(source, declared, use.params, cache_dir=cache, compiler=compiler, deadline_seconds=60)


def failure_of(call: Callable[[], object]) -> Failure:
    with pytest.raises(CandidateFailed) as caught:
        call()
    return caught.value.failure


@needs_compiler
def test_parameters_are_macros_and_each_binding_a_library_of_its_own(tmp_path: Path) -> None:
    plain = built(native_part(), tmp_path)["lib"]
    other = built(native_part(), tmp_path, base=20, twice=True)["lib"]
    assert ctypes.CDLL(str(plain)).answer() == 1
    assert ctypes.CDLL(str(other)).answer() == 120
    made = plain.stat()
    assert built(native_part(), tmp_path)["lib"] == plain
    assert plain.stat().st_ino == made.st_ino
    assert sorted(item.name for item in plain.parent.iterdir()) == ["lib.so", "src"]


@needs_compiler
def test_a_parameter_that_the_cpp_does_not_name_builds_nothing_anew(tmp_path: Path) -> None:
    one = native_part('extern "C" int answer() { return HP_BASE; }')
    assert built(one, tmp_path, twice=True) == built(one, tmp_path, twice=False)
    pasted = native_part('#define J(a) HP_ ## a\nextern "C" int answer() { return J(TWICE); }')
    assert ctypes.CDLL(str(built(pasted, tmp_path, twice=True)["lib"])).answer() == 1


@needs_compiler
def test_flags_of_a_part_do_not_change_the_process_that_loads_it(tmp_path: Path) -> None:
    source = native_part('extern "C" float third(float x) { return x / 3; }', flags=("-ffast-math",))
    library = built(source, tmp_path)["lib"]
    program = (
        "import ctypes, sys, numpy\n"
        "tiny = numpy.float32(1e-38)\n"
        "ctypes.CDLL(sys.argv[1])\n"
        "assert tiny / numpy.float32(4) > 0, 'denormals are flushed'\n"
    )
    subprocess.run([sys.executable, "-c", program, str(library)], check=True)


@needs_compiler
def test_the_compilers_word_is_in_the_failure_and_nothing_is_left(tmp_path: Path) -> None:
    failure = failure_of(lambda: built(native_part("int answer() { return missing; }"), tmp_path))
    assert failure.kind is FailureKind.BUILD
    assert "compiling lib.cpp fails" in failure.message
    assert "missing" in failure.message
    assert "lib.cpp:1" in failure.detail
    assert [item.suffix for item in (tmp_path / "native").iterdir()] == [".lock"]


@needs_compiler
def test_what_cannot_be_loaded_is_found_when_it_is_linked(tmp_path: Path) -> None:
    failure = failure_of(lambda: built(native_part('int f(); extern "C" int answer() { return f(); }'), tmp_path))
    assert "linking lib.cpp fails" in failure.message
    assert "f()" in failure.message


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (native_part(flags=("-fplugin=/tmp/x.so",)), "flag -fplugin=/tmp/x.so is not allowed"),
        (native_part(file="lib.cu"), "lib.cu is not C++"),
        (native_part(file="../lib.cpp"), "lies outside of the part"),
    ],
)
def test_what_a_part_may_not_ask_of_the_compiler(tmp_path: Path, source: PartSource, problem: str) -> None:
    assert problem in failure_of(lambda: built(source, tmp_path, compiler=fake_compiler(tmp_path, "exit 1"))).message


def test_a_machine_without_a_compiler_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_native, "find_compiler", lambda: None)
    failure = failure_of(lambda: built(native_part(), tmp_path))
    assert failure.kind is FailureKind.BUILD
    assert failure.message.endswith("this machine has no C++ compiler; install g++ or clang++")


def test_a_compiler_that_does_not_work_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_compiler(tmp_path, "exit 1").path
    monkeypatch.setenv("HOTPASS_CXX", broken)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    find_compiler.cache_clear()
    try:
        assert find_compiler() is None
    finally:
        find_compiler.cache_clear()


def fake_compiler(folder: Path, script: str) -> Compiler:
    path = folder / "fake-cxx"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return Compiler(path=str(path), version="fake 1", openmp=False, isa="none")


def test_a_compiler_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    hanging = fake_compiler(tmp_path, f"tail -f /dev/null & echo $! $$ > {pids}; wait")
    source = native_part()
    failure = failure_of(
        lambda: build.build_native(
            source,
            declaration(source),
            {"base": 1, "twice": False},
            cache_dir=tmp_path,
            compiler=hanging,
            deadline_seconds=0.5,
        )
    )
    assert failure.kind is FailureKind.TIMEOUT
    for pid in pids.read_text().split():
        assert not running(int(pid))
    assert [item.suffix for item in (tmp_path / "native").iterdir()] == [".lock"]


KILLED_BUILDER = """
import sys
from tests.engines.test_build import Compiler, Path, built, native_part
compiler = Compiler(path=sys.argv[2], version="fake 1", openmp=False, isa="none")
built(native_part(), Path(sys.argv[1]), compiler, base=1, twice=False)
"""


@needs_compiler
def test_a_builder_that_is_killed_blocks_nobody_and_takes_its_compiler_along(tmp_path: Path) -> None:
    """SIGKILL in the middle of a compilation: no lock, no folder, no compiler beside the next window."""
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    hanging = fake_compiler(tmp_path, f"tail -f /dev/null & echo $! $$ > {pids}; wait")
    builder = subprocess.Popen([sys.executable, "-c", KILLED_BUILDER, str(tmp_path), hanging.path], cwd=ROOT)
    compiling = pids.read_text().split()  # opens when the compiler writes
    builder.kill()
    builder.wait()
    for pid in compiling:
        with contextlib.suppress(ProcessLookupError):  # ended already
            descriptor = os.pidfd_open(int(pid))
            assert select.select([descriptor], [], [], 30.0)[0], "the compiler outlived its builder"
            os.close(descriptor)
    real = find_compiler()
    assert real is not None
    same_place = replace(real, version=hanging.version, isa=hanging.isa)
    made = built(native_part(), tmp_path, same_place, base=1, twice=False)
    assert ctypes.CDLL(str(made["lib"])).answer() == 1


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_step_that_writes_without_end_is_stopped(tmp_path: Path) -> None:
    limits = BuildLimits(memory_bytes=1 << 30, file_bytes=1 << 20)
    done = run_limited(
        ["/bin/sh", "-c", "cat /dev/zero > big"],
        folder=tmp_path,
        environment={"PATH": os.environ["PATH"]},
        deadline_seconds=60,
        limits=limits,
    )
    assert done.returncode != 0
    assert (tmp_path / "big").stat().st_size <= 1 << 20


def weights_part(body: str, claims: str = "['model.layers.*.mlp']") -> PartUse:
    text = (
        "import os\nimport torch\nfrom hotpass import part\n"
        f"@part(engine='decoder', claims={claims}, params={{'scale': [2, 3]}})\n"
        "class Derived:\n"
        "    def weights(self, w, params):\n"
        f"        {body}\n"
        "    def forward(self, *args): ...\n"
    )
    source = PartSource(name="derived", files=(("part.py", text),))
    return declaration(source).bind(source)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    folder = tmp_path_factory.mktemp("model")
    return prepare_model(str(make_tiny_model(folder / "tiny", layers=3)), cache_dir=folder / "cache")


FUSED = "return {'both': torch.cat([w['gate_proj.weight'], w['up_proj.weight']]) * params['scale']}"


def test_each_slot_of_each_cut_gets_what_weights_makes_of_its_own(tmp_path: Path, model: ModelRef) -> None:
    candidate = Candidate(parts=(weights_part(FUSED),))
    cuts = [(2,), (0, 2)]
    made = build_candidate(candidate, model, build.module_names(model), cuts, cache_dir=tmp_path)
    assert made.candidate_id == candidate.id
    (part,) = made.parts
    assert part.native == {}
    shallow, deep = part.derived
    assert set(shallow) == {"model.layers.0.mlp"}
    assert set(deep) == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert shallow["model.layers.0.mlp"] == deep["model.layers.1.mlp"]  # both are layer 2: made once
    weights = open_weights(model)
    for slot, layer in (("model.layers.0.mlp", 0), ("model.layers.1.mlp", 2)):
        own = weights.restricted(f"model.layers.{layer}.mlp")
        expected = torch.cat([own["gate_proj.weight"], own["up_proj.weight"]]) * 2
        assert torch.equal(load_file(deep[slot])["both"], expected)
    # Everything is there: no process is started, which a deadline of nothing would end.
    assert (
        build_candidate(candidate, model, build.module_names(model), cuts, cache_dir=tmp_path, deadline_seconds=0).parts
        == made.parts
    )
    other = Candidate(parts=(PartUse(source=candidate.parts[0].source, params={"scale": 3}),))
    failure = failure_of(
        lambda: build_candidate(other, model, build.module_names(model), cuts, cache_dir=tmp_path, deadline_seconds=0)
    )
    assert failure.kind is FailureKind.TIMEOUT


def test_the_whole_model_slot_sees_each_cut_as_a_model(tmp_path: Path, model: ModelRef) -> None:
    body = "return {n.replace('.', '_'): t for n, t in w.items() if 'q_proj' in n or n == 'lm_head.weight'}"
    builder = build.CandidateBuilder(model, [(1, 2), (0, 1, 2)], cache_dir=tmp_path)
    (part,) = builder(Candidate(parts=(weights_part(body, "['model']"),)), 60.0)
    first, second = (load_file(cut["model"]) for cut in part.derived)
    weights = open_weights(model)
    assert set(first) == {"lm_head_weight", *(f"model_layers_{i}_self_attn_q_proj_weight" for i in range(2))}
    assert torch.equal(
        first["model_layers_0_self_attn_q_proj_weight"], weights["model.layers.1.self_attn.q_proj.weight"]
    )
    assert torch.equal(first["lm_head_weight"], weights["model.embed_tokens.weight"])
    assert len(second) == 4


def test_slots_outside_the_layers_are_shared_by_all_cuts(tmp_path: Path, model: ModelRef) -> None:
    use = weights_part("return {'half': w['weight'] / 2}", "['lm_head']")
    (part,) = build.CandidateBuilder(model, [(0,), (1, 2)], cache_dir=tmp_path)(Candidate(parts=(use,)), 60.0)
    assert part.derived[0] == part.derived[1]
    assert list(part.derived[0]) == ["lm_head"]


def derive(tmp_path: Path, model: ModelRef, body: str, deadline_seconds: float = 60.0) -> Failure:
    use = weights_part(body)
    jobs = [Job(slot="model.layers.0.mlp", layers=None)]
    failure = failure_of(
        lambda: derive_weights(use, model, jobs, cache_dir=tmp_path, deadline_seconds=deadline_seconds)
    )
    assert not list((tmp_path / "derived").glob("*.safetensors"))
    assert not list((tmp_path / "derived").glob(".making-*"))
    return failure


@pytest.mark.parametrize(
    ("body", "kind", "problem"),
    [
        ("return {'x': w['down_proj']}", FailureKind.BUILD, "KeyError: 'down_proj'"),
        ("return {'x': 3}", FailureKind.BUILD, "must return a mapping of names to tensors"),
        ("return {'x': w['up_proj.weight'].to_sparse()}", FailureKind.BUILD, "not a plain tensor"),
        ("w['up_proj.weight'].mul_(2); return {}", FailureKind.BUILD, "writes into up_proj.weight"),
        ("os._exit(3)", FailureKind.BUILD, r"ended its process (exit 3)"),
        ("os.kill(os.getpid(), 11)", FailureKind.BUILD, r"ended its process (signal 11)"),
        ("return {'x': torch.empty(1 << 45)}", FailureKind.MEMORY, "derived"),
    ],
)
def test_faults_of_weights_are_failures(
    tmp_path: Path, model: ModelRef, body: str, kind: FailureKind, problem: str
) -> None:
    failure = derive(tmp_path, model, body)
    assert failure.kind is kind
    assert problem in failure.message


def test_weights_that_never_end_meet_the_deadline(tmp_path: Path, model: ModelRef) -> None:
    failure = derive(tmp_path, model, "import threading; threading.Event().wait()", deadline_seconds=1.0)
    assert failure.kind is FailureKind.TIMEOUT


def test_a_workers_environment_holds_no_secret(
    tmp_path: Path, model: ModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVIDER_API_KEY", "secret")
    failure = derive(tmp_path, model, "raise ValueError(' '.join(sorted(os.environ)))")
    assert "OMP_NUM_THREADS" in failure.message
    assert "PROVIDER_API_KEY" not in failure.message


def test_derived_weights_used_longest_ago_make_room(
    tmp_path: Path, model: ModelRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    use = weights_part(FUSED)
    jobs = [Job(slot=f"model.layers.{layer}.mlp", layers=None) for layer in range(3)]
    first = derive_weights(use, model, jobs, cache_dir=tmp_path)
    size = first[jobs[0]].stat().st_size
    monkeypatch.setenv("HOTPASS_DERIVED_BYTES", str(2 * size))
    for age, job in enumerate((jobs[1], jobs[2], jobs[0])):  # layer 1 was used longest ago
        os.utime(first[job], ns=(age, age))
    derive_weights(use, model, jobs[:1], cache_dir=tmp_path)
    assert [first[job].exists() for job in jobs] == [True, False, True]


def test_weights_are_looked_for_in_the_text() -> None:
    assert derives_weights(weights_part(FUSED).source)
    assert not derives_weights(native_part())
