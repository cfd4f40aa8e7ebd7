"""Routes for operators: sleep, pause, calls of workers, what the engine is made of. Most are there in
developer mode only (VLLM_SERVER_DEV_MODE=1)."""

import os
import platform
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query
from pydantic import BaseModel, Field
from starlette.responses import Response

from quire.config.env import PREFIXES
from quire.data.control import TAGS, check_choice
from quire.errors import RequestError
from quire.logs import get_logger
from quire.server.http.document import replies_of
from quire.server.http.errors import json_response
from quire.server.openai.replies import ResetReply
from quire.server.openai.requests import Many
from quire.server.openai.service import GenerationService
from quire.text.tokenizer import Tokenizer

logger = get_logger(__name__)

Mode = Literal["abort", "wait", "keep"]
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")
_MOST_IDS = 10_000


class RpcBody(BaseModel):
    """A method of the workers, and what it is given."""

    method: str = Field(min_length=1, max_length=200)
    args: Many[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class RpcReply(BaseModel):
    """What it returned, by worker."""

    results: list[Any]


class AbortBody(BaseModel):
    """Requests by their ids, as answers carry them."""

    request_ids: Many[str] = Field(max_length=_MOST_IDS)


class AbortReply(BaseModel):
    """How many sequences were ended."""

    aborted: int


class StateReply(BaseModel):
    """What has become of the engine."""

    status: Literal["paused", "resumed"]


class SleepingReply(BaseModel):
    """Whether memory is given back."""

    is_sleeping: bool


class PausedReply(BaseModel):
    """Whether no steps are taken."""

    is_paused: bool


class WorldReply(BaseModel):
    """Workers in all."""

    world_size: int


_CODES = (400, 500, 503)


def add_operate_routes(app: FastAPI, api: GenerationService) -> None:
    """Those that the settings ask for."""
    settings = api.settings
    if settings.api.enable_tokenizer_info_endpoint:
        _add_tokenizer_info(app, api)
    if api.engine.operation.settings.get("observability", {}).get("profiler_config", {}).get("profiler"):
        _add_profile_routes(app, api)
    if settings.dev_mode or settings.api.tokens_only:
        _add_abort_route(app, api)
    if settings.dev_mode:
        logger.warning("Developer mode: routes are open that stop the engine and show its settings")
        _add_rest_routes(app, api)
        _add_sleep_routes(app, api)
        _add_worker_routes(app, api)
        _add_cache_routes(app, api)


def _add_rest_routes(app: FastAPI, api: GenerationService) -> None:
    operation = api.engine.operation

    @app.post("/pause", **replies_of(StateReply, *_CODES))
    async def pause(mode: Mode = "abort", clear_cache: bool = True) -> Response:
        """Take no more steps. Running requests end, are waited for, or are kept; new ones wait."""
        await operation.pause(mode, clear_cache=clear_cache)
        return json_response({"status": "paused"})

    @app.post("/resume", **replies_of(StateReply, *_CODES))
    async def resume() -> Response:
        """Take steps again."""
        await operation.resume()
        return json_response({"status": "resumed"})

    @app.get("/is_paused", **replies_of(PausedReply, *_CODES))
    async def is_paused() -> Response:
        return json_response({"is_paused": await operation.is_paused()})


def _add_abort_route(app: FastAPI, api: GenerationService) -> None:
    @app.post("/abort_requests", **replies_of(AbortReply, *_CODES))
    async def abort_requests(body: AbortBody) -> Response:
        """End requests, whoever answers them."""
        return json_response({"aborted": await api.engine.operation.abort(body.request_ids)})


def _add_sleep_routes(app: FastAPI, api: GenerationService) -> None:
    operation = api.engine.operation

    @app.post("/sleep", **replies_of(None, *_CODES))
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort") -> Response:
        """Give memory back: weights to the host (1) or dropped (2), the cache dropped."""
        await operation.sleep(level, mode)
        return Response(status_code=200)

    @app.post("/wake_up", **replies_of(None, *_CODES))
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Take it back, all or by tags (weights, kv_cache), and go on."""
        for tag in tags or ():
            check_choice("tags", tag, TAGS)
        await operation.wake_up(tags)
        return Response(status_code=200)

    @app.get("/is_sleeping", **replies_of(SleepingReply, *_CODES))
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await operation.is_sleeping()})


def _add_worker_routes(app: FastAPI, api: GenerationService) -> None:
    operation = api.engine.operation

    @app.post("/collective_rpc", **replies_of(RpcReply, *_CODES))
    async def collective_rpc(body: RpcBody) -> Response:
        """Call a public method of every worker."""
        found = await operation.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
        try:
            return json_response({"results": found})
        except (TypeError, ValueError) as error:
            raise RequestError(f"{body.method} returned what is no JSON: {error}") from None

    @app.get("/get_world_size", **replies_of(WorldReply, *_CODES))
    async def get_world_size(include_dp: bool = True) -> Response:
        """Workers of all engines, or of one."""
        parallel = operation.settings["parallel"]
        names = ["tensor_parallel_size", "pipeline_parallel_size", *["data_parallel_size"] * include_dp]
        size = 1
        for name in names:
            size *= parallel[name]
        return json_response({"world_size": size})

    @app.get("/server_info", **replies_of(dict, *_CODES))
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        """The engine's settings as they came out, and where it runs; nothing secret."""
        found = operation.settings
        config = found if config_format == "json" else "\n".join(_lines(found))
        body = {"vllm_config": config, "vllm_env": _environment(), "system_env": _system()}
        return Response(msgspec.json.encode(body, enc_hook=str), media_type="application/json")


def _add_cache_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/reset_prefix_cache", **replies_of(ResetReply, *_CODES))
    async def reset_prefix_cache(reset_running_requests: bool = False) -> Response:
        """Forget all cached prefixes; false while requests hold some, unless these are to start again."""
        return json_response({"success": await api.engine.reset_prefix_cache(reset_running_requests)})

    @app.post("/reset_mm_cache", operation_id="reset_mm_cache", **replies_of(ResetReply, *_CODES))
    async def reset_mm_cache() -> Response:
        """Forget the images, videos and sounds that were processed: the next ones are read anew."""
        await api.engine.reset_mm_cache()
        return json_response({"success": True})

    @app.post("/reset_encoder_cache", operation_id="reset_encoder_cache", **replies_of(ResetReply, *_CODES))
    async def reset_encoder_cache() -> Response:
        """Forget the vectors of those that no request needs. Whether that is all."""
        return json_response({"success": await api.engine.operation.reset_encoder_cache()})


def _add_profile_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/start_profile", **replies_of(None, *_CODES))
    async def start_profile() -> Response:
        """Record what the workers do from now on."""
        await api.engine.operation.profile(True)
        return Response(status_code=200)

    @app.post("/stop_profile", **replies_of(None, *_CODES))
    async def stop_profile() -> Response:
        """Write down what was recorded."""
        await api.engine.operation.profile(False)
        return Response(status_code=200)


def _add_tokenizer_info(app: FastAPI, api: GenerationService) -> None:
    @app.get("/tokenizer_info", **replies_of(dict, 404, *_CODES))
    async def show_tokenizer_info(model: str | None = None) -> Response:
        """The tokenizer, of the model or of an adapter: its special tokens and its chat template."""
        await api.check_model(model)
        tokenizer = api.inputs_of(model).tokenizer
        if tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
        return json_response(tokenizer_info(tokenizer, api.engine.inputs.max_model_len))


def tokenizer_info(tokenizer: Tokenizer, max_len: int) -> dict[str, Any]:
    """In the words of a tokenizer_config.json."""
    added = sorted(tokenizer.added_vocab.items(), key=lambda item: item[1])
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": max_len,
        "vocab_size": tokenizer.vocab_size,
        **{name: getattr(tokenizer, name) for name in _NAMED},
        "added_tokens_decoder": {
            str(id): {"content": text, "special": tokenizer.is_special(id)} for text, id in added
        },
        "chat_template": tokenizer.chat_template,
    }


def _lines(settings: Any) -> list[str]:
    return [f"{section}.{name}={value!r}" for section, of in settings.items() for name, value in of.items()]


def _environment() -> dict[str, str]:
    """The variables that are Quire's or vLLM's, without those that are nobody's business."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.partition("_")[0] in PREFIXES and not any(word in name for word in _SECRET)
    }


def _system() -> dict[str, Any]:
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "cpu_count": os.cpu_count(),
    }
