"""One cold start of vLLM on the CPU, from the first import to the first token; runs in vLLM's own environment."""

from __future__ import annotations

import json
import sys
import time

START = time.perf_counter()


def main() -> None:
    from vllm import LLM, SamplingParams

    imported = time.perf_counter()
    engine = LLM(model=sys.argv[1], dtype="float32", max_model_len=1024, max_num_seqs=8, disable_log_stats=True)
    loaded = time.perf_counter()
    engine.generate(
        [{"prompt_token_ids": [1, 2, 3]}], SamplingParams(max_tokens=1, temperature=0, detokenize=False), use_tqdm=False
    )
    phases = {"import": imported - START, "load": loaded - imported, "first result": time.perf_counter() - loaded}
    print(json.dumps(phases), flush=True)


if __name__ == "__main__":
    main()
