"""LLM: the offline face. Give it a model and prompts, get the outputs in the order of the prompts."""

import copy
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from quire.config.args import EngineArgs
from quire.config.engine import EngineConfig
from quire.config.generation import default_sampling
from quire.config.unsupported import refuse
from quire.configure import configure
from quire.data.lora import LoRARequest
from quire.data.outputs import BeamSearchOutput, RequestOutput
from quire.data.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.data.pooling import PoolingParams
from quire.data.pooling_outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from quire.entrypoints.in_process import LocalEngine
from quire.errors import RequestError, RequestsFailed
from quire.frontend.beam import BeamSearch, continued, round_params, start_of
from quire.frontend.chat import chat_prompt, read_template
from quire.frontend.inputs import Prompt, PromptType
from quire.frontend.outputs import AnyOutput
from quire.frontend.pooling import NO_TASK, cosine, pairs, pools, reads_pairs
from quire.frontend.progress import Progress, TokenBar, with_bar
from quire.frontend.score_inputs import called, compared, embedded
from quire.logs import get_logger
from quire.metrics import Metric
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.entrypoints.multi_core import MultiCoreEngine

log = get_logger(__name__)

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Loras = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or one per prompt


class LLM:
    """An offline engine. `model` is a directory, a GGUF file or a hub id; the default is the packaged
    SmolLM2-135M-Instruct. Every engine argument may be passed by keyword."""

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        self.config = configure({"model": model} | engine_args)
        self.llm_engine = _open_engine(self.config)
        self._template = read_template(self.config.model.chat_template)
        self._ids = itertools.count()
        self._queued: dict[str, AnyOutput | None] = {}
        """Requests that nobody has taken the output of yet."""
        self._defaults = default_sampling(self.config)
        if self._defaults:
            log.warning("Default sampling parameters have been overridden by the model's: %s", self._defaults)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> "LLM":
        return cls(**args.given())

    # ---- generation

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt. Outputs stand in the order of the prompts. `RequestsFailed` is raised when
        the engine failed on some of them, with the outputs of the others."""
        ids = self.enqueue(
            prompts,
            sampling_params,
            lora_request=lora_request,
            priority=priority,
            tokenization_kwargs=tokenization_kwargs,
            mm_processor_kwargs=mm_processor_kwargs,
            use_tqdm=use_tqdm,
        )
        return cast(list[RequestOutput], self._run(ids, use_tqdm))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Progress = True,
        lora_request: Loras = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        talks = _conversations(messages)
        prompts = [
            chat_prompt(
                self.llm_engine.inputs.of(lora),
                conversation,
                chat_template=read_template(chat_template) or self._template,
                chat_template_content_format=chat_template_content_format,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
                add_special_tokens=bool((tokenization_kwargs or {}).get("add_special_tokens", False)),
                mm_processor_kwargs=mm_processor_kwargs,
            )
            for conversation, lora in zip(
                with_bar(talks, "Rendering conversations", use_tqdm),
                _loras_of(lora_request, len(talks)),
                strict=True,
            )
        ]
        ids = self._queue(prompts, sampling_params, None, loras=lora_request)
        return cast(list[RequestOutput], self._run(ids, use_tqdm))

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Loras = None,
        priority: Sequence[int] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts for a later `wait_for_completion`; their request ids."""
        parsed = self._parsed(prompts, tokenization_kwargs, use_tqdm, mm_processor_kwargs, lora_request)
        return self._queue(parsed, sampling_params, priority, loras=lora_request)

    def _parsed(
        self,
        prompts: Any,
        tokenization: Mapping[str, Any] | None,
        use_tqdm: Progress,
        mm_processor: Mapping[str, Any] | None = None,
        loras: Loras = None,
    ) -> list[Prompt]:
        special = bool((tokenization or {}).get("add_special_tokens", True))
        given, inputs = _as_list(prompts), self.llm_engine.inputs
        bar = with_bar(given, "Rendering prompts", use_tqdm)
        return [
            inputs.of(lora).parse(each, add_special_tokens=special, mm_processor_kwargs=mm_processor)
            for each, lora in zip(bar, _loras_of(loras, len(given)), strict=True)
        ]

    def wait_for_completion(self, *, use_tqdm: Progress = True) -> list[AnyOutput]:
        """Run everything queued; outputs in the order of queueing."""
        return self._run(list(self._queued), use_tqdm)

    def _run(self, ids: list[str], use_tqdm: Progress) -> list[AnyOutput]:
        """Step until these queued requests are done, then raise if some of them failed. If stepping fails
        or is interrupted, nothing is left running."""
        queued = self._queued
        missing = {id for id in ids if queued[id] is None}
        if missing:
            self._check_awake()
        try:
            with TokenBar(len(missing), use_tqdm) as bar:
                while missing:
                    for output in self.llm_engine.step():
                        if output.request_id in queued:
                            queued[output.request_id] = output
                        if output.request_id in missing:
                            missing.remove(output.request_id)
                            bar.add(output)
        except BaseException:
            self.llm_engine.abort_request(queued)
            queued.clear()
            raise
        outputs = [cast(AnyOutput, queued.pop(id)) for id in ids]
        errors = {index: output.error for index, output in enumerate(outputs) if output.error is not None}
        if errors:
            raise RequestsFailed(outputs, errors) from errors[min(errors)]
        return outputs

    def _queue(
        self,
        prompts: list[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        max_logprobs: int | None = None,
        loras: Loras = None,
    ) -> list[str]:
        shared = self.get_default_sampling_params() if params is None else params
        each = [copy.copy(own) for own in _one_each("params", shared, SamplingParams, len(prompts))]
        for own in each:
            own.output_kind = RequestOutputKind.FINAL_ONLY
        urgency = _one_each("priority", 0 if priority is None else priority, int, len(prompts))
        return self._add(prompts, each, urgency, _loras_of(loras, len(prompts)), max_logprobs)

    def _add(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priority: Sequence[int],
        loras: Sequence[LoRARequest | None],
        max_logprobs: int | None = None,
    ) -> list[str]:
        """Queue all of them, or none."""
        self._check_awake()
        added: list[str] = []
        try:
            for prompt, own, level, lora in zip(prompts, params, priority, loras, strict=True):
                request_id = str(next(self._ids))
                self.llm_engine.add_request(
                    request_id, prompt, own, priority=level, max_logprobs=max_logprobs, lora_request=lora
                )
                added.append(request_id)
        except BaseException:
            self.llm_engine.abort_request(added)
            raise
        self._queued |= dict.fromkeys(added)
        return added

    # ---- pooling

    def encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: Progress = True,
        lora_request: Loras = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What a pooling model makes of each prompt: an embedding, classes, or either for every token."""
        pools(self.config.pooling, "LLM.encode()")
        if pooling_task is None:
            raise RequestError(NO_TASK, param="pooling_task")
        parsed = self._parsed(prompts, tokenization_kwargs, use_tqdm)
        return self._pool(parsed, pooling_params, pooling_task, use_tqdm, lora_request)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt as a vector; `options` as of `encode`."""
        pools(self.config.pooling, "LLM.embed()")
        found = self.encode(prompts, pooling_params, pooling_task="embed", **options)
        return [EmbeddingRequestOutput.from_base(each) for each in found]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """How likely each class is, for each prompt; `options` as of `encode`."""
        pools(self.config.pooling, "LLM.classify()")
        found = self.encode(prompts, pooling_params, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(each) for each in found]

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Loras = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well two fit, one to one or one to many: a cross-encoder reads both at once, of an embedding
        model it is the cosine of their embeddings. `{"content": [...]}` is one in parts, media among them."""
        pooling, inputs = pools(self.config.pooling, "LLM.score()"), self.llm_engine.inputs
        firsts, seconds = _as_list(data_1), _as_list(data_2)
        if not reads_pairs(pooling):
            bar = with_bar(called(firsts, seconds), "Rendering prompts", use_tqdm)
            parsed = [embedded(inputs, name, each, tokenization_kwargs) for name, each in bar]
            found = self._pool(parsed, pooling_params, "embed", use_tqdm, lora_request)
            closest = pairs(found[: len(firsts)], found[len(firsts) :])
            return [ScoringRequestOutput.from_base(cosine(*each)) for each in closest]
        parsed = compared(inputs, firsts, seconds, read_template(chat_template) or self._template)
        found = self._pool(parsed, pooling_params, "classify", use_tqdm, lora_request)
        return [ScoringRequestOutput.from_base(each) for each in found]

    def _pool(
        self,
        prompts: list[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str,
        use_tqdm: Progress,
        loras: Loras,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        given = _one_each("params", params or PoolingParams(), PoolingParams, len(prompts))
        each = [msgspec.structs.replace(own, task=own.task or task) for own in given]
        ids = self._add(prompts, each, [0] * len(prompts), _loras_of(loras, len(prompts)))
        return cast(list[PoolingRequestOutput[PoolingOutput]], self._run(ids, use_tqdm))

    # ---- beam search

    def beam_search(
        self,
        prompts: Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: Loras = None,
        use_tqdm: Progress = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """The `beam_width` likeliest continuations of each prompt; at most `concurrency_limit` prompts at
        once."""
        _refuse(structured_outputs=params.structured_outputs)
        given = _as_list(prompts)
        loras = _loras_of(lora_request, len(given))
        readers = [self.llm_engine.inputs.of(lora) for lora in loras]
        parsed = [reader.parse(each) for reader, each in zip(readers, given, strict=True)]
        searches = [
            BeamSearch(
                start_of(prompt),
                params,
                eos_id=reader.eos_ids[0] if reader.eos_ids else None,
                max_len=self.llm_engine.max_model_len,
                lora_request=lora,
            )
            for prompt, lora, reader in zip(parsed, loras, readers, strict=True)
        ]
        width = concurrency_limit or max(len(searches), 1)
        starts = range(0, len(searches), width)
        for start in with_bar(list(starts), "Beam search", use_tqdm):
            group = [*zip(parsed, searches, strict=True)][start : start + width]
            while live := [each for each in group if not each[1].finished]:
                self._advance(live, params)
        return [BeamSearchOutput(self._decoded(search)) for search in searches]

    def _advance(self, searches: list[tuple[Prompt, BeamSearch]], params: BeamSearchParams) -> None:
        """One more token for every live beam of every search, in one batch."""
        live = [(prompt, beam) for prompt, search in searches for beam in search.live]
        beams = [continued(prompt, beam.tokens) for prompt, beam in live]
        loras = [beam.lora_request for _, beam in live]
        vocab = self.config.checkpoint.facts.vocab
        ids = self._queue(beams, round_params(params), None, max_logprobs=vocab, loras=loras)
        outputs = iter(cast(list[RequestOutput], self._run(ids, use_tqdm=False)))
        for _, search in searches:
            found = [next(outputs).outputs[0].logprobs for _ in search.live]
            search.advance([cast(Any, logprobs)[0] for logprobs in found])

    def _decoded(self, search: BeamSearch) -> list[Any]:
        best = search.best()
        for beam in best:
            if (tokenizer := self.llm_engine.inputs.tokenizer_of(beam.lora_request)) is not None:
                beam.text = tokenizer.decode(beam.tokens)
        return best

    # ---- the rest

    def get_tokenizer(self) -> Tokenizer:
        if self.llm_engine.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request gets that brings no params: the model's generation_config.json, or neutral
        values."""
        return SamplingParams(**self._defaults)

    def get_metrics(self) -> list[Metric]:
        """A snapshot of every metric. Needs `disable_log_stats=False`."""
        if self.llm_engine.metrics is None:
            raise RequestError("metrics are off: construct the LLM with disable_log_stats=False")
        return self.llm_engine.metrics.snapshot()

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget all cached prefixes. False while requests hold blocks, unless `reset_running_requests`
        ends them."""
        if reset_running_requests:
            self.llm_engine.abort_request(self._queued)
            self._queued.clear()
        return self.llm_engine.reset_prefix_cache()

    def reset_mm_cache(self) -> None:
        """Forget the images, videos and sounds that were processed: the next ones are read anew."""
        self.llm_engine.reset_mm_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: at level 1 the weights go to host memory and the cache is dropped, at level 2
        both are dropped; at level 0 nothing runs. What is queued ends (`abort`), is waited for (`wait`), or
        goes on afterwards (`keep`). Needs `enable_sleep_mode=True`."""
        if not self.config.model.enable_sleep_mode:
            raise RequestError("sleep mode is off: construct the LLM with enable_sleep_mode=True")
        for output in self.llm_engine.sleep(level, mode):
            if output.request_id in self._queued:
                self._queued[output.request_id] = output

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the memory back: all of it, or by `tags` the `weights` or the `kv_cache`."""
        self.llm_engine.wake_up(tags)

    def _check_awake(self) -> None:
        if not self.llm_engine.is_awake:
            raise RequestError("the engine sleeps, or some of it does: call wake_up() first")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """What a public method of the worker returns on each of them; a function is called with the worker,
        if that is in this process."""
        return self.llm_engine.collective_rpc(method, timeout, args, kwargs)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record what the workers do. Needs `profiler_config`."""
        self.llm_engine.profile(True, profile_prefix)

    def stop_profile(self) -> None:
        """Write down what was recorded, into `torch_profiler_dir`."""
        self.llm_engine.profile(False)

    def get_world_size(self, include_dp: bool = True) -> int:
        parallel = self.config.parallel
        size = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
        return size * parallel.data_parallel_size if include_dp else size


def _open_engine(config: EngineConfig) -> "LocalEngine | MultiCoreEngine":
    """With one core it is stepped in this process."""
    if config.parallel.data_parallel_size == 1:
        return LocalEngine(config)
    from quire.entrypoints.multi_core import (
        MultiCoreEngine,  # what speaks with other processes is of no use to one core
    )

    return MultiCoreEngine(config)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        refuse("call argument", name, value)


def _as_list(prompts: Any) -> list[Any]:
    """One prompt (text, dict or ids) or several, as a list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    several = list(prompts)
    return [several] if several and isinstance(several[0], Number) else several


def _conversations(messages: Any) -> Sequence[Messages]:
    """One conversation or several, as several."""
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a list of messages, or a list of such lists; got {type(messages).__name__}",
            param="messages",
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else messages


def _loras_of(given: Loras, count: int) -> list[LoRARequest | None]:
    """The adapter of each of `count` prompts."""
    if given is None or isinstance(given, LoRARequest):
        return [given] * count
    if not isinstance(given, Sequence):
        found = type(given).__name__
        raise RequestError(f"lora_request must be of type LoRARequest, got {found}", param="lora_request")
    if len(given) != count:
        raise RequestError(
            f"The lengths of prompts ({count}) and lora_request ({len(given)}) must be the same."
        )
    return list(given)


def _one_each(name: str, given: Any, kind: type[T], count: int) -> list[T]:
    """A value for each of `count` prompts, out of one for all or a sequence of them."""
    if isinstance(given, kind):
        return [given] * count
    values = list(given) if isinstance(given, Sequence) else [given]
    for value in values:
        if not isinstance(value, kind):
            found = type(value).__name__
            raise RequestError(f"{name} must be of type {kind.__name__}, got {found}", param=name)
    if len(values) != count:
        raise RequestError(f"The lengths of prompts ({count}) and {name} ({len(values)}) must be the same.")
    return values
