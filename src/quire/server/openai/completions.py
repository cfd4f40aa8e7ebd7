"""The route /v1/completions."""

from starlette.requests import Request
from starlette.responses import Response

from quire.errors import RequestError
from quire.server.openai.api_call import ApiCall, new_call
from quire.server.openai.completion_encoder import CompletionEncoder
from quire.server.openai.requests import CompletionBody
from quire.server.openai.run_call import answer_call
from quire.server.openai.sampling_params import check_generate, completion_params
from quire.server.openai.service import GenerationService, releases_prefix
from quire.server.openai.tools import constraint_of
from quire.server.openai.work_size import off_loop, params_size


@releases_prefix
async def create_completion(api: GenerationService, body: CompletionBody, request: Request) -> Response:
    """Create completions of one or more prompts, as one response or as a stream of events."""
    call = await begin_completion(api, body, request)
    return await answer_call(api, call, CompletionEncoder(api, body, call), request, stream=bool(body.stream))


async def begin_completion(api: GenerationService, body: CompletionBody, request: Request) -> ApiCall:
    """Check a completion request and prepare its engine call: prompts and sampling parameters."""
    model = await api.names.find(body.model, request, pools=False)
    check_generate(body, max_n=api.settings.api.max_n)
    if body.suffix:
        raise RequestError("suffix is not currently supported", param="suffix")
    prompts = await api.reader.read_completion(body, model, max_sequences=api.settings.max_sequences)
    constraint, size = constraint_of(body), params_size(body) * len(prompts)
    params = await off_loop(size, lambda: completion_params(body, model, prompts, constraint))
    return new_call(api, "cmpl", body, request, model, prompts, params)
