"""The records that rooms hand to each other. Frozen, keyword-only, plain data; nothing here computes."""
