"""Base of the encoders of chunks with choices."""

import base64
import io
from typing import Any

import numpy as np

from quire.data.outputs import CompletionOutput, RequestOutput, RequestStateStats
from quire.server.http.sse import DONE, AnswerEncoder, event
from quire.server.openai.api_call import ApiCall
from quire.server.openai.requests import StreamOptions
from quire.server.openai.service import GenerationService


class ChunkEncoder(AnswerEncoder):
    """Base of the encoders for APIs whose replies and stream chunks have a list `choices`. A stream ends with
    the usage if usage was requested."""

    def __init__(
        self,
        api: GenerationService,
        call: ApiCall,
        *,
        object: str,
        options: StreamOptions | None,
        num_choices: int,
    ) -> None:
        self._api, self._call, self._num_choices = api, call, num_choices
        forced = api.settings.api.enable_force_include_usage
        include_usage = bool(options and options.include_usage)
        self._usage = forced or include_usage or call.timeline is not None
        self._usage_in_every_chunk = forced or (
            include_usage and bool(options and options.continuous_usage_stats)
        )
        self._frame, self._num_prompt = call.frame(object), call.num_prompt_tokens
        self._num_output = [0] * num_choices
        self._num_cached: int | None = None
        self._num_created: int | None = None
        self._stats: RequestStateStats | None = None

    def finish(self) -> bytes:
        return event(self._frame | {"choices": []} | self._final_fields()) + DONE if self._usage else DONE

    def _final_fields(self) -> dict[str, Any]:
        """Return the fields of the last chunk: usage, fingerprint and, if enabled, timings."""
        metrics = self._api.metrics(self._stats, self._num_choices)
        fields = {"usage": self._final_usage(), "system_fingerprint": self._api.fingerprint}
        return fields if metrics is None else fields | {"metrics": metrics}

    def _final_usage(self) -> dict[str, Any]:
        """Return the usage of a whole stream or response."""
        return self._api.usage(
            self._num_prompt,
            sum(self._num_output),
            self._num_cached,
            self._call.timeline,
            stats=self._stats,
            num_created=self._num_created,
            hints=self._call.hints,
        )

    def _build_reply(
        self,
        object: str,
        choices: list[dict[str, Any]],
        output: RequestOutput,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the body of a response that is not streamed. `output`: the output of the first prompt."""
        return {
            **self._call.frame(object),
            "choices": choices,
            "service_tier": None,
            "system_fingerprint": self._api.fingerprint,
            "usage": self._final_usage(),
            **more,
            "kv_transfer_params": output.kv_transfer_params,
            "metrics": self._api.metrics(output.metrics, len(choices)),
        }


def transfer_field(output: RequestOutput) -> dict[str, Any]:
    """Return the field of a reply that names the prefix kept for another engine; no field if none is kept."""
    params = output.kv_transfer_params
    return {} if params is None else {"kv_transfer_params": params}


def routed_experts(output: CompletionOutput) -> dict[str, str]:
    """Return the field of a choice with the routed experts of its tokens, a numpy array in base64; no field
    if the engine did not return them."""
    if output.routed_experts is None:
        return {}
    file = io.BytesIO()
    np.save(file, output.routed_experts)
    return {"routed_experts": base64.b64encode(file.getvalue()).decode()}
