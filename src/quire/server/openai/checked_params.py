"""Checks of the sampling parameters of one call, done once for all prompts and outside of the event loop."""

import asyncio

from quire.data.lora import LoRARequest
from quire.data.params import SamplingParams, StructuredOutputsParams
from quire.frontend.checked_params import CheckedParams
from quire.frontend.inputs import InputProcessor

COMPILE_S = 5.0
"""Maximum seconds to compile the grammar of a call."""


class ParamsChecker:
    """Checker of the params of one call. Equal params and grammars are checked once; grammars in a thread."""

    def __init__(self, inputs: InputProcessor, lora: LoRARequest | None) -> None:
        self._inputs, self._lora = inputs, lora
        self._params: SamplingParams | None = None
        self._checked: CheckedParams | None = None
        """Result of the check of `_params`."""
        self._grammar: StructuredOutputsParams | None = None

    async def of(self, params: SamplingParams) -> CheckedParams:
        """Return the checked params. Prompts that share params share the result."""
        if self._checked is None or params is not self._params:
            await self._check_grammar(params.structured_outputs)
            self._checked = self._inputs.check(params, lora=self._lora, grammar=self._grammar)
            self._params = params
        return self._checked

    async def _check_grammar(self, grammar: StructuredOutputsParams | None) -> None:
        if grammar is not None and grammar != self._grammar:
            await asyncio.to_thread(self._inputs.check_grammar, grammar, COMPILE_S)
            self._grammar = grammar
