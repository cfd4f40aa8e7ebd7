"""Builds the input processor of an engine from its configuration."""

from quire.config.engine import EngineConfig
from quire.configure import eos_ids
from quire.data.latency_target import LatencyTarget
from quire.frontend.inputs import InputProcessor
from quire.frontend.kv_transfer import validators_of
from quire.frontend.multimodal import MediaInputReader
from quire.frontend.prompt_embeds import embeds_reader
from quire.text.grammar import Grammars
from quire.text.tokenizer import Tokenizer


def open_inputs(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    grammars: Grammars | None,
    media: MediaInputReader,
    *,
    max_model_len: int,
    seed: int,
) -> InputProcessor:
    return InputProcessor(
        tokenizer=tokenizer,
        vocab=config.checkpoint.facts.vocab,
        max_model_len=max_model_len,
        eos_ids=eos_ids(config, tokenizer),
        max_logprobs=config.model.max_logprobs,
        seed=seed,
        max_prompt_len=config.scheduler.max_prompt_len,
        pooling=config.pooling,
        embeds=embeds_reader(config),
        media=media,
        grammars=grammars,
        enable_lora=config.lora.enable_lora,
        num_extra_vocab=config.lora.lora_extra_vocab_size,
        validators=validators_of(config),
        target=LatencyTarget.of(config.scheduler.slo_ttft_ms, config.scheduler.slo_itl_ms),
    )
