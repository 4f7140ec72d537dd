"""From stored replies of LLMs to the proposals that they led to: what `hotpass replay` asks of agents' candidates.

    replies/*.json ─► tool_use ─► submit_proposal ─► composed onto what the proposal built on ─► the same candidate id?

An LLM cannot be asked again and say the same, so its replies are inputs; everything that follows from one is done again here.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from pydantic import ValidationError

from cluster.desk import CampaignDesk
from hotpass.errors import InputError
from hotpass.records.candidate import Candidate
from search.agents.exchange import read_exchanges
from search.agents.replies import ToolUse, tool_use
from search.agents.tools import SubmitProposal


class StoredReplies:
    """Of one campaign."""

    def __init__(self, folder: Path, desk: CampaignDesk) -> None:
        """`desk`: over the same folder, with the parts that the campaign knew."""
        self._desk = desk
        self._submitted: dict[str, list[SubmitProposal]] = defaultdict(list)
        for exchange in read_exchanges(folder):
            use = tool_use(exchange.reply)
            if isinstance(use, ToolUse) and use.tool == "submit_proposal":
                try:
                    asked = SubmitProposal.model_validate({**use.arguments, "request_id": exchange.sha256})
                except ValidationError:
                    continue
                self._submitted[exchange.author].append(asked)

    def gives(self, candidate_id: str, author: str, onto: Candidate) -> bool:
        """Whether a reply of that author, put onto that candidate, is this one."""
        return any(self._made(asked, onto) == candidate_id for asked in self._submitted[author])

    def _made(self, asked: SubmitProposal, onto: Candidate) -> str:
        try:
            return self._desk.made_from(asked, onto).id
        except InputError:
            return ""
