"""/v2/embed: embeddings in the format of Cohere's API."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, JsonValue
from starlette.requests import Request
from starlette.responses import Response

from quire.data.params import INT64_MAX
from quire.errors import RequestError
from quire.frontend.score_inputs import ScoreInput, ScoreInputs
from quire.server.http.errors import json_response
from quire.server.openai.requests import Body, CallBody, Int, Some, doc
from quire.server.openai.sampling_params import check_fields
from quire.server.openai.service import GenerationService
from quire.server.openai.work_size import off_loop
from quire.server.pooling.bodies import VectorOptions
from quire.server.pooling.calls import name_inputs, pack_values, pool

Kind = Literal["float", "binary", "ubinary", "base64"]


class ContentPart(Body):
    """A content part of an input."""

    type: Literal["text", "image_url"]
    text: str | None = None
    image_url: dict[str, JsonValue] | None = doc("With a `url`.")


class MixedInput(Body):
    """Content parts that form one input."""

    content: Some[ContentPart]


class CohereBody(CallBody):
    """The body of /v2/embed. Exactly one of texts, inputs and images is required."""

    texts: Some[str] | None = Field(None, examples=[["The quick brown fox"]])
    inputs: Some[MixedInput] | None = doc(
        "Inputs of content parts, formatted with the chat template, if there is one."
    )
    images: Some[str] | None = doc("URLs, such as `data:image/png;base64,...`.")
    input_type: str | None = doc("Name of one of the model's instructions, which is prepended to each input.")
    embedding_types: Some[Kind] | None = doc("Default: float.")
    output_dimension: Int | None = doc("For Matryoshka models.", json_schema_extra={"minimum": 1})
    truncate: Literal["NONE", "START", "END"] = doc("Which end of a long input is truncated.", "END")
    max_tokens: Int | None = doc(
        "Maximum tokens of an input. Default: the model's context length.", ge=1, le=INT64_MAX
    )


class CohereEmbeddings(BaseModel):
    """The vectors, one per input, in each requested format; binary formats have one bit per dimension."""

    floats: list[list[float]] | None = Field(None, alias="float")
    binary: list[list[int]] | None = None
    ubinary: list[list[int]] | None = None
    base64: list[str] | None = None


class BilledUnits(BaseModel):
    """Numbers of text tokens and of image tokens in all inputs."""

    input_tokens: int
    image_tokens: int


class ApiVersion(BaseModel):
    """Version of Cohere's API."""

    version: Literal["2"]


class CohereMeta(BaseModel):
    """API version and token counts."""

    api_version: ApiVersion
    billed_units: BilledUnits


class CohereReply(BaseModel):
    """The reply of /v2/embed."""

    id: str
    embeddings: CohereEmbeddings
    texts: list[str] | None = None
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"]


async def create_cohere_embeddings(api: GenerationService, body: CohereBody, request: Request) -> Response:
    """Compute an embedding for each input, in the format of Cohere's API."""
    fields = {
        "model": body.model,
        "priority": body.priority,
        "request_id": body.request_id,
        "dimensions": body.output_dimension,
        "truncate_prompt_tokens": None if body.truncate == "NONE" else body.max_tokens or -1,
        "truncation_side": "left" if body.truncate == "START" else "right",
    }
    options = VectorOptions.model_validate(fields)
    instruction, (field, inputs) = _instruction(api, body.input_type), _inputs_of(body)
    check_fields(body)
    model = await api.names.find(body.model, request, pools=True)
    api.check_count(len(inputs), "inputs", param=field)
    has_template = api.reader.has_template(model)
    named_inputs = [
        (name, _read_input(instruction, name, value, has_template=has_template))
        for name, value in name_inputs(field, inputs)
    ]
    wait = partial(api.running_requests.until_disconnect, request.receive)
    prompts = await api.reader.read_inputs(named_inputs, options, model, wait=wait)
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if body.truncate == "NONE" and body.max_tokens is not None and longest > body.max_tokens:
        raise RequestError(
            f"Input of {longest} tokens exceeds max_tokens={body.max_tokens} with truncate=NONE. Set "
            "truncate to END or START to allow truncation.",
            param="max_tokens",
        )
    call, outputs = await pool(
        api, "embd", options, request, model, prompts, task="embed", dimensions=options.dimensions
    )
    vectors = np.stack([output.outputs.data for output in outputs]).astype(np.float32)
    kinds: set[Kind] = set(body.embedding_types or ["float"])
    embeddings = await off_loop(
        vectors.size, lambda: {kind: _convert(kind, vectors) for kind in sorted(kinds)}
    )
    reply: dict[str, Any] = {"id": call.id, "embeddings": embeddings}
    if body.texts is not None:
        reply["texts"] = body.texts
    num_image = sum(item.length for prompt in prompts if prompt.media for item in prompt.media.items)
    units = {"input_tokens": call.num_prompt_tokens - num_image, "image_tokens": num_image}
    reply["meta"] = {"api_version": {"version": "2"}, "billed_units": units}
    return json_response(reply | {"response_type": "embeddings_by_type"})


