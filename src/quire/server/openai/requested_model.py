"""The model or LoRA adapter that a request names, found once for the whole request."""

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from starlette.requests import Request

from quire.data.lora import LoRARequest
from quire.errors import RequestError
from quire.frontend.engine import AsyncEngine
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.inputs import InputProcessor
from quire.frontend.pooling import NOT_GENERATIVE, NOT_POOLING
from quire.logs import printable
from quire.server.http.errors import NotFound
from quire.server.lora.service import LoRAService
from quire.server.openai.logprobs import TokenFormatter
from quire.text.tokenizer import Tokenizer

_MAX_LISTED = 10
"""Maximum served names in the error for an unknown model."""


@dataclass(frozen=True, slots=True)
class RequestedModel:
    """The model or LoRA adapter of a request. An adapter is not removed before the request has ended."""

    name: str
    """Name of the model or adapter in the response."""
    lora: LoRARequest | None
    """LoRA adapter that the request uses; None for the base model."""
    facts: EngineFacts
    inputs: InputProcessor
    """Input processor of the model, with the tokenizer of the adapter if that has one."""
    tokens_as_ids: bool = False
    """Whether logprobs show tokens as `token_id:ID` if the request does not say."""

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.inputs.tokenizer

    def need_tokenizer(self) -> Tokenizer:
        if self.inputs.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
        return self.inputs.tokenizer

    def token_formatter(self, as_ids: bool | None = None) -> TokenFormatter:
        tokenizer = self.inputs.tokenizer
        return TokenFormatter(
            tokenizer, tokenizer is None or (self.tokens_as_ids if as_ids is None else as_ids)
        )


class ServedNames:
    """The names that a request may have as `model`: those of the model, then those of its adapters."""

    def __init__(self, engine: AsyncEngine, adapters: LoRAService, *, tokens_as_ids: bool) -> None:
        self._engine, self._adapters, self._tokens_as_ids = engine, adapters, tokens_as_ids

    def __iter__(self) -> Iterator[str]:
        yield from self._engine.facts.model_names
        yield from (adapter.name for adapter in self._adapters)

    def __contains__(self, name: str) -> bool:
        return name in self._engine.facts.model_names or self._adapters.get(name) is not None

    async def find(self, name: str | None, request: Request, *, pools: bool | None = None) -> RequestedModel:
        """Return the model of a request; no name means the base model, and an adapter is loaded if necessary.
        Raise NotFound for an unknown name. `pools`: also require a pooling model (True) or a generative model
        (False)."""
        facts, inputs = self._engine.facts, self._engine.inputs
        lora = None
        if name and name not in facts.model_names:
            await self._adapters.resolve(name)
            if (lora := self._adapters.hold(name, request.scope)) is None:
                raise unknown_model_error(name, self)
            inputs = await asyncio.to_thread(inputs.of, lora)  # may read the adapter's tokenizer files
        if pools is not None and pools != (inputs.pooling is not None):
            raise NotFound(NOT_POOLING.format(what="this route") if pools else NOT_GENERATIVE)
        shown = facts.model_names[0] if lora is None else lora.name
        return RequestedModel(shown, lora, facts, inputs, self._tokens_as_ids)


def unknown_model_error(name: str, served: Iterable[str]) -> NotFound:
    """Return the error for an unknown model; it lists some of the served names."""
    names = [*itertools.islice(served, _MAX_LISTED + 1)]
    listed = ", ".join([*names[:_MAX_LISTED], *(["..."] if len(names) > _MAX_LISTED else [])])
    message = f"The model `{printable(name)}` does not exist. This server has: {listed}."
    return NotFound(message, param="model")
