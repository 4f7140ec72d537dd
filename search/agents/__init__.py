"""Proposers that think: their tools, prompts, replies, and the LLM behind them. litellm is imported in `llm` only, when it is used."""