def _inputs_of(body: CohereBody) -> tuple[str, Sequence[str | MixedInput]]:
    """Return the name and the inputs of the only field of texts, inputs and images that is set. An image
    becomes an input with one content part."""
    values = {"texts": body.texts, "inputs": body.inputs, "images": body.images}
    present = [(name, value) for name, value in values.items() if value is not None]
    if len(present) != 1:
        raise RequestError(
            "Exactly one of texts, images, or inputs must be provided, and it must be non-empty",
            param="texts",
        )
    (field, inputs), *_ = present
    if body.images is None:
        return field, cast(Sequence[str | MixedInput], inputs)
    return field, [
        MixedInput(content=[ContentPart(type="image_url", image_url={"url": url})]) for url in body.images
    ]


def _read_input(
    instruction: str, name: str, input: str | MixedInput, *, has_template: bool
) -> str | ScoreInputs:
    """Return the input with the instruction prepended: a text, or content parts if it has images or
    `has_template` is true. `name`: the input's name in errors."""
    if isinstance(input, str):
        return instruction + input
    for part in input.content:
        if getattr(part, part.type) is None:
            raise RequestError(f"{name}: a part with type={part.type!r} requires {part.type}", param="inputs")
    texts = [part.text or "" for part in input.content if part.type == "text"]
    if len(texts) == len(input.content) and not has_template:
        return instruction + "".join(texts)
    parts = [
        {"type": "text", "text": instruction + (part.text or "")}
        if part.type == "text"
        else {"type": "image_url", "image_url": part.image_url}
        for part in input.content
    ]
    side = ScoreInput.of("user", parts, name)
    if name.startswith("images"):
        side.items[0].place = name
    return ScoreInputs((side,), is_chat=has_template)


def _instruction(api: GenerationService, input_type: str | None) -> str:
    if input_type is None:
        return ""
    pooling = api.engine.inputs.pooling
    known = dict(pooling.instructions if pooling else ())
    if not known:
        reason = "This model does not define any input_type task instructions."
    elif input_type not in known:
        reason = f"Supported values: {', '.join(sorted(known))}"
    else:
        return known[input_type]
    raise RequestError(f"Unsupported input_type {input_type!r}. {reason}", param="input_type")


def _convert(kind: Kind, vectors: NDArray[np.float32]) -> list[Any]:
    if kind == "float":
        return list(vectors.tolist())
    if kind == "base64":
        return [base64.b64encode(pack_values(vector, "float32", "little")).decode() for vector in vectors]
    if vectors.shape[1] % 8:
        raise RequestError(
            f"Embedding dimension must be a multiple of 8 for binary embedding types, but got "
            f"{vectors.shape[1]}.",
            param="embedding_types",
        )
    bits = np.packbits(vectors >= 0, axis=1)
    return list((bits if kind == "ubinary" else bits.astype(np.int16) - 128).tolist())
