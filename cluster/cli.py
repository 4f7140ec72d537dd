"""The command line: what may be asked, and which module answers. Imports nothing heavy, so that `hotpass --help` is quick.

Results for programs go to stdout, everything for people to stderr. Exit codes: 0 done (`try`: faster), 1 a negative verdict or a
machine that failed, 2 bad input, 3 inconclusive, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import ClassVar, NoReturn

from cluster.commands.hindsight import add_commands, search_options
from hotpass.errors import HotpassError, InputError

EPILOG = """\
  hotpass compile --model smollm2-135m --traffic chat --budget 5m     search, verify, release
  hotpass try my_part.py --model smollm2-135m --traffic chat          one candidate through the same judge
  hotpass init-part model.layers.*.mlp                                a runnable copy of the reference to start from
"""


class _Parser(argparse.ArgumentParser):
    """argparse's own errors become InputErrors: one sentence, exit 2, like every other wrong input."""

    given: ClassVar[Sequence[str]] = ()
    """The arguments of the command line being read."""

    def error(self, message: str) -> NoReturn:
        raise InputError(
            "command line",
            " ".join(self.given) or "(empty)",
            f"is not understood: {message}",
            f"see {self.prog} --help",
        )


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="hotpass",
        description="Keeps LLM inference tuned to one deployment: persistent engines, hot-reloaded forward passes, verified speedups.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _compile(commands)
    _try(commands)
    _verify(commands)
    _profile(commands)
    _plan(commands)
    _look(commands)
    return parser


def _deployment_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("deployment")
    group.add_argument("--model", metavar="M", help="alias, hub id, folder or GGUF file; FILE.py of a module")
    group.add_argument("--traffic", metavar="T", help="preset (chat, code, agentic, long-context) or trace file")
    group.add_argument("--concurrency", type=int, metavar="N", help="clients of the closed loop (default 1)")
    group.add_argument("--requests", type=int, metavar="N", help="requests of the trace to use (default all)")
    group.add_argument(
        "--numerics",
        metavar="CLASS",
        help="widest class allowed: bit-identical, tolerance (default), distribution, lossy",
    )
    group.add_argument(
        "--engine", metavar="E", help="decoder (default), module (any torch module), vllm, or fake: simulated times"
    )
    group.add_argument("--device", metavar="D", help="cpu, cuda or auto (default)")
    group.add_argument(
        "--threads", type=int, metavar="N", help="threads of the deployment as loaded (default: physical cores)"
    )
    group.add_argument("--seed", type=int, metavar="N", help="of proposals, inputs and the order of sides (default 0)")


def _where_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where")
    group.add_argument("--out", metavar="DIR", help="campaign folder (default campaigns/<model>-<traffic>-<time>)")
    group.add_argument("--address", metavar="A", help="Ray address (default: a local Ray that starts by itself)")
    group.add_argument("--no-ray", dest="ray", action="store_const", const=False, help="engines in this process")
    group.add_argument("--tracking-uri", metavar="URI", help="MLflow server (default: SQLite in the campaign folder)")
    group.add_argument("--quiet", "--json", dest="quiet", action="store_true", help="nothing but the JSON line")


def _compile(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "compile", help="search for a faster forward pass within a budget, verify it, release it"
    )
    _deployment_options(parser)
    group = parser.add_argument_group("campaign")
    group.add_argument("--budget", metavar="TIME", help="as 90s, 5m, 1h (default 5m)")
    group.add_argument("--max-attempts", type=int, metavar="N", help="stop searching after N attempts")
    group.add_argument(
        "--no-baselines", dest="baselines", action="store_const", const=False, help="skip transformers' own loop"
    )
    search_options(parser)
    _agent_options(parser)
    group.add_argument(
        "--campaign", metavar="FILE", help="TOML or YAML file with any of these settings; options win over it"
    )
    group.add_argument("--resume", metavar="DIR", help="go on with an interrupted campaign")
    group.add_argument(
        "--continue", dest="continue_from", metavar="DIR", help="start from the winner of a finished campaign"
    )
    _where_options(parser)
    parser.set_defaults(run="cluster.commands.compile:run")


