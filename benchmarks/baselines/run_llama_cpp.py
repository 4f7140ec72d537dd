"""llama.cpp's logits through its Python bindings; speed is measured by its own bench tools (`engines.py`), not here."""

from __future__ import annotations

import numpy as np
from llama_cpp import Llama

from benchmarks.baselines.sweep import reply, request


def main() -> None:
    orders = request()
    model = Llama(
        model_path=orders["model"], n_ctx=1024, n_threads=max(orders["threads"]), logits_all=True, verbose=False
    )
    model.eval(orders["tokens"])
    np.save(orders["logits"], np.asarray(model.scores[: len(orders["tokens"])], dtype=np.float32))
    reply()


if __name__ == "__main__":
    main()
