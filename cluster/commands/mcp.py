"""`hotpass mcp DIR`: the proposers' tools for an MCP client over stdio (Claude Code, Codex, any other). The client becomes a proposer
`mcp:<its name>` of the campaign, under the same judge, leases and budgets as everybody.

    claude mcp add hotpass -- hotpass mcp campaigns/DIR

What it serves is `search.agents.tools.TOOLS` and nothing else: no release, no export, no policy, no traffic.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import hotpass
from cluster.desk import CampaignDesk
from hotpass.errors import HotpassError, InputError
from search.agents.tools import TOOLS, Desk, call_tool

READING = frozenset(tool.name for tool in TOOLS) - {"post", "quick_check", "submit_proposal"}
"""Tools that only read, which a client may call without asking its user."""


def run(arguments: argparse.Namespace) -> int:
    """Serves until the client closes stdin. Raises InputError for a folder that is no campaign, or without the `mcp` package."""
    desk = CampaignDesk(Path(arguments.folder))
    try:
        import anyio
        import mcp.server.lowlevel  # noqa: F401
    except ImportError:
        raise InputError("mcp", "(package)", "is not installed", "pip install 'hotpass[mcp]'") from None
    anyio.run(_serve, desk)
    return 0


async def _serve(desk: Desk) -> None:
    from mcp.server.stdio import stdio_server

    server = make_server(desk)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


def make_server(desk: Desk) -> Any:
    """An `mcp.server.lowlevel.Server` over a desk; bad calls are answers with `is_error`, in one sentence that says what is wrong."""
    import anyio
    from mcp import types
    from mcp.server.lowlevel import Server

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in TOOLS])

    def _described(tool: Any) -> types.Tool:
        return types.Tool(
            name=tool.name,
            description=tool.description,
            input_schema=tool.schema,
            annotations=types.ToolAnnotations(read_only_hint=tool.name in READING, destructive_hint=False),
        )

    async def call(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        author = author_of(context.session.client_params)
        try:
            answer = await anyio.to_thread.run_sync(call_tool, desk, author, params.name, params.arguments or {})
            text, failed = json.dumps(answer, ensure_ascii=False), False
        except HotpassError as error:
            text, failed = str(error), True
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)], is_error=failed)

    guide = files("search.agents").joinpath("guide.txt").read_text(encoding="utf-8")
    return Server(
        "hotpass", version=hotpass.__version__, instructions=guide, on_list_tools=list_tools, on_call_tool=call
    )


def author_of(client: Any) -> str:
    """`mcp:<client>`, of plain characters only, since it stands in the ledger; `mcp:unknown` when the client does not say."""
    name = getattr(getattr(client, "client_info", None), "name", "") or ""
    return f"mcp:{re.sub(r'[^a-z0-9._-]+', '-', name.lower()).strip('-')[:32] or 'unknown'}"
