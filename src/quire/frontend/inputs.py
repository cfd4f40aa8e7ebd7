"""Conversion of user input to checked Requests; all invalid input is refused here."""

import copy
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from quire.checkpoint.pooling import PoolingFacts
from quire.data.cache_hints import CacheHints
from quire.data.cache_scope import scoped_salt
from quire.data.latency_target import NO_TARGET, LatencyTarget
from quire.data.lora import LoRARequest
from quire.data.multimodal import Media
from quire.data.params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from quire.data.pooling import PoolingParams
from quire.data.prompt_embeds import PromptEmbeds
from quire.data.request import Request, with_transfer
from quire.data.timestamps import TimestampTokens
from quire.errors import RequestError
from quire.frontend.checked_params import CheckedParams, Validator, check_prompt_start, check_salt
from quire.frontend.lora_tokenizer import LoRATokenizers
from quire.frontend.multimodal import TEXT_ONLY, MediaInputReader, media_inputs, merge_encoder_decoder
from quire.frontend.pooling import NOT_GENERATIVE, completed, pools, second_start
from quire.frontend.prompt_embeds import PromptEmbedsReader
from quire.frontend.time_limit import limited
from quire.multimodal.processing import PreparedItem
from quire.text.grammar import Grammars, with_json_text
from quire.text.tokenizer import Tokenizer

CHARS_PER_TOKEN = 256
"""Characters per token of the context above which a text is refused before it is tokenized: tokens have at
most a few dozen characters."""
_POOLED = {
    skip: SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=skip,
    )
    for skip in (False, True)
}
"""Sampling parameters of requests to a pooling model, by `skip_reading_prefix_cache`."""


