"""`quire complete`: texts, each continued on its own."""

import argparse

from quire.config.cli import FlagParser
from quire.terminal import add_shared_flags, answer_all, open_llm, sampling, stream


def add_flags(parser: FlagParser) -> None:
    add_shared_flags(parser)


def run(args: argparse.Namespace) -> int:
    llm = open_llm(args)
    params = sampling(args, llm)
    return answer_all(
        args, "Please enter prompt to complete:", lambda text: stream(llm, text, params, stats=args.stats)
    )
