"""Time decode steps of a full batch with no, half and all rows constrained by a grammar.

python benchmarks/structured_outputs.py MODEL [--load-format dummy]
"""

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

from quire import LLM, RequestOutputKind, SamplingParams

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


TAG = {
    "triggers": ["<function="],
    "structures": [{"begin": "<function=record>", "schema": RECORD, "end": "</function>"}],
}


def _unlimited(schema: Any) -> Any:
    """Return the schema with strings of any length."""
    if isinstance(schema, list):
        return [_unlimited(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {name: _unlimited(each) for name, each in schema.items() if name not in ("minLength", "maxLength")}


def _many(schema: Any) -> dict[str, Any]:
    """Return a schema of a longer array than max_tokens allows, so that no row ends early."""
    return {"type": "array", "items": schema, "minItems": 100}


ASKED: dict[str, dict[str, Any] | None] = {
    "free": None,
    "usual": {"json": _many(_unlimited(RECORD))},
    "records": {"json": _many(RECORD), "disable_any_whitespace": True},
    "text": {"json": _many({"type": "string"})},
    "names": {"json": _many({"type": "string", "pattern": "^[A-Z][a-z]+( [A-Z][a-z]+)*$"})},
    "times": {"json": _many({"type": "string", "format": "date-time"})},
    "before a tag": {"structural_tag": json.dumps(TAG)},
    "regex, unrolled": {"regex": "([a-z]{2,9} ){400}"},
}
"""Most schemas are like "usual". Bounded strings and counted repetitions are the worst cases: for each number
of remaining characters another part of the vocabulary is tried, token by token."""
SKIPPED = 4
"""Steps skipped at the beginning: prompts and warm-up."""


class Clock:
    """Stopwatch of one method of an object: its seconds per step, over all its calls in the step."""

    def __init__(self, owner: Any, name: str) -> None:
        self.name = name
        self.steps: list[float] = []
        self._seconds = 0.0
        timed = getattr(owner, name)

        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = timed(*args)
            self._seconds += time.perf_counter() - started
            return result

        setattr(owner, name, call)

    def tick(self, is_full: bool) -> None:
        """End a step; `is_full` if it had all rows."""
        if is_full:
            self.steps.append(self._seconds * 1e3)
        self._seconds = 0.0

    def take_ms(self) -> float:
        """Return the median milliseconds of the steps since the last call, and forget these steps."""
        taken, self.steps[:] = self.steps[SKIPPED:], []
        return median(taken) if taken else 0.0


def run(llm: LLM, kinds: list[str], num_tokens: int, clocks: list[Clock]) -> tuple[list[float], float]:
    """Return the milliseconds of each step that had all rows, and the CPU milliseconds of all threads per
    step."""
    engine = llm.llm_engine
    for row, kind in enumerate(kinds):
        params = SamplingParams(
            temperature=1.0,
            seed=row,
            max_tokens=num_tokens,
            ignore_eos=True,
            structured_outputs=ASKED[kind],
            output_kind=RequestOutputKind.FINAL_ONLY,  # a server detokenizes in another process
        )
        engine.add_request(f"{kind}-{row}", [5 + row, 6, 7, 8], params)
    steps, last, spent, until = [], time.perf_counter(), 0.0, 0.0
    while engine.has_unfinished_requests():
        engine.step()
        now = time.perf_counter()
        is_full = len(engine.core.scheduler.running) == len(kinds)
        if is_full:
            steps.append((now - last) * 1e3)
            until = time.process_time()
        for clock in clocks:
            clock.tick(is_full)
        if len(steps) == SKIPPED:
            spent = time.process_time()
        last = now
    return steps[SKIPPED:], (until - spent) * 1e3 / max(len(steps) - SKIPPED, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--only", nargs="*", default=[name for name in ASKED if name != "free"])
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument(
        "--one-by-one", action="store_true", help="compute tokens that grammars force in steps of their own"
    )
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
    if args.one_by_one:
        llm.llm_engine.core.scheduler.admitter.forced = None
    constraints, step_queue = llm.llm_engine.core.scheduler.constraints, llm.llm_engine.core.step_queue
    # "advance" may start masks, "masks" waits for them.
    clocks = [Clock(constraints, name) for name in ("begin", "masks", "advance")]
    clocks.append(Clock(step_queue, "sample_tokens"))
    half = args.rows // 2
    batches = {name: [name] * args.rows for name in args.only}
    batches |= {f"half {name}": ["free", name] * half for name in args.only[:1]}
    run(llm, ["free", *args.only], 20, [])
    free, free_cpu = run(llm, ["free"] * args.rows, args.tokens, [])
    names = ", ".join(clock.name for clock in clocks)
    print(
        f"{Path(args.model).name}, {args.rows} rows: full steps | ms a step | of processors | of it at the "
        f"host: {names}"
    )
    print(f"free | {len(free)} | {median(free):.3f} | {free_cpu:.3f} |")
    for name, kinds in [*batches.items(), ("free again", ["free"] * args.rows)]:
        steps, cpu = run(llm, kinds, args.tokens, clocks)
        if not steps:
            print(f"{name} | never were all rows in one step: more --tokens")
            continue
        parts = ", ".join(f"{clock.take_ms():.3f}" for clock in clocks)
        more, more_cpu = (100 * (each - 1) for each in (median(steps) / median(free), cpu / free_cpu))
        print(
            f"{name} | {len(steps)} | {median(steps):.3f} {more:+.1f} % | {cpu:.3f} {more_cpu:+.1f} %",
            f"| {parts}",
            flush=True,
        )


if __name__ == "__main__":
    main()
