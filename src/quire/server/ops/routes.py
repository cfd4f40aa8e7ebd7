"""Routes for operators: sleep, pause, worker calls and server information. Most exist only in developer mode
(VLLM_SERVER_DEV_MODE=1)."""

import os
import platform
from typing import Annotated, Any, Literal

import msgspec
from fastapi import FastAPI, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from quire.config.env import PREFIXES
from quire.data.control import TAGS, check_choice
from quire.errors import RequestError
from quire.logs import get_logger
from quire.server.http.errors import json_response
from quire.server.http.openapi_document import replies_of
from quire.server.openai.replies import ResetReply, reply_model
from quire.server.openai.requests import Many
from quire.server.openai.service import GenerationService
from quire.server.ops.weights import add_weight_routes
from quire.text.tokenizer import Tokenizer

logger = get_logger(__name__)

Mode = Literal["abort", "wait", "keep"]
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")
_MAX_IDS = 10_000


class RpcBody(BaseModel):
    """The body of /collective_rpc: the name of a worker method, its arguments, and `timeout`, the seconds
    after which the request fails; null: no limit."""

    method: str = Field(min_length=1, max_length=200)
    args: Many[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = Field(default=None, gt=0, allow_inf_nan=False)


RpcReply = reply_model("RpcReply", "Results of a worker method, by worker.", results=list[Any])


class AbortBody(BaseModel):
    """The body of /abort_requests: ids of requests, as responses contain them; no ids mean all requests."""

    model_config = ConfigDict(extra="forbid")  # a misspelled key must not abort all requests
    request_ids: Many[str] = Field(default=[], max_length=_MAX_IDS)


AbortReply = reply_model("AbortReply", "Number of aborted sequences.", status=Literal["aborted"], aborted=int)
StateReply = reply_model(
    "StateReply", "State of the engine after the call.", status=Literal["paused", "resumed"]
)
SleepingReply = reply_model(
    "SleepingReply", "Whether the engine sleeps, with its memory released.", is_sleeping=bool
)
PausedReply = reply_model("PausedReply", "Whether the engine is paused.", is_paused=bool)
WorldReply = reply_model("WorldReply", "Number of workers.", world_size=int)
_CODES = (400, 500, 503)


def add_operate_routes(app: FastAPI, api: GenerationService) -> None:
    """Add the operator routes that the settings enable."""
    settings = api.settings
    if settings.api.enable_tokenizer_info_endpoint:
        _add_tokenizer_info(app, api)
    if api.engine.operation.settings.get("observability", {}).get("profiler_config", {}).get("profiler"):
        _add_profile_routes(app, api)
    if settings.dev_mode or settings.api.tokens_only:
        _add_abort_route(app, api)
    if settings.dev_mode:
        logger.warning(
            "SECURITY WARNING: Development endpoints, which stop the engine and show its settings, are "
            "enabled! This should NOT be used in production!"
        )
        _add_pause_routes(app, api)
        _add_sleep_routes(app, api)
        _add_worker_routes(app, api)
        _add_cache_routes(app, api)
        add_weight_routes(app, api)


def _add_pause_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/pause", **replies_of(StateReply, *_CODES))
    async def pause(
        mode: Mode = "abort", clear_cache: bool = True, wait_for_inflight_requests: bool = False
    ) -> Response:
        """Pause the engine; new requests wait. By `mode`, running requests are aborted (`abort`), finished
        first (`wait`) or continued after /resume (`keep`). `clear_cache` drops cached prefixes, and kept
        requests compute their tokens again. `wait_for_inflight_requests` is the old name of `wait`."""
        await api.engine.operation.pause(
            "wait" if wait_for_inflight_requests else mode, clear_cache=clear_cache
        )
        return json_response({"status": "paused"})

    @app.post("/resume", **replies_of(StateReply, *_CODES))
    async def resume() -> Response:
        """Resume the engine after /pause: it runs requests again."""
        await api.engine.operation.resume()
        return json_response({"status": "resumed"})

    @app.get("/is_paused", **replies_of(PausedReply, *_CODES))
    async def is_paused() -> Response:
        return json_response({"is_paused": await api.engine.operation.is_paused()})


def _add_abort_route(app: FastAPI, api: GenerationService) -> None:
    @app.post("/abort_requests", **replies_of(AbortReply, *_CODES))
    async def abort_requests(body: AbortBody) -> Response:
        """Abort the requests with these ids, or all if there are none, also those of other API processes;
        return how many sequences were aborted."""
        aborted = await api.engine.operation.abort(body.request_ids or None)
        return json_response({"status": "aborted", "aborted": aborted})


def _add_sleep_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/sleep", **replies_of(None, *_CODES))
    async def sleep(level: Annotated[int, Query(ge=0, le=2)] = 1, mode: Mode = "abort") -> Response:
        """Release memory: level 1 offloads the weights to host memory and drops the KV cache, level 2 drops
        both, level 0 only pauses. `mode` decides on running requests, as for /pause."""
        await api.engine.operation.sleep(level, mode)
        return Response(status_code=200)

    @app.post("/wake_up", **replies_of(None, *_CODES))
    async def wake_up(tags: Annotated[list[str] | None, Query()] = None) -> Response:
        """Restore the memory that /sleep released: all of it, or by `tags` the `weights` or the `kv_cache`.
        Requests run again when all is restored."""
        for tag in tags or ():
            check_choice("tags", tag, TAGS)
        await api.engine.operation.wake_up(tags)
        return Response(status_code=200)

    @app.get("/is_sleeping", **replies_of(SleepingReply, *_CODES))
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": await api.engine.operation.is_sleeping()})


def _add_worker_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/collective_rpc", **replies_of(RpcReply, *_CODES))
    async def collective_rpc(body: RpcBody) -> Response:
        """Call a public method of every worker and return its results, one per worker."""
        results = await api.engine.operation.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
        try:
            return json_response({"results": results})
        except (TypeError, ValueError) as error:
            raise RequestError(f"{body.method} returned a value that is not JSON: {error}") from None

    @app.get("/get_world_size", **replies_of(WorldReply, *_CODES))
    async def get_world_size(include_dp: bool = True) -> Response:
        """Return the number of workers of all engines, or of one engine without `include_dp`."""
        parallel = api.engine.operation.settings["parallel"]
        names = ["tensor_parallel_size", "pipeline_parallel_size", *["data_parallel_size"] * include_dp]
        size = 1
        for name in names:
            size *= parallel[name]
        return json_response({"world_size": size})

    @app.get("/server_info", **replies_of(dict, *_CODES))
    async def server_info(config_format: Literal["text", "json"] = "text") -> Response:
        """Return the engine's effective settings and its environment, without secrets."""
        settings = api.engine.operation.settings
        lines = [
            f"{section}.{name}={value!r}" for section in settings for name, value in settings[section].items()
        ]
        config = _with_vllm_names(settings) if config_format == "json" else "\n".join(lines)
        body = {
            "vllm_config": config,
            "vllm_env": _environment(),
            "system_env": {
                "os": platform.platform(),
                "python": platform.python_version(),
                "cpu_count": os.cpu_count(),
            },
            "weight_version": api.engine.operation.weight_version,
        }
        return Response(msgspec.json.encode(body, enc_hook=str), media_type="application/json")


def _add_cache_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/reset_prefix_cache", **replies_of(ResetReply, *_CODES))
    async def reset_prefix_cache(
        reset_running_requests: bool = False, reset_external: bool = False
    ) -> Response:
        """Clear the prefix cache, with `reset_external` also its part outside of device memory. `success` is
        false while requests hold blocks, unless `reset_running_requests` makes them start again."""
        return json_response(
            {"success": await api.engine.operation.reset_prefix_cache(reset_running_requests, reset_external)}
        )

    @app.post("/reset_mm_cache", operation_id="reset_mm_cache", **replies_of(ResetReply, *_CODES))
    async def reset_mm_cache() -> Response:
        """Clear the cache of processed images, videos and audio."""
        await api.engine.operation.reset_mm_cache()
        return json_response({"success": True})

    @app.post("/reset_encoder_cache", operation_id="reset_encoder_cache", **replies_of(ResetReply, *_CODES))
    async def reset_encoder_cache() -> Response:
        """Drop the encoder outputs that no request needs. `success`: whether the cache is empty now."""
        return json_response({"success": await api.engine.operation.reset_encoder_cache()})


def _add_profile_routes(app: FastAPI, api: GenerationService) -> None:
    @app.post("/start_profile", **replies_of(None, *_CODES))
    async def start_profile() -> Response:
        """Start the profiler of the workers."""
        await api.engine.operation.profile(True)
        return Response(status_code=200)

    @app.post("/stop_profile", **replies_of(None, *_CODES))
    async def stop_profile() -> Response:
        """Stop the profiler and write its results."""
        await api.engine.operation.profile(False)
        return Response(status_code=200)


def _add_tokenizer_info(app: FastAPI, api: GenerationService) -> None:
    @app.get("/tokenizer_info", **replies_of(dict, 404, *_CODES))
    async def show_tokenizer_info(request: Request, model: str | None = None) -> Response:
        """Return the special tokens and the chat template of the tokenizer of the model or an adapter."""
        requested = await api.names.find(model, request)
        return json_response(tokenizer_info(requested.need_tokenizer(), requested.inputs.max_model_len))


def tokenizer_info(tokenizer: Tokenizer, max_len: int) -> dict[str, Any]:
    """Return the tokenizer's properties, with the names of tokenizer_config.json."""
    added = sorted(tokenizer.added_vocab.items(), key=lambda item: item[1])
    return {
        "tokenizer_class": type(tokenizer).__name__,
        "model_max_length": max_len,
        "vocab_size": tokenizer.vocab_size,
        **{name: getattr(tokenizer, name) for name in _TOKEN_NAMES},
        "added_tokens_decoder": {
            str(id): {"content": text, "special": tokenizer.is_special(id)} for text, id in added
        },
        "chat_template": tokenizer.chat_template,
    }


def _with_vllm_names(settings: Any) -> dict[str, Any]:
    """Return the settings, with the sections that clients of vLLM read also under vLLM's names."""
    lora = settings.get("lora", {})
    return {
        **settings,
        "model_config": settings.get("model"),
        "parallel_config": settings.get("parallel"),
        "lora_config": lora if lora.get("enable_lora") else None,
        "weight_transfer_config": settings.get("extensions", {}).get("weight_transfer_config") or None,
    }


def _environment() -> dict[str, str]:
    """Return the environment variables of Quire and vLLM, without secrets."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.partition("_")[0] in PREFIXES and not any(word in name for word in _SECRET)
    }
