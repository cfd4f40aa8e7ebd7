"""`python -m quire.bench.probe`: times one start of an engine from inside; used by `bench startup`."""

import json
import sys
import time

import psutil

from quire.data.params import SamplingParams
from quire.entrypoints.llm import LLM


def main() -> None:
    """Read engine arguments as JSON and print the times as one line of JSON. Times are of the monotonic
    clock, so that the parent process can subtract the time at which it started this process."""
    imported = time.monotonic()
    llm = LLM(**json.loads(sys.argv[1]))
    ready = time.monotonic()
    llm.generate([[1]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    first_token = time.monotonic()
    rss = psutil.Process().memory_info().rss
    print(
        json.dumps(
            {"imported_at": imported, "ready_at": ready, "first_token_at": first_token, "rss_bytes": rss}
        )
    )


if __name__ == "__main__":
    main()
