"""`quire chat`: a conversation."""

import argparse

from quire.config.cli import FlagParser
from quire.frontend.chat import chat_prompt, read_template
from quire.terminal import add_shared_flags, answer_all, open_llm, sampling, stream


def add_flags(parser: FlagParser) -> None:
    parser.add_argument(
        "--system-prompt", metavar="TEXT", help="What the model is told before the conversation."
    )
    add_shared_flags(parser)


def run(args: argparse.Namespace) -> int:
    llm = open_llm(args)
    params, template = sampling(args, llm), read_template(llm.config.model.chat_template)
    messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt else []

    def answer(text: str) -> None:
        messages.append({"role": "user", "content": text})
        prompt = chat_prompt(llm.llm_engine.inputs, messages, chat_template=template)
        messages.append({"role": "assistant", "content": stream(llm, prompt, params, stats=args.stats)})

    return answer_all(args, "Please enter a message for the chat model:", answer)
