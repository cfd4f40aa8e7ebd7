"""The route /generative_scoring: the probability of a label token after a query and each of several items."""

import math
from collections.abc import Sequence
from typing import Literal

from fastapi import FastAPI
from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.errors import RequestError
from quire.frontend.inputs import InputProcessor, Prompt
from quire.server.http.errors import json_response
from quire.server.http.openapi_document import add_post
from quire.server.openai.api_call import ApiCall, new_call
from quire.server.openai.replies import UsageReply
from quire.server.openai.requests import MAX_PROMPTS, CallBody, Many, Some, TokenId, doc
from quire.server.openai.run_call import final_outputs
from quire.server.openai.sampling_params import check_fields
from quire.server.openai.service import GenerationService
from quire.server.openai.work_size import off_loop


class ScoringBody(CallBody):
    """The body of /generative_scoring."""

    query: str | Many[TokenId] = Field(description="A text or its tokens.", examples=["Is this a fruit? "])
    items: Some[str] | Some[Many[TokenId]] = Field(
        description="Texts or their tokens, each scored separately.", examples=[["An apple.", "A chair."]]
    )
    label_token_ids: Some[TokenId] = Field(
        description="The label tokens; the score is the probability of the first.", examples=[[9, 10]]
    )
    apply_softmax: bool = doc("Normalize over the labels; false: over the whole vocabulary.", True)
    item_first: bool = doc("Place the item before the query, not after it.", False)
    add_special_tokens: bool = doc("Add special tokens to the query, if it is a text.", True)


class ScoredItem(BaseModel):
    """Probability of the first label token after query and item number `index`."""

    index: int
    object: Literal["score"]
    score: float


class ScoringReply(BaseModel):
    """Response of /generative_scoring."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ScoredItem]
    usage: UsageReply


def add_scoring_route(app: FastAPI, api: GenerationService) -> None:
    add_post(app, api, "/generative_scoring", create_generative_scoring, ScoringReply)


async def create_generative_scoring(api: GenerationService, body: ScoringBody, request: Request) -> Response:
    """Score each item by the probability that the first label follows it."""
    model = await api.names.find(body.model, request, pools=False)
    check_fields(body)
    limit = min(MAX_PROMPTS, api.settings.max_sequences)
    if len(body.items) > limit:
        raise RequestError(
            f"{len(body.items)} items exceed the maximum of {limit} per request; send fewer at once",
            param="items",
        )
    vocab = model.inputs.vocab
    if (largest := max(body.label_token_ids)) >= vocab:
        raise RequestError(
            f"label_token_id {largest} is out of vocabulary range [0, {vocab}). Please provide valid token "
            "IDs.",
            param="label_token_ids",
        )
    size = sum(map(len, body.items)) + len(body.items) * len(body.query)
    prompts = await off_loop(size, lambda: _prompts(model.inputs, body))
    params = SamplingParams(max_tokens=1, logprob_token_ids=list(dict.fromkeys(body.label_token_ids)))
    call = new_call(api, "generative-scoring", body, request, model, prompts, [params] * len(prompts))
    outputs = await api.running_requests.until_disconnect(request.receive, final_outputs(api, call))
    return json_response(_reply(api, body, call, outputs))


def _prompts(inputs: InputProcessor, body: ScoringBody) -> list[Prompt]:
    """Return one prompt of query and item for each item, truncated at the end to leave room for one token."""
    query = _ids(inputs, body.query, "query", add_special_tokens=body.add_special_tokens)
    prompts = []
    for item in body.items:
        ids = _ids(inputs, item, "items", add_special_tokens=False)
        both = [*ids, *query] if body.item_first else [*query, *ids]
        prompts.append(inputs.parse(both[: inputs.max_model_len - 1]))
    return prompts


def _ids(
    inputs: InputProcessor, value: str | Sequence[int], param: str, *, add_special_tokens: bool
) -> Sequence[int]:
    if not isinstance(value, str):
        return value
    if inputs.tokenizer is None:
        raise RequestError(f"there is no tokenizer (skip_tokenizer_init): send {param} as token ids", param)
    return inputs.tokenizer.encode(value, add_special_tokens=add_special_tokens)


def _reply(
    api: GenerationService, body: ScoringBody, call: ApiCall, outputs: list[RequestOutput]
) -> dict[str, object]:
    data = [
        {"index": index, "object": "score", "score": _score(body, output)}
        for index, output in enumerate(outputs)
    ]
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    return call.frame("list") | {"data": data, "usage": api.usage(call.num_prompt_tokens, num_output)}


def _score(body: ScoringBody, output: RequestOutput) -> float:
    assert output.outputs[0].logprobs and output.outputs[0].logprobs[0] is not None, (
        "label_token_ids were requested"
    )
    logprobs = output.outputs[0].logprobs[0]
    probs = {id: math.exp(logprobs[id].logprob) for id in body.label_token_ids}
    first = probs[body.label_token_ids[0]]
    return first / (sum(probs.values()) or 1.0) if body.apply_softmax else first