def _agent_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("agents")
    group.add_argument("--agents", type=int, metavar="N", help="LLM agents that invent parts (default 0)")
    group.add_argument(
        "--llm", metavar="MODEL", help="their model, as litellm names it; openai/<name> with --llm-api-base"
    )
    group.add_argument("--llm-api-base", metavar="URL", help="OpenAI-compatible server, as a local vLLM")
    group.add_argument("--llm-max-tokens", type=int, metavar="N", help="tokens that all agents together may use")
    group.add_argument("--llm-max-usd", type=float, metavar="X", help="money that they may spend, in USD")
    group.add_argument("--llm-context", type=int, metavar="N", help="window of the model (default: as litellm knows)")
    group.add_argument("--llm-tools", metavar="HOW", help="native, text or auto (default): how it calls tools")
    group.add_argument("--llm-turn", metavar="TIME", help="deadline of one proposal over all retries (default 5m)")


def _plan(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "plan", help="rank ways to serve a model on some hardware, predicted before anything runs"
    )
    parser.add_argument("--model", metavar="M", help="config.json, model folder or hub id")
    parser.add_argument(
        "--hardware", default="auto", metavar="H", help="as h200x8, 4*h100x8, gb200-nvl72, a YAML file, cpu or auto"
    )
    parser.add_argument("--gpus", type=int, metavar="N", help="how many of them (default: one scale-up domain)")
    parser.add_argument(
        "--traffic", default="1024x1024", metavar="T", help="preset, trace file, or lengths (default 1024x1024)"
    )
    parser.add_argument("--concurrency", type=int, metavar="N", help="clients in all (default: what suits each plan)")
    parser.add_argument("--slo-ttft-ms", type=float, metavar="MS", help="longest time to first token")
    parser.add_argument("--slo-tpot-ms", type=float, metavar="MS", help="longest time per output token")
    parser.add_argument("--objective", default="throughput", metavar="O", help="throughput, latency or goodput")
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="P", help="then costs are shown too")
    parser.add_argument("--backend", default="vllm", metavar="B", help="whose kernels: vllm, sglang or trtllm")
    parser.add_argument(
        "--precision", metavar="F", help="weights: bf16, fp8, fp8_block, nvfp4, int4 (default: shipped)"
    )
    parser.add_argument("--kv-dtype", default="bf16", metavar="D", help="fp32, bf16 (default) or fp8")
    parser.add_argument(
        "--kernels", metavar="FILE", help="kernels timed by `hotpass microbench`; its machine is the hardware"
    )
    parser.add_argument("--no-disaggregated", action="store_true", help="prefill and decode together only")
    parser.add_argument("--no-simulate", action="store_true", help="skip the discrete simulation of the best plans")
    parser.add_argument("--explain", metavar="PLAN", help="a plan's rank or name: its step as a sum of operators")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="plans shown (default 10)")
    parser.add_argument("--plot", metavar="FILE", help="the Pareto frontier (.png or .html)")
    parser.add_argument(
        "--validate",
        metavar="FILE",
        help="score the model on measured rows (CSV, Parquet), or learn from a campaign's folder",
    )
    parser.add_argument("--save-calibration", metavar="FILE", help="with --validate: fit corrections to those rows")
    parser.add_argument("--calibration", metavar="FILE", help="apply corrections that were fitted")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run="cluster.commands.plan:run")
    timing = commands.add_parser(
        "microbench", help="time this CPU's kernels for `hotpass plan --kernels`; run it on an idle machine"
    )
    timing.add_argument("--out", default="kernels.parquet", metavar="FILE", help="default kernels.parquet")
    timing.add_argument("--threads", type=int, metavar="N", help="default: physical cores")
    timing.add_argument("--seconds", type=float, default=120.0, metavar="S", help="about how long (default 120)")
    timing.set_defaults(run="cluster.commands.plan:microbench")


