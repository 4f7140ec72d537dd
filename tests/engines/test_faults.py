"""Whatever happens inside a candidate becomes a record, and the engine serves the next one with the weights it had."""

from __future__ import annotations

import os
import signal

import pytest

from engines.decoder_engine import DecoderEngine
from engines.limits import ChildLimits
from engines.program import CandidateFailed
from hotpass.records.deployment import Deployment
from hotpass.records.measurement import FailureKind, Side, Tier
from tests.engines.conftest import MEMORY_LIMIT, assignment, candidate, toy_engine

HONEST = candidate("return reference(tokens, summaries)")


def served_again(engine: DecoderEngine, deployment: Deployment, keeper: int) -> None:
    """The next candidate is measured by the same engine, and the keeper is the same process."""
    result = engine.measure(assignment(deployment, HONEST))
    assert result.failure is None
    assert result.clean is not None
    assert result.clean.clean
    assert result.activation["model"] > 0
    assert engine._loaded.keeper.pid == keeper
    assert result.epoch == engine._loaded.weights.sha256


DEADLY = {
    "segfault": ("ctypes.string_at(0)", FailureKind.CRASH, "SIGSEGV"),
    "exit": ("os._exit(3)", FailureKind.CRASH, "exited with status 3"),
    "abort": ("os.abort()", FailureKind.CRASH, "SIGABRT"),
    "kills its group": ("os.killpg(0, 9)", FailureKind.CRASH, "SIGKILL"),
    "writes shared weights": ("program.embedding.mul_(1)", FailureKind.CRASH, "SIGSEGV"),
}


@pytest.mark.parametrize("fault", DEADLY)
def test_a_death_is_a_crash_with_its_signal(fault: str, toy: DecoderEngine, deployment: Deployment) -> None:
    body, kind, message = DEADLY[fault]
    keeper = toy._loaded.keeper.pid
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.failure is not None
    assert result.failure.kind is kind
    assert message in result.failure.message
    assert result.clean is not None
    assert result.clean.child_replaced
    served_again(toy, deployment, keeper)


RAISED = {
    "exception": ("raise ValueError('planted')", FailureKind.EXCEPTION, "ValueError: planted"),
    "sys.exit": ("sys.exit(0)", FailureKind.EXCEPTION, "SystemExit: 0"),
    "keyboard interrupt": ("raise KeyboardInterrupt", FailureKind.EXCEPTION, "KeyboardInterrupt"),
    "cannot be printed": (
        "class Bad(Exception):\n    def __str__(self): raise self\nraise Bad()",
        FailureKind.EXCEPTION,
        "Bad that cannot be printed",
    ),
    "recursion": ("return self.forward(tokens, summaries, reference)", FailureKind.EXCEPTION, "RecursionError"),
    "wrong shape": ("return reference(tokens, summaries)[:, :-1]", FailureKind.EXCEPTION, "RuntimeError"),
    "memory": (f"return torch.zeros({2 * MEMORY_LIMIT})", FailureKind.MEMORY, "allocate memory"),
    "open files": ("self.f = [open('/dev/null') for _ in range(5000)]", FailureKind.EXCEPTION, "Too many open files"),
    "full file": (
        "f = open('big', 'wb')\nfor _ in range(400): f.write(bytes(1 << 20))",
        FailureKind.EXCEPTION,
        "File too large",
    ),
}


@pytest.mark.parametrize("fault", RAISED)
def test_what_is_raised_is_the_candidates_failure(fault: str, toy: DecoderEngine, deployment: Deployment) -> None:
    body, kind, message = RAISED[fault]
    keeper = toy._loaded.keeper.pid
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.failure is not None
    assert (result.failure.kind, message in result.failure.message) == (kind, True), result.failure
    served_again(toy, deployment, keeper)


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\nwhile True: time.sleep(60)",
        "ctypes.PyDLL(None).usleep(1000000000)",
        "os.kill(os.getpid(), 19)",
    ],
    ids=["loop", "signals blocked", "holds the interpreter's lock", "stopped"],
)
def test_a_hang_ends_at_the_deadline(body: str, toy: DecoderEngine, deployment: Deployment) -> None:
    keeper = toy._loaded.keeper.pid
    result = toy.measure(assignment(deployment, candidate(body), deadline_seconds=0.5))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.TIMEOUT
    served_again(toy, deployment, keeper)


def test_floods_of_output_are_cut_and_the_end_of_the_first_part_kept(
    toy: DecoderEngine, deployment: Deployment
) -> None:
    body = "for _ in range(300): print('y' * 10000)\nos.system('head -c 3000000 /dev/zero; true')\nos._exit(1)"
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.CRASH
    assert set(result.failure.detail) <= {"y", "\n"}
    assert 0 < len(result.failure.detail) <= 2000


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("os.write({fd}, b'garbage' * 100)\nreturn reference(tokens, summaries)", "not a message"),
        ("os.close({fd})\nreturn reference(tokens, summaries)", ""),
    ],
    ids=["noise", "closed"],
)
def test_a_forged_reply_is_a_broken_protocol(
    body: str, problem: str, toy: DecoderEngine, deployment: Deployment
) -> None:
    find = "[f for f in map(int, os.listdir('/proc/self/fd')) if os.path.exists(f'/proc/self/fd/{f}') and os.readlink(f'/proc/self/fd/{f}').startswith('socket')][0]"
    keeper = toy._loaded.keeper.pid
    result = toy.measure(assignment(deployment, candidate(f"fd = {find}\n" + body.replace("{fd}", "fd"))))
    assert result.failure is not None
    assert result.failure.kind in ((FailureKind.PROTOCOL,) if problem else (FailureKind.PROTOCOL, FailureKind.CRASH))
    assert problem in result.failure.message
    served_again(toy, deployment, keeper)


