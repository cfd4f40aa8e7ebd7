"""What constrained rows cost: `python tests/engine/structured_speed.py MODEL --load-format dummy`.

Steps of a full batch of decodes: of free rows, of rows that follow a grammar, and of half and half.
"""

import argparse
import json
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from quire import LLM, SamplingParams

WORD = {"type": "string", "minLength": 1, "maxLength": 16}
RECORD = {
    "type": "object",
    "properties": {
        "name": WORD,
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["customer", "supplier", "employee"]},
        "tags": {"type": "array", "items": WORD, "maxItems": 3},
        "address": {
            "type": "object",
            "properties": {
                "street": WORD,
                "city": WORD,
                "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
            },
            "required": ["street", "city", "zip"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags", "address"],
    "additionalProperties": False,
}
ASKED: dict[str, dict[str, Any] | None] = {
    "free": None,
    "records": {
        "json": {"type": "array", "items": RECORD, "minItems": 100},
        "disable_any_whitespace": True,
    },
    "text": {"json": {"type": "array", "items": {"type": "string"}, "minItems": 100}},
    "regex": {"regex": "([a-z]{2,9} ){400}"},
}


class Clock:
    """The time that a method takes, each time it is called."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds: list[float] = []
        timed = getattr(owner, name)

        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = timed(*args)
            self.seconds.append(time.perf_counter() - started)
            return result

        setattr(owner, name, call)

    def take_ms(self) -> float:
        """The mean since it was last asked."""
        taken, self.seconds[:] = list(self.seconds), []
        return 1e3 * mean(taken) if taken else 0.0


def run(llm: LLM, kinds: list[str], num_tokens: int) -> list[float]:
    """Milliseconds of each step with all rows in it."""
    engine = llm.llm_engine
    for row, kind in enumerate(kinds):
        params = SamplingParams(
            temperature=1.0, seed=row, max_tokens=num_tokens, ignore_eos=True, structured_outputs=ASKED[kind]
        )
        engine.add_request(f"{kind}-{row}", [5 + row, 6, 7, 8], params)
    steps, last = [], time.perf_counter()
    while engine.has_unfinished_requests():
        engine.step()
        now = time.perf_counter()
        if len(engine.core.scheduler.running) == len(kinds):
            steps.append((now - last) * 1e3)
        last = now
    return steps[8:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--only", nargs="*", default=[name for name in ASKED if name != "free"])
    parser.add_argument("--settings", type=json.loads, default={})
    args = parser.parse_args()
    llm = LLM(
        args.model,
        load_format=args.load_format,
        max_num_seqs=args.rows,
        max_model_len=1024,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        **args.settings,
    )
    constraints, pipeline = llm.llm_engine.core.scheduler.constraints, llm.llm_engine.core.pipeline
    clocks = [Clock(constraints, "masks"), Clock(constraints, "advance"), Clock(pipeline, "draw")]
    half = args.rows // 2
    batches = {name: [name] * args.rows for name in args.only}
    batches |= {f"half {name}": ["free", name] * half for name in args.only[:1]}
    run(llm, ["free", *args.only], 20)
    free = run(llm, ["free"] * args.rows, args.tokens)
    print(f"{Path(args.model).name}, {args.rows} rows | ms a step: median, mean | masks, advance, draw")
    print(f"free | {median(free):.3f}, {mean(free):.3f} |")
    for name, kinds in batches.items():
        for clock in clocks:
            clock.take_ms()
        steps = run(llm, kinds, args.tokens)
        parts = ", ".join(f"{clock.take_ms():.3f}" for clock in clocks)
        more = [f"{100 * (which(steps) / which(free) - 1):+.1f} %" for which in (median, mean)]
        print(f"{name} | {median(steps):.3f}, {mean(steps):.3f} ({', '.join(more)}) | {parts}")
    again = run(llm, ["free"] * args.rows, args.tokens)
    print(f"free again | {median(again):.3f}, {mean(again):.3f} |")


if __name__ == "__main__":
    main()
