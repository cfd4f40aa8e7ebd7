"""LocalEngine: frontend, core and worker in one process, stepped by the caller."""

import os
import weakref
from collections.abc import Coroutine, Generator, Iterable
from typing import Any, TypeVar, cast

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.mm_caches import in_process_cache_kind
from quire.configure import cache_info, open_grammars, open_tokenizer, settings_of
from quire.core.build import build_core
from quire.core.control import Operator, run_work
from quire.core.engine_core import EngineCore
from quire.core.stats_log import StatsLog
from quire.data.lora import LoRARequest
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.step_plan import FinishReason, StepOutput
from quire.entrypoints.llm_control import LLMControl
from quire.errors import EngineError, RequestError
from quire.frontend.control import CoreControl
from quire.frontend.in_flight import failure
from quire.frontend.inputs import Prompt
from quire.frontend.multimodal import media_reader
from quire.frontend.open_inputs import open_inputs
from quire.frontend.outputs import AnyOutput, OutputProcessor
from quire.metrics.engine import EngineMetrics
from quire.metrics.pages import MetricsLayout, MetricsPages

T = TypeVar("T")


class LocalEngine(LLMControl):
    """An engine in this process. The caller adds requests and calls `step()` repeatedly, which returns their
    outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = open_tokenizer(config)
        self.core: EngineCore
        grammars = open_grammars(config, self.tokenizer)
        self.core, cache = build_core(config, grammars)
        self.max_model_len = cache.max_model_len
        kind = in_process_cache_kind(config.multimodal, config.parallel)
        self.inputs = open_inputs(
            config,
            self.tokenizer,
            grammars,
            media_reader(config, self.tokenizer, cache=kind),
            max_model_len=cache.max_model_len,
            seed=config.model.seed,
        )
        self.outputs = self._new_outputs()
        self._pending: list[AnyOutput] = []
        """Outputs of steps that ran during a control call such as `sleep`, for the next call that returns
        outputs."""
        clear_media = self.inputs.media.processor_cache.clear
        proxy = weakref.proxy(self)  # without a cycle, a deleted engine frees its memory at once
        self._core_calls = Operator(self.core, lambda finished: proxy._end(finished), clear_media).calls
        self._operation = CoreControl(
            lambda *args, **options: proxy._call_core(*args, **options),
            settings=settings_of(config),
            forget_prefixes=lambda: None,
            clear_media=clear_media,
            in_process=True,
        )
        self.metrics: EngineMetrics | None = None
        self.stats_log: StatsLog | None = None
        if not config.observability.disable_log_stats:
            self.metrics = EngineMetrics(
                MetricsPages(MetricsLayout.of(config)),
                model_name=config.model.served_model_name[0],
                cache_info=cache_info(config, num_blocks=cache.num_blocks, num_tokens=cache.num_tokens),
                max_loras=config.lora.max_loras if config.lora.enable_lora else None,
            )
            self.metrics.pages.start(config.scheduler.max_num_seqs)
            self.inputs.media.processor_cache.count = self.metrics.pages.observe_media
            self.stats_log = StatsLog(
                Env.read(os.environ).log_stats_interval, self.metrics.pages, device=config.machine.device
            )

    def _new_outputs(self) -> OutputProcessor:
        interval = self.config.scheduler.stream_interval
        return OutputProcessor(
            self.tokenizer, stream_interval=interval, tokenizer_of=self.inputs.tokenizer_of
        )

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        *,
        arrival_time: float | None = None,
        priority: int = 0,
        add_special_tokens: bool = True,
        max_logprobs: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Validate and queue a prompt. If anything is invalid, nothing is queued."""
        if request_id in self.outputs:
            raise RequestError(f"request id {request_id!r} is in use")
        lora_request = self._operation.loaded_lora(lora_request)
        if not isinstance(prompt, Prompt):
            prompt = self.inputs.of(lora_request).parse(prompt, add_special_tokens=add_special_tokens)
        options: dict[str, Any] = {"priority": priority, "arrived_at": arrival_time, "lora": lora_request}
        if isinstance(params, PoolingParams):
            requests = [self.inputs.pooling_request(request_id, prompt, params, **options)]
        else:
            requests = self.inputs.requests(request_id, prompt, params, max_logprobs=max_logprobs, **options)
        if self.stats_log is not None and not self.has_unfinished_requests():
            self.stats_log.begin_run()
        self.outputs.add(request_id, prompt, requests)
        for request in requests:
            self.core.add(request)

    def abort_request(self, request_ids: Iterable[str] | str) -> list[AnyOutput]:
        """End one request or several early; return their last outputs with the tokens so far."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        finished = self.core.abort(self.outputs.sequences_of(ids))
        return self._deliver(StepOutput(request_ids=[], token_ids=[], finished=finished))

    def has_unfinished_requests(self) -> bool:
        """Return whether requests are unfinished. Steps in flight whose requests have all ended do not
        count."""
        return self.core.scheduler.has_work or bool(self.core.pause_state.outside) or bool(self._pending)

    def get_num_unfinished_requests(self) -> int:
        return len(self.outputs)

    @property
    def output_processor(self) -> "LocalEngine":
        """Return the object with `has_unfinished_requests`, under vLLM's name."""
        return self

    def step(self) -> list[AnyOutput]:
        """Run a step and return its outputs. If the step fails or is interrupted, all requests are dropped
        and the engine stays usable."""
        return self._take_pending() or self._step()

    def _take_pending(self) -> list[AnyOutput]:
        outputs, self._pending = self._pending, []
        return outputs

    def _step(self) -> list[AnyOutput]:
        try:
            step = self.core.step()
            if step is None and self.core.has_work:
                raise EngineError("requests are waiting, but none of them can be scheduled")
            return [] if step is None else self._deliver(step)
        except BaseException:
            self.core.clear()
            self.outputs = self._new_outputs()
            raise

    def _deliver(self, step: StepOutput) -> list[AnyOutput]:
        processed = self.outputs.process(step)
        if processed.stopped:
            self.core.abort(processed.stopped)
        if self.metrics is not None and self.stats_log is not None:
            self.core.refresh(step.stats)
            self.metrics.pages.observe(step.stats, processed.stats)
            self.metrics.note_adapters(0, step.stats.running_adapters, step.stats.waiting_adapters)
            self.metrics.weight_versions[0] = self.core.pause_state.weight_version
            self.stats_log.add(step.stats)
            (self.stats_log.tick if self.has_unfinished_requests() else self.stats_log.end_run)(step.stats)
        for output in processed.outputs:
            if (finish := processed.failed.get(output.request_id)) is not None:
                output.error = failure(finish)
        return processed.outputs

    # ---- sleep mode and control

    @property
    def model_executor(self) -> Any:
        """Return the executor, under vLLM's name."""
        return self.core.executor

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, which awaits only `_call_core` and so never suspends, and return its result."""
        try:
            call.send(None)
        except StopIteration as end:
            return cast(T, end.value)
        raise AssertionError("a call of the core in this process cannot be suspended")

    async def _call_core(
        self, method: str, args: dict[str, Any], timeout_s: float | None = None, *, if_ready: bool = False
    ) -> list[Any]:
        """Call a method of the core in this thread and return its result, in a list of one. Steps run while
        the method waits for requests; `timeout_s` and `if_ready` have no effect."""
        value = self._core_calls[method](**args)
        if isinstance(value, Generator):
            value = run_work(value, self._step_and_hold)
        self._operation.weight_version = self.core.pause_state.weight_version
        return [value]

    def _step_and_hold(self) -> None:
        self._pending += self._step()

    def _end(self, finished: dict[str, FinishReason]) -> None:
        self._pending += self._deliver(StepOutput([], [], finished=finished))

    def sleep(self, level: int = 1, mode: str = "abort") -> list[AnyOutput]:
        """Put the engine to sleep, as `LLM.sleep` does; return the last outputs of the requests that end
        before it sleeps."""
        self._wait(self._operation.sleep(level, mode))
        return self._take_pending()

    def close(self) -> None:
        """Stop the workers; no request can run afterwards."""
        self.core.close()