def _try(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "try", help="one part, candidate or setting through the search's own judge, gates and ledger"
    )
    parser.add_argument(
        "path", nargs="?", metavar="PATH", help="part (.py file, folder, or a built-in one's name) or candidate folder"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="K=V", dest="settings", help="engine setting; repeatable"
    )
    parser.add_argument(
        "--param", action="append", default=[], metavar="K=V", dest="params", help="parameter of the part; repeatable"
    )
    parser.add_argument(
        "--against",
        metavar="CANDIDATE",
        help="id (or its beginning) of a candidate of --in, or a folder (default: as loaded)",
    )
    parser.add_argument(
        "--in", dest="campaign_folder", metavar="DIR", help="campaign whose deployment and ledger are used"
    )
    _deployment_options(parser)
    _where_options(parser)
    parser.set_defaults(run="cluster.commands.try_candidate:run")


def _verify(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser("verify", help="whether a candidate answers the same after others as it does cold")
    parser.add_argument(
        "--reload", required=True, metavar="CANDIDATE", help="part, candidate folder, or id of a candidate of --in"
    )
    parser.add_argument("--set", action="append", default=[], metavar="K=V", dest="settings", help="engine setting")
    parser.add_argument("--param", action="append", default=[], metavar="K=V", dest="params", help="part's parameter")
    parser.add_argument(
        "--against", metavar="CANDIDATE", help="what is installed before it, and must come back (default: as loaded)"
    )
    parser.add_argument("--in", dest="campaign_folder", metavar="DIR", help="campaign whose deployment is used")
    _deployment_options(parser)
    _where_options(parser)
    parser.set_defaults(run="cluster.commands.verify:run")


def _profile(commands: argparse._SubParsersAction[_Parser]) -> None:
    parser = commands.add_parser(
        "profile", help="where the time of a candidate goes: operators, gaps, distance from the roofline by slot"
    )
    parser.add_argument(
        "--candidate",
        metavar="CANDIDATE",
        help="part, candidate folder, or id of a candidate of --in (default: as loaded)",
    )
    parser.add_argument("--set", action="append", default=[], metavar="K=V", dest="settings", help="engine setting")
    parser.add_argument("--param", action="append", default=[], metavar="K=V", dest="params", help="part's parameter")
    parser.add_argument("--in", dest="campaign_folder", metavar="DIR", help="campaign whose deployment is used")
    parser.add_argument("--trace", metavar="FILE", help="Chrome trace (default: in profiles/)")
    parser.add_argument("--top", type=int, default=12, metavar="N", help="operators and slots shown (default 12)")
    parser.add_argument(
        "--deadline", type=float, default=120.0, metavar="S", help="seconds that it may take (default 120)"
    )
    _deployment_options(parser)
    _where_options(parser)
    parser.set_defaults(run="cluster.commands.profile:run", against=None)


def _look(commands: argparse._SubParsersAction[_Parser]) -> None:
    """Commands that only look, and `init-part`."""
    init = commands.add_parser("init-part", help="write a runnable copy of a slot's reference as a part to start from")
    init.add_argument("slot", metavar="SLOT", help="as `model` or `model.layers.*.mlp` (see hotpass slots)")
    init.add_argument("--out", metavar="DIR", help="folder to write (default: named after the slot)")
    init.add_argument(
        "--model", metavar="M", default="smollm2-135m", help="model whose slots these are (default smollm2-135m)"
    )
    init.add_argument("--engine", metavar="E", default="decoder", help="decoder (default), module or vllm")
    init.set_defaults(run="cluster.commands.parts:init_part")
    slots = commands.add_parser("slots", help="print the slot table of a model")
    slots.add_argument("--model", metavar="M", default="smollm2-135m", help="default smollm2-135m")
    slots.add_argument("--engine", metavar="E", default="decoder", help="decoder (default), module or vllm")
    slots.add_argument("--json", action="store_true", help="as JSON")
    slots.set_defaults(run="cluster.commands.parts:slots")
    traffic = commands.add_parser("traffic", help="what a trace or preset looks like, and the steps it makes")
    traffic.add_argument("source", metavar="FILE|PRESET")
    traffic.add_argument("--concurrency", type=int, default=1, metavar="N")
    traffic.add_argument("--max-context", type=int, metavar="N", help="drop requests beyond it (default: none)")
    traffic.add_argument("--format", metavar="F", help="mooncake, azure, burstgpt or openai-log (default: sniffed)")
    traffic.add_argument("--plot", metavar="FILE", help="write a picture too (.png or .html)")
    traffic.add_argument("--json", action="store_true", help="the summary as JSON")
    traffic.set_defaults(run="cluster.commands.inputs:traffic")
    hardware = commands.add_parser("hardware", help="this machine, measured, or a named system from the table")
    hardware.add_argument("name", nargs="?", metavar="NAME", help="as h200; without it this machine is measured")
    hardware.add_argument("--device", default="auto", metavar="D", help="cpu, cuda or auto")
    hardware.add_argument("--json", action="store_true", help="as JSON")
    hardware.set_defaults(run="cluster.commands.inputs:hardware")
    ui = commands.add_parser("ui", help="start the MLflow UI on a campaign and print its address once it answers")
    ui.add_argument("folder", metavar="DIR")
    ui.add_argument("--port", type=int, default=0, metavar="N", help="default: a free one")
    ui.set_defaults(run="cluster.commands.look:ui")
    report = commands.add_parser("report", help="write report.html of a campaign, running or done")
    report.add_argument("folder", metavar="DIR")
    report.set_defaults(run="cluster.commands.look:report")
    candidates = commands.add_parser("candidates", help="list the candidates of a campaign, or show how two differ")
    candidates.add_argument("folder", metavar="DIR")
    candidates.add_argument(
        "--diff", nargs=2, metavar=("A", "B"), help="ids or their beginnings; `loaded` is the deployment as loaded"
    )
    candidates.add_argument("--json", action="store_true", help="as JSON")
    candidates.set_defaults(run="cluster.commands.look:candidates")
    _proposers(commands)
    add_commands(commands)


def _proposers(commands: argparse._SubParsersAction[_Parser]) -> None:
    """What people, and programs that propose, read from and hand in to a campaign."""
    board = commands.add_parser("board", help="read the message board of a campaign, or post to it")
    board.add_argument("folder", metavar="DIR")
    board.add_argument("--post", metavar="TEXT", help="what others should know; - reads it from stdin")
    board.add_argument("--kind", metavar="K", help="finding, hypothesis, warning or question")
    board.add_argument(
        "--candidate", action="append", default=[], dest="candidates", metavar="ID", help="that --post is about"
    )
    board.add_argument(
        "--evidence", action="append", default=[], type=int, metavar="N", help="number of an attempt; repeatable"
    )
    board.add_argument("--about", metavar="ID", help="show only posts about this candidate")
    board.add_argument("--limit", type=int, default=50, metavar="N", help="newest posts shown (default 50)")
    board.add_argument("--json", action="store_true", help="as JSON")
    board.set_defaults(run="cluster.commands.board:board")
    tool = commands.add_parser("tool", help="call one of the tools that agents have, as JSON")
    tool.add_argument("folder", metavar="DIR")
    tool.add_argument("name", nargs="?", metavar="TOOL", help="without it, the tools are listed")
    tool.add_argument("arguments", nargs="?", default="{}", metavar="JSON", help="- reads them from stdin")
    tool.add_argument("--schema", action="store_true", help="print the JSON schema of the arguments instead")
    tool.set_defaults(run="cluster.commands.board:tool")
    mcp = commands.add_parser("mcp", help="serve those tools to an MCP client (Claude Code, Codex, …) over stdio")
    mcp.add_argument("folder", metavar="DIR")
    mcp.set_defaults(run="cluster.commands.mcp:run")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. An error that hotpass raises on purpose is one sentence on stderr."""
    _Parser.given = sys.argv[1:] if argv is None else argv
    try:
        arguments = build_parser().parse_args(_Parser.given)
        if arguments.version:
            import hotpass

            print(hotpass.__version__)
            return 0
        if arguments.command is None:
            build_parser().print_help(sys.stderr)
            return 2
        module, _, function = arguments.run.partition(":")
        code: int = getattr(importlib.import_module(module), function)(arguments)
        return code
    except HotpassError as error:
        print(f"hotpass: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # whoever read our output has enough, as `hotpass slots | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("hotpass: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