def test_processes_that_leave_the_group_are_ended(toy: DecoderEngine, deployment: Deployment) -> None:
    body = (
        "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        print(os.getpid())\n        open('done', 'w').close()\n        time.sleep(600)\n    os._exit(0)\n"
        "while not os.path.exists('done'): time.sleep(0.01)\nos._exit(1)"
    )
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.failure is not None
    assert "status 1" in result.failure.message
    with pytest.raises(ProcessLookupError):
        os.kill(int(result.failure.detail), 0)


def test_residue_replaces_the_child(toy: DecoderEngine, deployment: Deployment) -> None:
    setup = "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    before = toy._loaded.pair().child.pid
    result = toy.measure(assignment(deployment, candidate("return reference(tokens, summaries)", setup=setup)))
    assert result.failure is None
    assert result.clean is not None
    assert result.clean.reasons == ("threads 1 -> 2",)
    assert toy._loaded.pair().child.pid != before


def test_a_flag_left_behind_is_named(toy: DecoderEngine, deployment: Deployment) -> None:
    body = "torch.set_num_threads(2)\nreturn reference(tokens, summaries)"
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.clean is not None
    assert any("intra_op 1 -> 2" in reason for reason in result.clean.reasons)
    served_again(toy, deployment, toy._loaded.keeper.pid)


def test_weights_that_were_mapped_over_are_noticed(toy: DecoderEngine, deployment: Deployment) -> None:
    body = (
        "libc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\n"
        "start = program.embedding.data_ptr() // 4096 * 4096\nold = program.embedding.clone()\n"
        "size = old.numel() * 4 + 4096\n"
        "libc.mmap(ctypes.c_void_p(start), ctypes.c_size_t(size), 3, 0x32, -1, ctypes.c_long(0))\n"
        "program.embedding.copy_(old)\nreturn reference(tokens, summaries)"
    )
    result = toy.measure(assignment(deployment, candidate(body)))
    assert result.weights_unchanged is False
    assert result.clean is not None
    assert "the weights' mapping changed" in result.clean.reasons
    assert toy.verify_weights()


KILLS_THE_ZYGOTE = candidate("os.kill(os.getppid(), 9)\ntime.sleep(60)")


def test_killing_the_zygote_costs_a_zygote_and_not_the_weights(deployment: Deployment) -> None:
    with toy_engine(limits=ChildLimits(confined=False)) as engine:
        engine.load(deployment, Tier.FAST)
        keeper, zygote = engine._loaded.keeper.pid, engine._loaded.zygote.pid
        result = engine.measure(assignment(deployment, KILLS_THE_ZYGOTE))
        assert result.failure is not None
        assert result.failure.kind is FailureKind.CRASH
        assert engine._loaded.zygote.pid != zygote
        assert list(engine._loaded._folder.path.iterdir()) == []
        served_again(engine, deployment, keeper)


CONFINED = {
    "signals": (KILLS_THE_ZYGOTE, "PermissionError"),
    "files": (candidate(f"open({__file__!r}, 'ab')"), "PermissionError"),
    "removal": (candidate(f"os.rename({__file__!r}, 'mine')"), "Error"),
    "creation": (candidate("open('/tmp/hotpass-planted', 'x')"), "PermissionError"),
    "memory": (candidate("open(f'/proc/{os.getppid()}/mem', 'rb')"), "PermissionError"),
}


@pytest.mark.parametrize("reach", CONFINED)
def test_what_is_not_the_childs_is_out_of_its_reach(reach: str, toy: DecoderEngine, deployment: Deployment) -> None:
    if toy.facts["unconfined"] != "nothing":
        pytest.skip(f"this kernel does not confine {toy.facts['unconfined']}")
    part, message = CONFINED[reach]
    zygote = toy._loaded.zygote.pid
    result = toy.measure(assignment(deployment, part))
    assert result.failure is not None
    assert result.failure.kind is FailureKind.EXCEPTION
    assert message in result.failure.message
    assert toy._loaded.zygote.pid == zygote


def test_a_child_may_write_in_its_folder_and_to_devices(toy: DecoderEngine, deployment: Deployment) -> None:
    body = (
        "os.makedirs('a/b', exist_ok=True)\nopen('a/b/c', 'w').write('x')\nos.replace('a/b/c', 'a/c')\n"
        "open('/dev/null', 'w').write('x')\nopen('/proc/self/comm', 'w').write('part')\n"
        "return reference(tokens, summaries)"
    )
    assert toy.measure(assignment(deployment, candidate(body))).failure is None


def test_an_install_that_fails_raises_and_leaves_the_engine_usable(toy: DecoderEngine, deployment: Deployment) -> None:
    with pytest.raises(CandidateFailed, match="NameError"):
        toy.install(Side.CANDIDATE, candidate("return 0", setup="undefined"))
    served_again(toy, deployment, toy._loaded.keeper.pid)


def test_a_child_has_no_network_no_home_and_a_short_environment(toy: DecoderEngine, deployment: Deployment) -> None:
    body = (
        "import socket\nfound = [os.environ['HOME'] == os.getcwd(), os.listdir('.') == [], 'SECRET_TOKEN' in os.environ,"
        " len(socket.if_nameindex()), os.getpgid(0) == os.getpid()]\nraise ValueError(found)"
    )
    os.environ["SECRET_TOKEN"] = "x"
    try:
        result = toy.measure(assignment(deployment, candidate(body)))
    finally:
        del os.environ["SECRET_TOKEN"]
    assert result.failure is not None
    if toy.facts["network"] == "none":
        assert "[True, True, False, 1, True]" in result.failure.message  # the one interface is lo, and it is down
    assert signal.Signals.SIGKILL not in signal.sigpending()
