"""A model in the terminal, in this process."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from quire.config.cli import FlagParser, add_engine_flags, given_from
from quire.data.params import RequestOutputKind, SamplingParams
from quire.frontend.inputs import Prompt
from quire.llm import LLM


def add_shared_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group(
        "Terminal", "What is asked, and how it is answered.", conflict_handler="resolve"
    )
    group.add_argument(
        "--max-tokens", type=int, metavar="N", help="Longest answer. Default: what the model can hold."
    )
    group.add_argument("--temperature", type=float, metavar="T", help="Default: the model's own.")
    group.add_argument("--stats", action="store_true", help="Print times after each answer.")
    add_engine_flags(parser)
    # Last, so that -q is this flag's and not --quantization's.
    group.add_argument("-q", "--quick", metavar="TEXT", help="Answer this and exit.")


def open_llm(args: argparse.Namespace) -> LLM:
    llm = LLM(**given_from(args))
    print(f"Using model: {llm.config.model.served_model_name[0]}", flush=True)
    return llm


def sampling(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    asked: dict[str, Any] = {"max_tokens": args.max_tokens, "output_kind": RequestOutputKind.DELTA}
    if args.temperature is not None:
        asked["temperature"] = args.temperature
    return msgspec.structs.replace(llm.get_default_sampling_params(), **asked)


def lines(greeting: str) -> Iterator[str]:
    """What the user types, until end of input."""
    print(greeting, flush=True)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


def stream(llm: LLM, prompt: Prompt | str, params: SamplingParams, *, stats: bool) -> str:
    """Print the answer as it comes; the whole of it."""
    start, first, count, parts = time.perf_counter(), 0.0, 0, []
    llm.llm_engine.add_request("terminal", prompt, params)
    try:
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                first = first or time.perf_counter() - start
                count += len(output.outputs[0].token_ids)
                parts.append(output.outputs[0].text)
                print(parts[-1], end="", flush=True)
    finally:
        llm.llm_engine.abort_request(["terminal"])
    seconds = time.perf_counter() - start
    print(flush=True)
    if stats:
        print(
            f"TTFT: {first * 1e3:.2f} ms\nTPS: {count / seconds:.2f} tokens/s ({count} tokens in "
            f"{seconds:.2f} s)"
        )
    return "".join(parts)


def answer_all(args: argparse.Namespace, greeting: str, answer: Callable[[str], object]) -> int:
    for line in [args.quick] if args.quick is not None else lines(greeting):
        answer(line)
    return 0
