"""Backend that runs a model in this process."""

import argparse
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import msgspec

from quire.config.cli import engine_args_from
from quire.data.outputs import RequestOutput
from quire.data.params import RequestOutputKind, SamplingParams
from quire.entrypoints.llm import LLM
from quire.frontend.chat import chat_prompt, read_template
from quire.frontend.inputs import Prompt
from quire.terminal import Emit


class LocalBackend:
    """Generates answers with a model that runs in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.llm = LLM(**engine_args_from(args))
        self.name: str = self.llm.config.model.served_model_name[0]
        self._template = read_template(self.llm.config.model.chat_template)
        self._params = _sampling(args, self.llm)

    def chat(self, messages: Sequence[Mapping[str, Any]], emit: Emit) -> int:
        prompt = chat_prompt(self.llm.llm_engine.inputs, messages, chat_template=self._template)
        return self._generate(prompt, emit)

    def complete(self, prompt: str, emit: Emit) -> int:
        return self._generate(prompt, emit)

    def _generate(self, prompt: Prompt | str, emit: Emit) -> int:
        engine, count = self.llm.llm_engine, 0
        engine.add_request("terminal", prompt, self._params)
        try:
            with _interrupts_between_steps() as check_interrupt:
                while engine.has_unfinished_requests():
                    for output in cast(list[RequestOutput], engine.step()):
                        count += len(output.outputs[0].token_ids)
                        emit(output.outputs[0].text)
                    check_interrupt()
        finally:
            engine.abort_request(["terminal"])
        return count


@contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C was pressed before its call. Inside of the
    context, Ctrl-C itself raises nothing, so that it cannot interrupt a step of the engine."""
    interrupts: list[int] = []

    def check() -> None:
        if interrupts:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, lambda number, _: interrupts.append(number))
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)


def _sampling(args: argparse.Namespace, llm: LLM) -> SamplingParams:
    fields: dict[str, Any] = {"max_tokens": args.max_tokens, "output_kind": RequestOutputKind.DELTA}
    if args.temperature is not None:
        fields["temperature"] = args.temperature
    return msgspec.structs.replace(llm.get_default_sampling_params(), **fields)
