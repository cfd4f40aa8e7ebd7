"""LocalEngine: frontend, core and worker in one process, stepped by the caller."""

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.env import Env
from quire.config.mm_caches import in_process_cache_kind
from quire.configure import cache_info, eos_ids, open_grammars, open_tokenizer
from quire.core.build import build_core
from quire.core.control import Operator, done
from quire.core.engine_core import EngineCore
from quire.core.stats_log import StatsLog
from quire.data.control import LEVELS, check_choice, check_version
from quire.data.lora import LoRARequest
from quire.data.params import SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.step_plan import StepOutput
from quire.errors import EngineError, RequestError
from quire.frontend.in_flight import failure
from quire.frontend.inputs import InputProcessor, Prompt
from quire.frontend.kv_transfer import validators_of
from quire.frontend.multimodal import media_reader
from quire.frontend.outputs import AnyOutput, OutputProcessor
from quire.frontend.prompt_embeds import embeds_reader
from quire.metrics.engine import EngineMetrics, MetricsLayout, MetricsPages


class LocalEngine:
    """An engine in this process: add requests, call `step()`, receive outputs."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = open_tokenizer(config)
        self.core: EngineCore
        grammars = open_grammars(config, self.tokenizer)
        self.core, cache = build_core(config, grammars)
        self.operator = Operator(self.core)
        self.max_model_len = cache.max_model_len
        self.inputs = InputProcessor(
            tokenizer=self.tokenizer,
            vocab=config.checkpoint.facts.vocab,
            max_model_len=cache.max_model_len,
            eos_ids=eos_ids(config, self.tokenizer),
            max_logprobs=config.model.max_logprobs,
            seed=config.model.seed,
            max_prompt_len=config.scheduler.max_prompt_len,
            pooling=config.pooling,
            embeds=embeds_reader(config),
            media=media_reader(
                config, self.tokenizer, cache=in_process_cache_kind(config.multimodal, config.parallel)
            ),
            grammars=grammars,
            enable_lora=config.lora.enable_lora,
            num_extra_vocab=config.lora.lora_extra_vocab_size,
            validators=validators_of(config),
        )
        self.outputs = self._new_outputs()
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
            self.stats_log = StatsLog(Env.read(os.environ).log_stats_interval, self.metrics.pages)

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
        """End requests early, or one; return their last outputs with the tokens so far."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        finished = self.core.abort(self.outputs.sequences_of(ids))
        return self._deliver(StepOutput(request_ids=[], token_ids=[], finished=finished))

    def has_unfinished_requests(self) -> bool:
        """Whether requests are unfinished. Steps in flight of ended requests do not count."""
        return self.core.scheduler.has_work or bool(self.core.gate.outside)

    def step(self) -> list[AnyOutput]:
        """Run a step and return its outputs. If it is interrupted, all requests are dropped and the engine
        stays usable."""
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
            self.metrics.weight_versions[0] = self.core.gate.weight_version
            self.stats_log.add(step.stats)
            (self.stats_log.tick if self.has_unfinished_requests() else self.stats_log.end_run)(step.stats)
        for output in processed.outputs:
            if (finish := processed.failed.get(output.request_id)) is not None:
                output.error = failure(finish)
        return processed.outputs

    def reset_prefix_cache(self, external: bool = False) -> bool:
        return self.core.reset_prefix_cache(external)

    def reset_mm_cache(self) -> None:
        """Clear the cache of processed images, videos and audio."""
        self.inputs.media.processor_cache.clear()

    def reset_encoder_cache(self) -> bool:
        """Evict encoder outputs that no request needs; return whether the cache is empty."""
        return self.core.scheduler.media.reset()

    # ---- sleep mode and control

    @property
    def model_executor(self) -> Any:
        """Return the executor, under vLLM's name."""
        return self.core.executor

    @property
    def is_awake(self) -> bool:
        """Whether steps are run."""
        return self.core.gate.is_open

    def sleep(self, level: int, mode: str) -> list[AnyOutput]:
        """Put the engine to sleep; return the last outputs of requests that end before."""
        check_choice("level", level, LEVELS)
        finished = self.operator.pause(mode)
        outputs = self._deliver(StepOutput([], [], finished=finished))
        while not self.operator.is_at_rest:
            outputs += self.step()
        done(self.operator.sleep(level))
        return outputs

    def wake_up(self, tags: list[str] | None) -> None:
        if done(self.operator.wake_up(tags)):
            done(self.operator.warm_up())
            self.operator.resume()

    def collective_rpc(
        self, method: str | Callable[..., Any], timeout: float | None, args: Any, kwargs: Any
    ) -> list[Any]:
        results: list[Any] = done(self.operator.collective_rpc(method, timeout, args, kwargs))
        return results

    @property
    def weight_version(self) -> str:
        return self.core.gate.weight_version

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._call_weights("connect", dict(init_info))

    def start_weight_update(self) -> None:
        self._call_weights("start")

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        self._call_weights("receive", dict(update_info))

    def finish_weight_update(self, weight_version: str | None) -> None:
        if weight_version is not None:
            check_version(weight_version)
        while self.core.scheduler.in_flight and not self.has_unfinished_requests():
            self.step()
        self._call_weights("prepare")
        done(self.operator.commit_weights(weight_version))

    def update_weight_version(self, new_version: str) -> None:
        self.operator.set_weight_version(new_version)

    def _call_weights(self, action: str, *args: Any) -> None:
        """Run a part of a weight update; if it fails, what was received is dropped."""
        try:
            done(self.operator.call_weights(action, *args))
        except Exception:
            if action in ("receive", "prepare"):
                done(self.operator.call_weights("abort"))
            raise

    def profile(self, start: bool, prefix: str | None = None) -> None:
        done(self.operator.profile(start, prefix))

    def close(self) -> None:
        """Stop the workers; no request can run afterwards."""
        self.core.close()
