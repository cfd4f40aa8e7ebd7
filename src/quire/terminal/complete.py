"""`quire complete`: completion of single texts."""

import argparse

from quire.config.cli import FlagParser
from quire.terminal import add_shared_flags, answer_all, open_backend, show


def add_flags(parser: FlagParser) -> None:
    add_shared_flags(parser)


def run(args: argparse.Namespace) -> int:
    backend = open_backend(args)

    def answer(text: str) -> None:
        show(lambda emit: backend.complete(text, emit), args)

    return answer_all(args, "Please enter prompt to complete:", answer)
