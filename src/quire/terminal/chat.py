"""`quire chat`: a conversation."""

import argparse
from typing import Any

from quire.config.cli import FlagParser
from quire.terminal import add_shared_flags, answer_all, open_backend, show


def add_flags(parser: FlagParser) -> None:
    parser.add_argument("--system-prompt", metavar="TEXT", help="System message of the conversation.")
    add_shared_flags(parser)


def run(args: argparse.Namespace) -> int:
    backend = open_backend(args)
    messages: list[dict[str, Any]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})

    def answer(text: str) -> None:
        messages.append({"role": "user", "content": text})
        reply = show(lambda emit: backend.chat(messages, emit), args)
        messages.append({"role": "assistant", "content": reply})

    return answer_all(args, "Please enter a message for the chat model:", answer)
