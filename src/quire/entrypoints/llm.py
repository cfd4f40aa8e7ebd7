"""LLM: the offline entry point. It takes a model and prompts, and returns outputs in the prompts' order."""

import copy
import itertools
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec

from quire.config.engine import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.config.generation import default_sampling
from quire.config.unsupported import check_supported
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
from quire.entrypoints.llm_control import LLMControl
from quire.errors import RequestError, RequestsFailed
from quire.frontend.beam import BeamSearch, beam_prompt, initial_tokens, round_params
from quire.frontend.chat import chat_prompt, read_template
from quire.frontend.inputs import Prompt, PromptType
from quire.frontend.outputs import AnyOutput
from quire.frontend.pooling import NO_TASK, embedding_task, pairs, pools, reads_pairs, similarity
from quire.frontend.progress import Progress, TokenBar, with_bar
from quire.frontend.score_inputs import cross_encoder_prompts, embed_prompt, named_inputs
from quire.metrics.reader import Metric
from quire.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.entrypoints.multi_core import MultiCoreEngine

T = TypeVar("T")
Messages = Sequence[Mapping[str, Any]]
Loras = LoRARequest | Sequence[LoRARequest | None] | None  # for all prompts, or one per prompt


class LLM(LLMControl):
    """An offline engine. `model` is a directory, a GGUF file or a hub id; the default is the packaged
    SmolLM2-135M-Instruct. Every engine argument may be passed by keyword."""

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        self.config = configure({"model": model} | engine_args)
        self.llm_engine = _open_engine(self.config)
        self._operation = self.llm_engine._operation
        self._template = read_template(self.config.model.chat_template)
        self._ids = itertools.count()
        self._queued: dict[str, AnyOutput | None] = {}
        """Last output of each request whose output has not been returned to the caller yet, by id; None until
        the request is finished."""
        self._defaults = default_sampling(self.config)

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
        """Generate a continuation of each prompt; outputs are in the order of the prompts. If the engine
        failed on some prompts, raise `RequestsFailed`, which has the outputs of the other prompts."""
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
        """Generate the reply to one conversation, or to each of several; outputs are in their order."""
        conversations = _conversations(messages)
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
                with_bar(conversations, "Rendering conversations", use_tqdm),
                self._loras_of(lora_request, len(conversations)),
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
        """Queue prompts for a later `wait_for_completion`; return their request ids."""
        parsed = self._parse(prompts, tokenization_kwargs, use_tqdm, mm_processor_kwargs, lora_request)
        return self._queue(parsed, sampling_params, priority, loras=lora_request)

    def _parse(
        self,
        prompts: Any,
        tokenization: Mapping[str, Any] | None,
        use_tqdm: Progress,
        mm_processor: Mapping[str, Any] | None = None,
        loras: Loras = None,
    ) -> list[Prompt]:
        special = bool((tokenization or {}).get("add_special_tokens", True))
        prompt_list, inputs = _as_list(prompts), self.llm_engine.inputs
        bar = with_bar(prompt_list, "Rendering prompts", use_tqdm)
        return [
            inputs.of(lora).parse(prompt, add_special_tokens=special, mm_processor_kwargs=mm_processor)
            for prompt, lora in zip(bar, self._loras_of(loras, len(prompt_list)), strict=True)
        ]

    def wait_for_completion(self, *, use_tqdm: Progress = True) -> list[AnyOutput]:
        """Run all requests queued by `enqueue` until they are finished, and return their outputs in the order
        of queueing."""
        return self._run(list(self._queued), use_tqdm)

    def _run(self, ids: list[str], use_tqdm: Progress) -> list[AnyOutput]:
        """Run steps until these requests are finished, and return their outputs; raise `RequestsFailed` if
        some failed. If a step fails or is interrupted, all queued requests are aborted."""
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
        copies = [copy.copy(value) for value in _per_prompt("params", shared, SamplingParams, len(prompts))]
        for value in copies:
            value.output_kind = RequestOutputKind.FINAL_ONLY
        priorities = _per_prompt("priority", 0 if priority is None else priority, int, len(prompts))
        return self._add(prompts, copies, priorities, self._loras_of(loras, len(prompts)), max_logprobs)

    def _add(
        self,
        prompts: list[Prompt],
        params: Sequence[SamplingParams | PoolingParams],
        priority: Sequence[int],
        loras: Sequence[LoRARequest | None],
        max_logprobs: int | None = None,
    ) -> list[str]:
        """Queue a request for each prompt, or none if one is invalid; return the request ids."""
        self._check_awake()
        added: list[str] = []
        try:
            for prompt, value, level, lora in zip(prompts, params, priority, loras, strict=True):
                request_id = str(next(self._ids))
                self.llm_engine.add_request(
                    request_id, prompt, value, priority=level, max_logprobs=max_logprobs, lora_request=lora
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
        """Return the pooled output of each prompt: an embedding or class scores, for the prompt or for each
        token. `pooling_task` selects which, such as `embed` or `token_classify`; it is required."""
        pools(self.config.pooling, "LLM.encode()")
        if pooling_task is None:
            raise RequestError(NO_TASK, param="pooling_task")
        parsed = self._parse(prompts, tokenization_kwargs, use_tqdm)
        return self._pool(parsed, pooling_params, pooling_task, use_tqdm, lora_request)

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[EmbeddingRequestOutput]:
        """Return the embedding of each prompt; `options` are those of `encode`."""
        pools(self.config.pooling, "LLM.embed()")
        outputs = self.encode(prompts, pooling_params, pooling_task="embed", **options)
        return [EmbeddingRequestOutput.from_base(output) for output in outputs]

    def classify(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        **options: Any,
    ) -> list[ClassificationRequestOutput]:
        """Return the class probabilities of each prompt; `options` are those of `encode`."""
        pools(self.config.pooling, "LLM.classify()")
        outputs = self.encode(prompts, pooling_params, pooling_task="classify", **options)
        return [ClassificationRequestOutput.from_base(output) for output in outputs]

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
        """Return a score for each pair of inputs: one to one, one to many, or two lists of equal length. The
        score is that of a cross-encoder or the similarity of two embeddings. `{"content": [...]}` is an input
        in parts, which may include media."""
        pooling, inputs = pools(self.config.pooling, "LLM.score()"), self.llm_engine.inputs
        firsts, seconds = _as_list(data_1), _as_list(data_2)
        if not reads_pairs(pooling):
            bar = with_bar(named_inputs(firsts, seconds), "Rendering prompts", use_tqdm)
            parsed = [embed_prompt(inputs, name, item, tokenization_kwargs) for name, item in bar]
            outputs = self._pool(parsed, pooling_params, embedding_task(pooling), use_tqdm, lora_request)
            closest = pairs(outputs[: len(firsts)], outputs[len(firsts) :])
            return [ScoringRequestOutput.from_base(similarity(*item)) for item in closest]
        template = read_template(chat_template) or self._template
        parsed = cross_encoder_prompts(inputs, firsts, seconds, template)
        outputs = self._pool(parsed, pooling_params, "classify", use_tqdm, lora_request)
        return [ScoringRequestOutput.from_base(item) for item in outputs]

    def _pool(
        self,
        prompts: list[Prompt],
        params: PoolingParams | Sequence[PoolingParams] | None,
        task: str,
        use_tqdm: Progress,
        loras: Loras,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        params_list = _per_prompt("params", params or PoolingParams(), PoolingParams, len(prompts))
        task_params = [msgspec.structs.replace(value, task=value.task or task) for value in params_list]
        ids = self._add(prompts, task_params, [0] * len(prompts), self._loras_of(loras, len(prompts)))
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
        """Return the `beam_width` best continuations of each prompt, best first. At most `concurrency_limit`
        prompts run at once; None: all."""
        check_supported("call argument", "structured_outputs", params.structured_outputs)
        prompt_list = _as_list(prompts)
        loras = self._loras_of(lora_request, len(prompt_list))
        readers = [self.llm_engine.inputs.of(lora) for lora in loras]
        parsed = [reader.parse(item) for reader, item in zip(readers, prompt_list, strict=True)]
        searches = [
            BeamSearch(
                initial_tokens(prompt),
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
            while live := [item for item in group if not item[1].finished]:
                self._advance(live, params)
        return [BeamSearchOutput(self._decode(search)) for search in searches]

    def _advance(self, searches: list[tuple[Prompt, BeamSearch]], params: BeamSearchParams) -> None:
        """Generate one more token for every live beam of every search, in one batch."""
        live = [(prompt, beam) for prompt, search in searches for beam in search.live]
        beams = [beam_prompt(prompt, beam.tokens) for prompt, beam in live]
        loras = [beam.lora_request for _, beam in live]
        vocab = self.config.checkpoint.facts.vocab
        ids = self._queue(beams, round_params(params), None, max_logprobs=vocab, loras=loras)
        outputs = iter(cast(list[RequestOutput], self._run(ids, use_tqdm=False)))
        for _, search in searches:
            logprobs_list = [next(outputs).outputs[0].logprobs for _ in search.live]
            search.advance([cast(Any, logprobs)[0] for logprobs in logprobs_list])

    def _decode(self, search: BeamSearch) -> list[Any]:
        best = search.best()
        for beam in best:
            if (tokenizer := self.llm_engine.inputs.tokenizer_of(beam.lora_request)) is not None:
                beam.text = tokenizer.decode(beam.tokens)
        return best

    # ---- other methods

    def get_tokenizer(self) -> Tokenizer:
        if self.llm_engine.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init is set")
        return self.llm_engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default sampling parameters: the model's (generation_config.json), or neutral values."""
        return SamplingParams(**self._defaults)

    def get_metrics(self) -> list[Metric]:
        """Return the present value of every engine metric. Requires `disable_log_stats=False`."""
        if self.llm_engine.metrics is None:
            raise RequestError("metrics are off: construct the LLM with disable_log_stats=False")
        return self.llm_engine.metrics.snapshot()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Release memory: level 1 moves the weights to host memory and drops the KV cache, level 2 drops
        both, level 0 only pauses. Queued requests are aborted (`abort`), completed first (`wait`) or resumed
        afterwards (`keep`). Requires `enable_sleep_mode=True`."""
        if not self.config.model.enable_sleep_mode:
            raise RequestError("sleep mode is off: construct the LLM with enable_sleep_mode=True")
        for output in self.llm_engine.sleep(level, mode):
            if output.request_id in self._queued:
                self._queued[output.request_id] = output

    def _wait(self, call: Coroutine[Any, Any, T]) -> T:
        return self.llm_engine._wait(call)

    def _loras_of(self, loras: Loras, count: int) -> list[LoRARequest | None]:
        """Return the LoRA adapter of each of `count` prompts, or None for the base model."""
        if loras is None or isinstance(loras, LoRARequest):
            return [self._operation.loaded_lora(loras)] * count
        if not isinstance(loras, Sequence):
            type_name = type(loras).__name__
            raise RequestError(
                f"lora_request must be of type LoRARequest, got {type_name}", param="lora_request"
            )
        if len(loras) != count:
            raise RequestError(
                f"The lengths of prompts ({count}) and lora_request ({len(loras)}) must be the same."
            )
        return [self._operation.loaded_lora(lora) for lora in loras]

    def _check_awake(self) -> None:
        if not self._operation.is_awake:
            raise RequestError("the engine is asleep, at least in part: call wake_up() first")


def _open_engine(config: EngineConfig) -> "LocalEngine | MultiCoreEngine":
    """Build the engine: in this process, or with engine cores in child processes if there are several
    data-parallel ranks."""
    if config.parallel.data_parallel_size == 1:
        return LocalEngine(config)
    from quire.entrypoints.multi_core import MultiCoreEngine  # slow to import

    return MultiCoreEngine(config)


def _as_list(prompts: Any) -> list[Any]:
    """Return one prompt (text, dict or ids) or several as a list of prompts."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        return [prompts]
    several = list(prompts)
    return [several] if several and isinstance(several[0], Number) else several


def _conversations(messages: Any) -> Sequence[Messages]:
    """Return one conversation or several as a list of conversations."""
    if isinstance(messages, Mapping) or not isinstance(messages, Sequence):
        raise RequestError(
            f"messages is a list of messages, or a list of such lists; got {type(messages).__name__}",
            param="messages",
        )
    return [messages] if messages and isinstance(messages[0], Mapping) else messages


def _per_prompt(name: str, value_or_values: Any, kind: type[T], count: int) -> list[T]:
    """Return a value for each of `count` prompts, from one for all or a sequence of values."""
    if isinstance(value_or_values, kind):
        return [value_or_values] * count
    values = list(value_or_values) if isinstance(value_or_values, Sequence) else [value_or_values]
    for value in values:
        if not isinstance(value, kind):
            type_name = type(value).__name__
            raise RequestError(f"{name} must be of type {kind.__name__}, got {type_name}", param=name)
    if len(values) != count:
        raise RequestError(f"The lengths of prompts ({count}) and {name} ({len(values)}) must be the same.")
    return values
