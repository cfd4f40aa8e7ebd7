"""A conversation on its way to the engine: checked and rendered, with parameters and ears for its answer."""

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import Request

from quire.data.params import BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.server.asked import beam_params, chat_num_logprobs, check_chat, check_generate, sampling_params
from quire.server.generate import Api, Job
from quire.server.listen import Listener
from quire.server.prompts import as_dict
from quire.server.requests import ChatBody
from quire.text.parsers import Chain
from quire.text.parsers.engine import Parser


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation that the engine is about to answer."""

    body: ChatBody
    job: Job
    role: str
    """Whose the answer is."""
    echoed: str
    """What the answer begins with: the last message, if it is to go on and to be repeated."""

    make_parser: Callable[[], Parser | Chain] | None = None
    """None: all of the answer is text."""

    @property
    def parses(self) -> bool:
        return self.make_parser is not None

    def listener(self) -> Listener:
        """For one choice."""
        return Listener(self.make_parser and self.make_parser())


async def begin_talk(api: Api, body: ChatBody, request: Request, kind: str = "chatcmpl") -> Talk:
    """`kind` begins the id."""
    settings = api.settings.api
    api.check_model(body.model, pools=False)
    check_generate(body, max_n=settings.max_n)
    check_chat(body, trust_template=settings.trust_request_chat_template)
    asked = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    prompt = await api.reader.of_chat(body, asked)
    params = _params(api, body, api.output_limit(asked, len(prompt.token_ids)))
    last = as_dict(body.messages[-1])
    role = settings.response_role if body.add_generation_prompt else last["role"]
    content = last.get("content")
    echoed = content if body.echo and last["role"] == role and isinstance(content, str) else ""
    return Talk(body, api.job(kind, body, request, [prompt], [params]), role, echoed)


def _params(api: Api, body: ChatBody, max_tokens: int) -> SamplingParams | BeamSearchParams:
    facts = api.engine.facts
    if body.use_beam_search:
        return beam_params(body, facts, max_tokens=max_tokens)
    if body.logprob_token_ids is not None and not body.logprobs:
        raise RequestError(
            "when using `logprob_token_ids`, `logprobs` must be set to true.", param="logprob_token_ids"
        )
    return sampling_params(
        body,
        facts,
        max_tokens=max_tokens,
        logprobs=chat_num_logprobs(body),
        prompt_logprobs=body.prompt_logprobs,
    )