class TextPrompt(TypedDict, total=False):
    """A prompt as text, in a dict."""

    prompt: str
    multi_modal_data: dict[str, Any]
    multi_modal_uuids: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids, in a dict."""

    prompt_token_ids: list[int]
    prompt: str
    token_type_ids: list[int]
    multi_modal_data: dict[str, Any]
    multi_modal_uuids: dict[str, Any]
    mm_processor_kwargs: dict[str, Any]
    cache_salt: str


class EmbedsPrompt(TypedDict, total=False):
    """A prompt as embeddings, in a dict."""

    prompt_embeds: Any
    """A tensor [tokens, hidden size]; `Any`, because torch is not imported here."""
    prompt: str
    cache_salt: str


PromptType = str | list[int] | TextPrompt | TokensPrompt | EmbedsPrompt


@dataclass(slots=True)
class Prompt:
    """A parsed prompt: its tokens, and its text if that is known."""

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None
    second_start: int | None = None
    """Start of the second of two texts, for models with token types."""
    embeds: PromptEmbeds | None = None
    """Prompt embeddings; the token ids are zeros then."""
    media: Media | None = None
    """Images, videos and audio, with placeholder tokens among the token ids."""
    prepared: Sequence[PreparedItem] = ()
    """Prepared items of `media`, to process them again if their arrays are lost."""
    hints: CacheHints | None = None


class InputProcessor:
    """Tokenizes prompts, checks them against the model's limits, and builds one Request per sequence."""

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        max_logprobs: int,
        seed: int,
        max_prompt_len: int | None = None,
        pooling: PoolingFacts | None = None,
        grammars: Grammars | None = None,
        embeds: PromptEmbedsReader | None = None,
        media: MediaInputReader = TEXT_ONLY,
        enable_lora: bool = False,
        num_extra_vocab: int = 0,
        validators: Sequence[Validator] = (),
        target: LatencyTarget = NO_TARGET,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab = self.model_vocab = vocab
        self.max_model_len = max_model_len
        self.max_chars = max_model_len * CHARS_PER_TOKEN
        """Largest number of characters of a text."""
        self.max_prompt_len = max_prompt_len
        """Longest prompt that a step can hold; None if only max_model_len limits it."""
        self.pooling = pooling
        """Pooling settings; None for a generative model."""
        self.grammars = grammars
        self.embeds = embeds
        """Reader of prompt embeddings; None if they are disabled."""
        self.media = media
        self.enable_lora = enable_lora
        self.lora: LoRARequest | None = None  # set in the processors that `of` returns
        self.num_extra_vocab = num_extra_vocab
        """Tokens that a LoRA adapter may add to the vocabulary."""
        self.target = target
        """Latency targets of requests without their own."""
        self.validators = validators
        """Further checks of sampling parameters: by custom logits processors, and for engine options."""
        self._lora_tokenizers = None if tokenizer is None else LoRATokenizers(tokenizer)
        self.eos_ids = tuple(eos_ids)
        self.max_logprobs = max_logprobs
        self._seeds = random.Random(seed)

    def of(self, lora: LoRARequest | None) -> "InputProcessor":
        """Return the processor for requests of a LoRA adapter, which may have its own tokenizer and tokens.
        The first call may be slow."""
        is_adapter = isinstance(lora, LoRARequest) and self.enable_lora and self.pooling is None
        if lora is self.lora or not is_adapter:
            return self
        inputs = copy.copy(self)
        inputs.lora = lora
        inputs.vocab = self.vocab + self.num_extra_vocab  # the engine core checks the adapter's own number
        inputs.tokenizer = self.tokenizer_of(lora)
        if inputs.tokenizer is not None and inputs.tokenizer is not self.tokenizer:
            ends = (inputs.tokenizer.eos_token_id, *self.eos_ids)
            inputs.eos_ids = tuple(dict.fromkeys(id for id in ends if id is not None))
        return inputs

    def tokenizer_of(self, lora: LoRARequest | None) -> Tokenizer | None:
        if lora is None or self._lora_tokenizers is None or not self.num_extra_vocab:
            return self.tokenizer
        return self._lora_tokenizers.of(lora)

    # ---- prompts

    def parse(
        self,
        prompt: Any,
        *,
        add_special_tokens: bool = True,
        prepared: Sequence[PreparedItem] = (),
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Parse a prompt: text or token ids, directly or as fields of a dict. Text is tokenized, and the
        media of a dict are processed unless they are `prepared`."""
        if isinstance(prompt, str):
            return self._place_media(self._from_text(prompt, None, add_special_tokens, prepared), prepared)
        if isinstance(prompt, Mapping):
            prompt = merge_encoder_decoder(prompt)
            arguments = {**(prompt.get("mm_processor_kwargs") or {}), **(mm_processor_kwargs or {})}
            ready = prepared or self.media.prepare_sync(media_inputs(prompt), arguments)
            return self._place_media(self._from_mapping(prompt, add_special_tokens, ready), ready)
        if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
            return self._place_media(self._checked(Prompt(list(prompt))), ())
        raise RequestError(
            f"a prompt is a string, a list of token ids, or a dict with 'prompt' or 'prompt_token_ids'; "
            f"got {type(prompt).__name__}",
            param="prompt",
        )

    async def parse_async(self, prompt: Any, **options: Any) -> Prompt:
        """Parse a prompt as `parse` does, without blocking the event loop while media are processed."""
        prepared: list[PreparedItem] = []
        if isinstance(prompt, Mapping):
            prompt = merge_encoder_decoder(prompt)
            prepared = await self.media.prepare(media_inputs(prompt), prompt.get("mm_processor_kwargs"))
        return self.parse(prompt, prepared=prepared, **options)

    def _place_media(self, prompt: Prompt, prepared: Sequence[PreparedItem]) -> Prompt:
        """Insert the placeholder tokens of the media into the prompt, and set its `media`."""
        if not prepared:
            if self.media.prefix and self.pooling is not None:  # text prompts are bidirectional, too
                prompt.media = self.media.joined(prompt.token_ids, Media([]))
            return prompt
        if prompt.embeds is not None:
            raise RequestError("prompt_embeds cannot be combined with media", param="multi_modal_data")
        prompt.token_ids, prompt.media = self.media.place(prompt.token_ids, prepared)
        prompt.prepared = prepared
        return self._checked(prompt)

    def _from_mapping(
        self, prompt: Mapping[str, Any], add_special_tokens: bool, prepared: Sequence[PreparedItem]
    ) -> Prompt:
        salt = prompt.get("cache_salt")
        check_salt(salt)
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if prompt.get("prompt_embeds") is not None:
            if ids is not None:
                raise RequestError(
                    "prompt_token_ids together with prompt_embeds are not supported", param="prompt_token_ids"
                )
            return self._from_embeds(prompt["prompt_embeds"], text, salt)
        if ids is not None:
            if not isinstance(ids, Sequence) or isinstance(ids, str | bytes):
                raise RequestError(
                    f"prompt_token_ids must be a list of integers, got {type(ids).__name__}",
                    param="prompt_token_ids",
                )
            types = prompt.get("token_type_ids")
            second = None if types is None else second_start(types, len(ids))
            if second is not None and self.pooling is not None and self.pooling.token_types == 1:
                raise RequestError(
                    "token_type_ids must be zeros: this model has one type", param="token_type_ids"
                )
            return self._checked(Prompt(list(ids), text, salt, second))
        if isinstance(text, str):
            return self._from_text(text, salt, add_special_tokens, prepared)
        raise RequestError(
            f"a prompt dict needs 'prompt' (text) or 'prompt_token_ids'; it has {sorted(map(str, prompt))}",
            param="prompt",
        )

    def _from_text(
        self, text: str, salt: str | None, add_special_tokens: bool, prepared: Sequence[PreparedItem] = ()
    ) -> Prompt:
        tokenizer = self.need_tokenizer("a text prompt")
        if len(text) > self.max_model_len * CHARS_PER_TOKEN:
            raise self._too_long(len(text) // CHARS_PER_TOKEN, "at least ")
        self.check_chars(text)
        prompt_text = self.media.rewrite_text(text) if prepared else text
        is_begun = self.media.uses_cross_attention or (self.media.prefix and bool(prepared))
        with_special = add_special_tokens and not is_begun
        token_ids = tokenizer.encode(prompt_text, add_special_tokens=with_special)
        return self._checked(Prompt(token_ids, text, salt))

    def need_tokenizer(self, what: str, param: str | None = None) -> Tokenizer:
        """Return the tokenizer; raise a RequestError that names what needs it if there is none."""
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and skip_tokenizer_init is set: use token ids", param
            )
        return self.tokenizer

    def check_chars(self, text: str) -> None:
        """Raise a RequestError if the text is too long to tokenize."""
        if len(text) > self.max_chars:
            raise RequestError(
                f"the text has {len(text)} characters, and the {self.max_chars // CHARS_PER_TOKEN} tokens of "
                f"this model have at most {self.max_chars}: send it in parts, or raise max_model_len",
                param="prompt",
            )

    def _from_embeds(self, tensor: Any, text: str | None, salt: str | None) -> Prompt:
        if self.pooling is not None:
            raise RequestError("prompt_embeds are for generative models", param="prompt_embeds")
        if self.embeds is None:
            raise RequestError(
                "You must set `--enable-prompt-embeds` to input `prompt_embeds`", param="prompt_embeds"
            )
        embeds = self.embeds.read(tensor, self._check_len)
        return Prompt([0] * len(embeds), text, salt, embeds=embeds)

    def parse_pair(self, first: str, second: str) -> Prompt:
        ids, types = self.need_tokenizer("a pair of texts").encode_pair(first, second)
        return self._checked(Prompt(ids, first + second, second_start=second_start(types, len(ids))))

    def parse_truncated(self, *texts: str, max_len: int, side: str) -> Prompt:
        """Tokenize one or two texts, cut on the `side` left or right to `max_len` tokens in total."""
        ids, types = self.need_tokenizer("a text").encode_cut(*texts, max_len=max_len, side=side)
        second = second_start(types, len(ids)) if len(texts) > 1 else None
        return self._checked(Prompt(ids, second_start=second))

    def _checked(self, prompt: Prompt) -> Prompt:
        ids = prompt.token_ids
        self._check_len(len(ids))
        if {*map(type, ids)} != {int}:
            ids = prompt.token_ids = [self._as_int(id) for id in ids]
        for id in (min(ids), max(ids)):
            if not 0 <= id < self.vocab:
                raise RequestError(
                    f"Token id {id} is out of vocabulary: ids of this model are 0 to {self.vocab - 1}",
                    param="prompt",
                )
        return prompt

    def _check_len(self, num_tokens: int) -> None:
        if not num_tokens:
            raise RequestError("The decoder prompt cannot be empty", param="prompt")
        if num_tokens > self.max_model_len - (self.pooling is None):
            raise self._too_long(num_tokens)
        if self.max_prompt_len is not None and num_tokens > self.max_prompt_len:
            raise RequestError(
                f"Your prompt contains {num_tokens} input tokens, and with chunked prefill off a step holds "
                f"at most {self.max_prompt_len}. Please reduce the length of the input prompt or turn "
                "enable_chunked_prefill on.",
                param="input_tokens",
            )

    def _as_int(self, id: Any) -> int:
        if isinstance(id, bool) or not hasattr(id, "__index__"):
            raise RequestError(f"token ids must be integers, got {id!r}", param="prompt")
        return int(id)

    def _too_long(self, length: int, about: str = "") -> RequestError:
        more = ", and at least one more is needed for the output" if self.pooling is None else ""
        return RequestError(
            f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt "
            f"contains {about}{length} input tokens{more}. Please reduce the length of the input prompt or "
            f"raise max_model_len.",
            param="input_tokens",
        )

    # ---- requests

    def requests(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | CheckedParams,
        *,
        priority: int = 0,
        arrived_at: float | None = None,
        max_logprobs: int | None = None,
        timed: bool = False,
        lora: LoRARequest | None = None,
    ) -> list[Request]:
        """Build one Request per sequence (`n`); the prefix cache shares their prompt. CheckedParams must have
        been checked for the same `lora`."""
        checked = params
        if isinstance(checked, SamplingParams):
            checked = self.check(checked, lora=lora, max_logprobs=max_logprobs)
        params = checked.params
        check_prompt_start(params, len(prompt.token_ids))
        self.media.require(prompt.media)
        if prompt.embeds is not None and params.prompt_logprobs is not None:
            raise RequestError(
                "prompt_logprobs is not compatible with prompt embeds.", param="prompt_logprobs"
            )
        top_id = 0 if lora is None else max(max(prompt.token_ids), checked.top_id)
        top_id = top_id if top_id >= self.vocab else 0
        seed = self._seeds.getrandbits(63) if params.seed is None else params.seed
        arrived_at = time.time() if arrived_at is None else arrived_at
        most = self.max_model_len if params.max_tokens is None else len(prompt.token_ids) + params.max_tokens
        others = params
        if params.n > 1 and params.prompt_logprobs is not None:
            others = params.clone()
            others.prompt_logprobs = others.skip_reading_prefix_cache = None
        children = [
            Request(
                id=request_id if params.n == 1 else f"{k}_{request_id}",
                tokens=prompt.token_ids,
                params=others if k else params,
                prompt_len=len(prompt.token_ids),
                limit=min(self.max_model_len, most),
                seed=seed + k,
                eos_id=checked.eos_id,
                priority=priority,
                arrived_at=arrived_at,
                cache_salt=scoped_salt(prompt.cache_salt),
                hints=prompt.hints,
                embeds=prompt.embeds,
                media=prompt.media,
                timed=timed,
                lora=lora,
                target=self.target,
                top_id=top_id,
            )
            for k in range(params.n)
        ]
        return with_transfer(children)

    def pooling_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: PoolingParams,
        *,
        priority: int = 0,
        arrived_at: float | None = None,
        lora: LoRARequest | None = None,
    ) -> Request:
        """Build the request of a pooling model: the scheduler treats it as a request for one token."""
        self._check_lora(lora)
        params = completed(params, pools(self.pooling, "pooling"), prompt.second_start)
        return Request(
            id=request_id,
            tokens=prompt.token_ids,
            params=_POOLED[bool(params.skip_reading_prefix_cache)],
            prompt_len=len(prompt.token_ids),
            limit=len(prompt.token_ids) + 1,
            seed=0,
            priority=priority,
            arrived_at=time.time() if arrived_at is None else arrived_at,
            cache_salt=scoped_salt(prompt.cache_salt),
            media=prompt.media,
            pooling=params,
            lora=lora,
        )

    def _check_lora(self, lora: LoRARequest | None) -> None:
        if lora is None:
            return
        if not isinstance(lora, LoRARequest):
            kind = type(lora).__name__
            raise RequestError(f"lora_request must be of type LoRARequest, got {kind}", param="lora_request")
        if not self.enable_lora:
            raise RequestError(
                f"Got lora_request {lora.lora_name!r} but LoRA is not enabled! Give enable_lora=True",
                param="lora_request",
            )

    def check(
        self,
        params: SamplingParams,
        *,
        lora: LoRARequest | None = None,
        max_logprobs: int | None = None,
        grammar: StructuredOutputsParams | None = None,
    ) -> CheckedParams:
        """Check and complete params for the model or a LoRA adapter. A grammar equal to `grammar` was checked
        before; any other grammar is compiled here if it is new, which may take seconds."""
        self._check_lora(lora)
        if self.pooling is not None:
            raise RequestError(NOT_GENERATIVE)
        inputs = self.of(lora)
        limit = self.max_logprobs if max_logprobs is None else max_logprobs
        params = inputs._complete(params, limit, grammar)
        for validate in self.validators:
            validate(params)
        eos_id = inputs.eos_ids[0] if inputs.eos_ids and not params.ignore_eos else -1
        return CheckedParams(params, eos_id, 0 if lora is None else params.top_id)

    def _complete(
        self, params: SamplingParams, max_logprobs: int, grammar: StructuredOutputsParams | None
    ) -> SamplingParams:
        """Check the params against the model, and convert bad words and further eos ids to token ids."""
        params = params.clone()
        if params.bad_words:
            params.bad_words_token_ids = self._bad_words(params.bad_words)
        params.timestamp_tokens = self._timestamp_tokens() if params.timestamps else None
        num_extra_vocab = self.vocab - self.model_vocab
        params.verify(vocab=self.model_vocab, max_logprobs=max_logprobs, num_extra_vocab=num_extra_vocab)
        if (outputs := params.structured_outputs) is not None:
            if outputs != grammar:
                self.check_grammar(outputs)
            params.structured_outputs = with_json_text(outputs)
        if len(self.eos_ids) > 1 and not params.ignore_eos:
            params.stop_token_ids = list(dict.fromkeys([*(params.stop_token_ids or ()), *self.eos_ids[1:]]))
        if self.tokenizer is None:
            if params.stop:
                self.need_tokenizer("a stop string", "stop")
            params.detokenize = False
        return params

    def check_grammar(self, grammar: StructuredOutputsParams, seconds: float | None = None) -> None:
        """Compile the grammar as the engine core will, within `seconds` if set, and cache it."""
        if self.grammars is None:
            raise RequestError(
                "structured_outputs need a tokenizer, and skip_tokenizer_init is set",
                param="structured_outputs",
            )
        self.grammars.open()
        with limited(seconds, "structured_outputs: the grammar"):
            self.grammars.check(grammar)

    def _timestamp_tokens(self) -> TimestampTokens:
        if self.media.speech is None or self.media.speech.timestamp_tokens is None:
            raise RequestError("this model has no timestamps", param="timestamps")
        return self.media.speech.timestamp_tokens

    def _bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word in two forms: as at the start of a text, and after a space."""
        tokenizer = self.need_tokenizer("bad_words", "bad_words")
        spellings = (form for word in words for form in (word.lstrip(), " " + word.lstrip()))
        ids = [tokenizer.encode(form, add_special_tokens=False) for form in spellings]
        return [list(unique) for unique in dict.fromkeys(tuple(word_ids) for word_ids in ids if word_ids)]
