"""Engine without a model: it answers every prompt with a scripted text, one byte per token, through the real
input and output processors."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from quire.checkpoint.pooling import PoolingFacts
from quire.configure import vocabulary_of
from quire.data.latency_target import LatencyTarget
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.outputs import RequestOutput
from quire.data.params import SamplingParams
from quire.data.pooling import Floats, PoolingParams
from quire.data.pooling_outputs import PoolingOutput, PoolingRequestOutput
from quire.data.prefix_miss import PrefixMiss
from quire.data.request import Request
from quire.data.routed_experts import RoutedRows
from quire.data.step_plan import FinishReason, FirstRun, RowLogprobs, StepOutput
from quire.errors import EngineDead, EngineError, RequestError
from quire.frontend.checked_params import CheckedParams
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.outputs import OutputProcessor
from quire.metrics.api_keys import KeyAccount
from quire.metrics.http import Exchange
from quire.text.grammar import Grammars
from quire.text.tokenizer import Tokenizer

VOCAB = 258
EOS = 257
ANSWER = "Hello, world! Żółw."
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
    "{% if documents %}docs:{{ documents | length }}\n{% endif %}"
    "{% if tools %}tools:{{ tools | length }}\n{% endif %}"
    "{% if mood is defined %}mood:{{ mood }}\n{% endif %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per byte and two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(
        backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, chat_template=TEMPLATE
    )


def numbers(ids: list[int], size: int, *, by_token: bool = False) -> Floats:
    """Return the deterministic pooled vector of these tokens."""
    vectors = np.sin(np.outer(ids, np.arange(1, size + 1))).astype(np.float32)
    return vectors if by_token else vectors.mean(0)


@dataclass
class FakeFacts:
    model_names: tuple[str, ...] = ("fake", "also-fake")
    vocab: int = VOCAB
    max_logprobs: int = 20
    root: str = "models/fake"
    default_sampling: dict[str, Any] = field(default_factory=dict)
    chat_template: str | None = None
    version: str = "1.2.3"
    start_time: float = 1_700_000_000.0


class FakeOperation:
    """Records operator calls; `error` is raised by all that change state."""

    def __init__(self, engine: "FakeEngine") -> None:
        self._engine = engine
        self.settings: dict[str, dict[str, Any]] = {
            "parallel": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 3}
        }
        self.calls: list[tuple[Any, ...]] = []
        self.results: list[Any] = [7, "x"]
        self.error: Exception | None = None
        self.paused = False
        self.weight_version = "default"

    def _record(self, *call: Any) -> None:
        if self.error is not None:
            raise self.error
        self.calls.append(call)

    async def pause(self, mode: str = "abort", *, clear_cache: bool = True) -> None:
        self._record("pause", mode, clear_cache)
        self.paused = True

    async def resume(self) -> None:
        self._record("resume")
        self.paused = False

    async def is_paused(self) -> bool:
        return self.paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._record("sleep", level, mode)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self._record("wake_up", tags)

    async def is_sleeping(self) -> bool:
        return False

    async def collective_rpc(
        self, method: str, timeout: float | None, args: list[Any], kwargs: dict[str, Any]
    ) -> list[Any]:
        self._record("collective_rpc", method, timeout, args, kwargs)
        return self.results

    async def profile(self, start: bool, prefix: str | None = None) -> None:
        self._record("profile", start)

    async def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._record("init_weight_transfer_engine", init_info)

    async def start_weight_update(self) -> None:
        self._record("start_weight_update")

    async def update_weights(self, update_info: dict[str, Any]) -> None:
        self._record("update_weights", update_info)

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._record("finish_weight_update", weight_version)
        self.weight_version = weight_version or self.weight_version

    async def update_weight_version(self, new_version: str) -> None:
        self._record("update_weight_version", new_version)
        self.weight_version = new_version

    async def reset_encoder_cache(self) -> bool:
        self._record("reset_encoder_cache")
        return False

    async def reset_mm_cache(self) -> None:
        self._record("reset_mm_cache")

    async def abort(self, request_ids: list[str] | None) -> int:
        self._record("abort", *(["all"] if request_ids is None else request_ids))
        return len(request_ids or ())

    async def add_adapter(self, lora: LoRARequest) -> AdapterFacts:
        """Accept any adapter with a config file that is not empty."""
        await asyncio.sleep(self._engine.step_s)
        if self._engine.addition_error is not None:
            raise self._engine.addition_error
        if not Path(lora.lora_path, "adapter_config.json").read_bytes():
            wrong = "layers.0.q_proj.lora_A.weight has shape (1, 2), expected (1, 3)"
            raise RequestError(wrong, param="lora_request")
        self._engine.adapters[lora.lora_name] = lora
        return AdapterFacts(b"digest", 8, 1024)

    async def remove_adapter(self, name: str) -> bool:
        if self._engine.removal_error is not None:
            raise self._engine.removal_error
        self._engine.removals.append((name, self._engine.num_in_flight))
        return self._engine.adapters.pop(name, None) is not None

    async def reset_prefix_cache(self, running: bool = False, external: bool = False) -> bool:
        self._engine.num_resets += 1
        self._engine.resets_running = running
        return True


def labels_logprobs(token: int, labels: Sequence[int]) -> RowLogprobs:
    """Return logprobs that decrease with the token id."""
    return RowLogprobs([token, *labels], [-0.01 * (id + 1) for id in (token, *labels)], 1)


class FakeEngine:
    """`step_s` is the pause before each token; `fail_after` fails every request after that many tokens."""

    def __init__(
        self,
        answer: str = ANSWER,
        *,
        step_s: float = 0.0,
        fail_after: int | None = None,
        max_model_len: int = 512,
        pooling: PoolingFacts | None = None,
    ) -> None:
        self.facts = FakeFacts()
        self.operation = FakeOperation(self)
        self.tokenizer = byte_tokenizer()
        self.inputs = InputProcessor(
            tokenizer=self.tokenizer,
            vocab=VOCAB,
            max_model_len=max_model_len,
            eos_ids=[EOS],
            max_logprobs=self.facts.max_logprobs,
            seed=0,
            pooling=pooling,
            grammars=Grammars(lambda: vocabulary_of(self.tokenizer, VOCAB, (EOS,))),
        )
        self.script = [*self.tokenizer.encode(answer, add_special_tokens=False), EOS]
        self.step_s, self.fail_after = step_s, fail_after
        self.adapters: dict[str, LoRARequest] = {}
        self.addition_error: Exception | None = None
        self.removal_error: Exception | None = None
        self.removals: list[tuple[str, int]] = []
        """Adapter names, each with the number of requests in flight at its removal."""
        self.loras: list[LoRARequest | None] = []
        self.targets: list[LatencyTarget | None] = []
        """LoRA request of each request, in order."""
        self.seen: list[tuple[str, Prompt, SamplingParams, int]] = []
        self.pooled: list[tuple[str, Prompt, PoolingParams, int]] = []
        self.aborted: list[str] = []
        self.num_in_flight = 0
        self.dead: str | None = None
        self.returns_experts = False
        """Whether each token is routed to the expert of its number, modulo 8, in a single layer, and was the
        only possible one."""
        self.num_created = 0
        self.miss: PrefixMiss | None = None
        self.num_resets = 0
        self.resets_running = False
        self.exchanges: list[Exchange] = []

    def observe_exchange(self, exchange: Exchange) -> None:
        self.exchanges.append(exchange)

    def check(self) -> None:
        if self.dead:
            raise EngineDead(self.dead)

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | CheckedParams,
        request_id: str,
        *,
        priority: int = 0,
        rank: int | None = None,
        timed: bool = False,
        account: KeyAccount | None = None,
        lora: LoRARequest | None = None,
        target: LatencyTarget | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        self.check()
        self.loras.append(lora)
        self.targets.append(target)
        if rank not in (None, 0):
            raise RequestError(f"data_parallel_rank {rank} is out of range: there is only rank 0")
        engine_id = f"{request_id}-{len(self.seen)}"  # as the real engine, it makes ids unique
        requests = self.inputs.requests(engine_id, prompt, params, priority=priority, timed=timed)
        sampling = params.params if isinstance(params, CheckedParams) else params
        self.seen.append((request_id, prompt, sampling, priority))
        return self._stream(engine_id, prompt, requests, account)

    async def _stream(
        self, id: str, prompt: Prompt, requests: list[Request], account: KeyAccount | None
    ) -> AsyncGenerator[RequestOutput, None]:
        outputs = OutputProcessor(self.tokenizer)
        outputs.add(id, prompt, requests, None, account)
        self.num_in_flight += 1
        finished = False
        try:
            for position in range(10**9):
                await asyncio.sleep(self.step_s)
                if position == self.fail_after:
                    raise EngineError("the engine failed on this request")
                for output in outputs.process(self._step(requests, position)).outputs:
                    finished = output.finished
                    yield output
                if finished:
                    return
        finally:
            self.num_in_flight -= 1
            if not finished:
                self.aborted.append(id)

    def _step(self, requests: list[Request], position: int) -> StepOutput:
        step = StepOutput([], [], at=float(position))
        for request in requests:
            if request.num_output != position:
                continue
            token = self.script[position % len(self.script)]
            if token == EOS and request.eos_id < 0:
                token = self.script[0]
            if self.returns_experts:
                new = request.tokens[max(request.num_routed, request.params.routed_experts_prompt_start) :]
                step.routed[request.id] = RoutedRows.of(np.array(new, np.uint8).reshape(-1, 1, 1) % 8)
                request.num_routed = len(request.tokens)
                step.sampling_masks[request.id] = [[token]]
            request.tokens = [*request.tokens, token]
            step.request_ids.append(request.id)
            step.token_ids.append(token)
            if request.timed:
                step.shares[request.id] = 0.001
            if position == 0:
                step.admitted[request.id] = FirstRun(
                    num_cached=3,
                    queued_at=0.0,
                    scheduled_at=0.0,
                    num_created=self.num_created,
                    miss=self.miss,
                )
                self._add_prompt_logprobs(step, request)
            count, labels = request.params.logprobs, request.params.logprob_token_ids
            if count is not None or labels is not None:
                step.logprobs[request.id] = [
                    self._logprobs(token, count or 0) if labels is None else labels_logprobs(token, labels)
                ]
            if token == request.eos_id:
                step.finished[request.id] = FinishReason("stop")
            elif token in (request.params.stop_token_ids or ()):
                step.finished[request.id] = FinishReason("stop", token)
            elif len(request.tokens) >= request.limit:
                step.finished[request.id] = FinishReason("length")
        return step

    def _add_prompt_logprobs(self, step: StepOutput, request: Request) -> None:
        count = request.params.prompt_logprobs
        if count is not None:
            ids = request.tokens[1 : request.prompt_len]
            step.prompt_logprobs[request.id] = [self._logprobs(token, count) for token in ids]

    def _logprobs(self, token: int, count: int) -> RowLogprobs:
        """Return logprobs in which the sampled token is second and the third has probability zero."""
        others = [i for i in range(VOCAB) if i != token]
        best = [others[0], token, *others[1:]][: VOCAB if count == -1 else count]
        values = [-0.5, -1.0, float("-inf"), *[-50.0 - i for i in range(VOCAB)]][: len(best)]
        return RowLogprobs([token, *best], [-1.0, *values], 2)

    def encode(
        self,
        prompt: Prompt,
        params: PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        rank: int | None = None,
        account: KeyAccount | None = None,
        lora: LoRARequest | None = None,
        target: LatencyTarget | None = None,
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        self.check()
        self.loras.append(lora)
        self.targets.append(target)
        if rank not in (None, 0):
            raise RequestError(f"data_parallel_rank {rank} is out of range: there is only rank 0")
        request = self.inputs.pooling_request(
            f"{request_id}-{len(self.pooled)}", prompt, params, priority=priority
        )
        assert request.pooling is not None and self.inputs.pooling is not None
        self.pooled.append((request_id, prompt, request.pooling, priority))
        size = request.pooling.dimensions or self.inputs.pooling.size
        return self._pool(request, numbers(request.tokens, size, by_token=request.pooling.is_by_token))

    async def _pool(
        self, request: Request, vector: Floats
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        self.num_in_flight += 1
        finished = False
        try:
            # Later requests finish first: the server must restore their order.
            await asyncio.sleep(self.step_s + 0.001 * (10 - len(request.tokens) % 10))
            if self.fail_after == 0:
                raise EngineError("the engine failed on this request")
            finished = True
            yield PoolingRequestOutput(request.id, PoolingOutput(vector), request.tokens, 3, True)
        finally:
            self.num_in_flight -= 1
            if not finished:
                self.aborted.append(request.id)

    def metrics_text(self) -> str:
        return "# HELP vllm:num_requests_running x\nvllm:num_requests_running 0.0\n"

    def snapshot(self) -> dict[str, Any]:
        return {"running": self.num_in_flight}
