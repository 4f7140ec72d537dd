"""AntiBERTy (Ruffolo, Gray and Sulam 2021, arXiv 2112.07782): a BERT of 26 million parameters for antibody sequences.

Weights of the wheel `antiberty==0.1.3` (MIT licence). The tree and the names are those of the checkpoint: transformers' BertModel, as its
own package builds it, with the heads for residues, species, chain and grafting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertModel, BertPreTrainedModel
from transformers.models.bert.modeling_bert import BertLMPredictionHead

from engines.module.recipe import Example

CHECKPOINT = "trained_models/AntiBERTy_md_smooth"
CLS, SEP, RESIDUES = 2, 3, (5, 24)
"""Token ids: start, end, and the twenty residues."""


class Heads(torch.nn.Module):
    """Residue at each position; species, chain and grafting of the sequence."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.predictions = BertLMPredictionHead(config)
        self.species = torch.nn.Linear(config.hidden_size, 6)
        self.chain = torch.nn.Linear(config.hidden_size, 2)
        self.graft = torch.nn.Linear(config.hidden_size, 2)

    def forward(self, hidden: torch.Tensor, pooled: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.predictions(hidden), self.species(pooled), self.chain(pooled), self.graft(pooled)


class AntiBERTy(BertPreTrainedModel):
    """Embeddings of an antibody's residues, and the logits of its heads."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.bert = BertModel(config)
        self.cls = Heads(config)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.bert(input_ids, attention_mask=attention_mask)
        residues, species, chain, graft = self.cls(found.last_hidden_state, found.pooler_output)
        return {
            "embedding": found.last_hidden_state, "residues": residues, "species": species, "chain": chain, "graft": graft,
        }  # fmt: skip


def load(folder: Path) -> tuple[torch.nn.Module, dict[str, Example]]:
    config = BertConfig.from_pretrained(folder / CHECKPOINT)
    model = AntiBERTy(config)
    weights = torch.load(folder / CHECKPOINT / "pytorch_model.bin", map_location="cpu", weights_only=True, mmap=True)
    missing, extra = model.load_state_dict(weights, strict=False)
    known = {"bert.embeddings.position_ids", "cls.predictions.bias"}
    if set(extra) - known or set(missing) - {"bert.embeddings.position_ids"}:
        raise ValueError(f"the checkpoint does not fit this transformers: {missing[:3]}, {extra[:3]}")
    return model, {
        "one": Example({"input_ids": _tokens([121]), "attention_mask": _mask([121])}, share=0.6),
        "pairs": Example(_inputs([121, 108, 119, 110, 124, 107, 117, 113]), share=0.4, constant=("attention_mask",)),
    }


def _inputs(lengths: list[int]) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(lengths), "attention_mask": _mask(lengths)}


def _tokens(lengths: list[int]) -> torch.Tensor:
    """Random residues between start and end, padded with 0: chains of the usual lengths."""
    tokens = torch.zeros(len(lengths), max(lengths) + 2, dtype=torch.int64)
    for row, length in enumerate(lengths):
        tokens[row, 1 : length + 1] = torch.randint(RESIDUES[0], RESIDUES[1] + 1, (length,))
        tokens[row, 0], tokens[row, length + 1] = CLS, SEP
    return tokens


def _mask(lengths: list[int]) -> torch.Tensor:
    return (torch.arange(max(lengths) + 2) < torch.tensor(lengths)[:, None] + 2).long()
