"""Chat and completion in the terminal, with a model of a server or of this process."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from quire.config.cli import FlagParser, add_engine_flags, engine_args_from
from quire.errors import ConfigError
from quire.registry import LazyTable

Emit = Callable[[str], None]
"""Receives the text of an answer as it is generated."""

DEFAULT_MAX_TOKENS = 1024
_HELP = "Ctrl-C stops an answer. Ctrl-D, or Ctrl-C at the prompt, ends. /help prints this line."
BACKENDS = LazyTable(
    "backend", {"local": "quire.terminal.local:LocalBackend", "server": "quire.terminal.server:ServerBackend"}
)


class ChatBackend(Protocol):
    """Source of answers for the terminal: a server or a model in this process. Both methods pass the text
    to `emit` as it is generated, and return the number of generated tokens."""

    name: str

    def chat(self, messages: Sequence[Mapping[str, Any]], emit: Emit) -> int: ...

    def complete(self, prompt: str, emit: Emit) -> int: ...


def add_shared_flags(parser: FlagParser) -> None:
    group = parser.add_argument_group(
        "Terminal", "The server or model to use, and sampling.", conflict_handler="resolve"
    )
    group.add_argument(
        "--url",
        help="URL of the server, with or without /v1. Default: http://localhost:8000/v1.",
    )
    group.add_argument(
        "--model-name", metavar="NAME", help="Model to use. Default: the first one that the server lists."
    )
    group.add_argument("--api-key", metavar="KEY", help="Default: the variable OPENAI_API_KEY.")
    group.add_argument(
        "--local",
        action="store_true",
        help="Run the model in this process. Implied by any engine flag, such as --model.",
    )
    group.add_argument(
        "--max-tokens",
        type=int,
        default=DEFAULT_MAX_TOKENS,
        metavar="N",
        help=f"Maximum tokens of an answer. Default: {DEFAULT_MAX_TOKENS}.",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="Default: the model's setting.")
    group.add_argument("--stats", action="store_true", help="Print times after each answer.")
    add_engine_flags(parser)
    # Last, so that -q is this flag's and not --quantization's.
    group.add_argument("-q", "--quick", metavar="TEXT", help="Answer this text and exit.")


def open_backend(args: argparse.Namespace) -> ChatBackend:
    flags = engine_args_from(args)
    local = args.local or bool(flags)
    if local and (args.url or args.model_name):
        flag = "--local" if args.local else f"--{next(iter(flags)).replace('_', '-')}"
        raise ConfigError(
            f"{flag} runs a model in this process, but --url and --model-name are for a server: "
            "leave out either"
        )
    backend: ChatBackend = BACKENDS["local" if local else "server"](args)
    print(f"Using model: {backend.name}", flush=True)
    return backend


def lines(greeting: str) -> Iterator[str]:
    """Yield the lines that the user types, until end of input or Ctrl-C."""
    print(f"{_HELP}\n{greeting}", flush=True)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line.strip() == "/help":
            print(_HELP, flush=True)
        elif line.strip():
            yield line


def show(answer: Callable[[Emit], int], args: argparse.Namespace) -> str:
    """Print the answer as `answer` generates it, and return its text. In a conversation Ctrl-C ends only
    this answer."""
    start, first, parts = time.perf_counter(), 0.0, []

    def emit(text: str) -> None:
        nonlocal first
        first = first or time.perf_counter() - start
        parts.append(text)
        print(text, end="", flush=True)

    count = None
    try:
        count = answer(emit)
    except KeyboardInterrupt:
        if args.quick is not None:
            raise
    seconds = time.perf_counter() - start
    print(flush=True)
    if args.stats and count is not None:
        print(
            f"TTFT: {first * 1e3:.2f} ms\nTPS: {count / seconds:.2f} tokens/s ({count} tokens in "
            f"{seconds:.2f} s)"
        )
    return "".join(parts)


def answer_all(args: argparse.Namespace, greeting: str, answer: Callable[[str], object]) -> int:
    for line in [args.quick] if args.quick is not None else lines(greeting):
        answer(line)
    return 0
