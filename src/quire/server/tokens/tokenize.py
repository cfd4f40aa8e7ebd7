"""Handlers of /tokenize and /detokenize."""

from starlette.responses import Response

from quire.errors import RequestError
from quire.server.http.errors import json_response
from quire.server.openai.prompts import off_loop
from quire.server.openai.requests import DetokenizeBody, TokenizeChat, TokenizeText
from quire.server.openai.sampling_params import check_contents, check_fields, check_template
from quire.server.openai.service import GenerationService
from quire.text.tokenizer import Tokenizer

_MAX_IDS = 1 << 17
"""Minimum of the limit on detokenized ids per request. Decoding holds the GIL for tens of milliseconds."""


def _tokenizer(api: GenerationService, model: str | None) -> Tokenizer:
    tokenizer = api.inputs_of(model).tokenizer
    if tokenizer is None:
        raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
    return tokenizer


async def tokenize(api: GenerationService, body: TokenizeText | TokenizeChat) -> Response:
    await api.check_model(body.model)
    check_fields(body)
    tokenizer, max_model_len = _tokenizer(api, body.model), api.engine.inputs.max_model_len
    if isinstance(body, TokenizeChat):
        check_contents(body)
        check_template(body.chat_template, api.settings.api.trust_request_chat_template)
        ids = (await api.reader.count(body)).token_ids
    else:
        text, special = body.prompt, body.add_special_tokens
        api.engine.inputs.check_chars(text)
        ids = await off_loop(len(text), lambda: tokenizer.encode(text, add_special_tokens=special))

    def encode() -> Response:
        spelled = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        return json_response(
            {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": spelled}
        )

    return await off_loop(len(ids), encode)


async def detokenize(api: GenerationService, body: DetokenizeBody) -> Response:
    await api.check_model(body.model)
    check_fields(body)
    tokenizer, ids = _tokenizer(api, body.model), body.tokens
    limit = max(api.engine.inputs.max_model_len, _MAX_IDS)
    if len(ids) > limit:
        raise RequestError(
            f"{len(ids)} token ids are too many: at most {limit} are allowed per request (max_model_len, or "
            f"{_MAX_IDS} if that is more): send them in parts",
            param="tokens",
        )
    vocab = api.inputs_of(body.model).vocab
    if ids and max(ids) >= vocab:
        raise RequestError(
            f"Token id {max(ids)} is out of vocabulary: ids of this model are 0 to {vocab - 1}",
            param="tokens",
        )
    return await off_loop(
        len(ids), lambda: json_response({"prompt": tokenizer.decode(ids, skip_special_tokens=False)})
    )
