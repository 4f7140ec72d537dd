"""Models on disk: names resolved, files fetched and checked, weights and packed blocks kept, all under content hashes."""

from engines.prepare.model import cut_model, prepare_model
from engines.prepare.store import WeightStore, load_tokenizer, open_weights

__all__ = ["WeightStore", "cut_model", "load_tokenizer", "open_weights", "prepare_model"]
