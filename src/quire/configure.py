"""Builds the resolved configuration of an engine, its tokenizer and its EOS token ids."""

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoint.draft import METHODS as DRAFT_METHODS
from quire.checkpoint.draft import Draft, check_draft_settings, check_vocabulary, read_draft
from quire.checkpoint.hub import DEFAULT_MODEL, ModelFiles, find_model, is_default_model, locate
from quire.checkpoint.model import Checkpoint, read_checkpoint
from quire.checkpoint.quant.hqq import is_saved_by_hqq
from quire.checkpoint.reader import read_json
from quire.checkpoint.tensor_parallel import check_divisible
from quire.config.args import check_args
from quire.config.engine import EngineConfig, resolve
from quire.config.env import Env, warn_unknown
from quire.config.expert_parallel import steps_together
from quire.config.extensions import with_installed
from quire.config.generation import default_sampling
from quire.config.load import check_weight_transfer
from quire.config.mm_caches import check_cache
from quire.config.mm_limits import check_cross_attention, drop_unused_encoder, limits_of
from quire.config.plugins import load_plugins
from quire.config.sections import SECTIONS
from quire.config.speculation import read_settings
from quire.config.structured_outputs import output_switches
from quire.errors import ConfigError
from quire.logs import get_logger
from quire.system.platform import detect
from quire.text.grammar import Grammars, Vocabulary
from quire.text.grammar_lexers import MAX_BYTES

if TYPE_CHECKING:  # a supervisor opens no tokenizer, and a core only for grammars
    from quire.text.tokenizer import TokenBytes, Tokenizer

logger = get_logger(__name__)


def configure(settings: Mapping[str, Any], usage: str = "llm") -> EngineConfig:
    """Find the model that `settings` (engine arguments by name) select, and resolve every setting. `usage` is
    `llm` (offline) or `server`; their default batch sizes differ.

    Most invalid settings are rejected before anything is downloaded. Settings that depend on a hub model's
    config.json are checked before the weights of the model and of its draft model are downloaded.
    """
    env = Env.read(os.environ)
    warn_unknown(os.environ)
    broken_plugins = load_plugins()
    values = check_args(settings)
    is_text_only = values.get("language_model_only", False)
    limits = limits_of(values.get("limit_mm_per_prompt"), language_model_only=is_text_only)
    check_cache(values)
    drafts = read_settings(values)  # raises a ConfigError if it is invalid
    if ids := values.get("device_ids"):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(ids)  # before the driver enumerates devices
    machine = detect(values.get("device", "auto"))

    draft = _find_draft(drafts, values, env)
    config_path = _locate_config(values, env)
    model = find_model(
        values.get("model"),
        revision=values.get("revision"),
        load_format=values.get("load_format", "auto"),
        gguf_file=values.get("gguf_file"),
        with_code=values.get("trust_remote_code", False),
        needs_config=config_path is None,
        **download_options(values, env),
    )

    def resolve_files() -> EngineConfig:
        checkpoint = _read_model(values, model.path, config_path, limits)
        draft_path = (config_path or model.path) if draft is None else draft.path
        draft_config = read_json(draft_path / "config.json") if drafts and draft_path.is_dir() else None
        config = resolve(
            values, checkpoint=checkpoint, machine=machine, usage=usage, env=env, draft=draft_config
        )
        check_weight_transfer(config.extensions.weight_transfer_config, checkpoint, config.load)
        return _with_draft(config, None if draft is None else draft.path)

    config = resolve_files()
    fetched = [files.fetch_weights() for files in (model, draft) if files is not None]
    if any(fetched) and _weights_tell_quantization(config):
        config = resolve_files()
    _log_model(config, values)
    extensions = with_installed(config.extensions, config.pooling, config.speculation)
    return replace(config, broken_plugins=broken_plugins, extensions=extensions)


def _read_model(
    values: Mapping[str, Any], path: Path, config_path: Path | None, limits: Mapping[str, int]
) -> Checkpoint:
    """Read the checkpoint at `path`, without its media encoder if the `limits` of its modalities are all
    0."""
    checkpoint = read_checkpoint(
        path,
        values.get("hf_overrides"),
        config_path=config_path,
        model_impl=values.get("model_impl", "auto"),
        trust_remote_code=values.get("trust_remote_code", False),
    )
    checkpoint = replace(checkpoint, facts=drop_unused_encoder(checkpoint.facts, limits))
    check_cross_attention(checkpoint.facts, values)
    if is_default_model(values.get("model")):
        checkpoint = replace(checkpoint, generation=dict(DEFAULT_MODEL.generation))
    return checkpoint


def _weights_tell_quantization(config: EngineConfig) -> bool:
    """Return whether weights of the model or its draft were saved by the package hqq, which config.json may
    not mention."""
    checkpoints = [config.checkpoint, *([] if config.draft is None else [config.draft.checkpoint])]
    return any(stored.quant is None and is_saved_by_hqq(stored.path) for stored in checkpoints)


def download_options(values: Mapping[str, Any], env: Env) -> dict[str, Any]:
    """Return the keyword arguments for `locate` and `find_model` that are the same for every download."""
    return {
        "download_dir": values.get("download_dir"),
        "token": values.get("hf_token"),
        "cache_root": env.cache_root,
        "progress": values.get("use_tqdm_on_load", True),
    }


def _log_model(config: EngineConfig, values: Mapping[str, Any]) -> None:
    """Log the model, its dtype and device, the engine arguments that were set, and default sampling
    parameters."""
    checkpoint, machine, model = config.checkpoint, config.machine, values.get("model")
    is_local = is_default_model(model) or Path(str(model)).exists()  # downloads are named by hashes
    weights = "GGUF" if checkpoint.format == "gguf" else "" if config.quant is None else config.quant.method
    logger.info(
        "Model %s (%s): %s%s, at most %s tokens, on %s",
        checkpoint.path.name if is_local else model,
        checkpoint.facts.architecture,
        config.model.dtype,
        f" with {weights} weights" if weights else "",
        f"{config.model.max_model_len:,}",
        machine.name or machine.device,
    )
    if arguments := {name: value for name, value in values.items() if name != "hf_token"}:
        logger.info("Non-default arguments: %s", arguments)
    if config.scheduler.enable_chunked_prefill:
        tokens = config.scheduler.max_num_batched_tokens
        logger.info("Chunked prefill is enabled with max_num_batched_tokens=%d.", tokens)
    if defaults := default_sampling(config):
        logger.info(
            "Requests without sampling parameters use the model's: %s. `--generation-config vllm` turns this"
            " off",
            defaults,
        )


def _locate_config(values: Mapping[str, Any], env: Env) -> Path | None:
    """Return the local directory of `hf_config_path`, whose config.json replaces the model's; None if it is
    not set."""
    if values.get("hf_config_path") is None:
        return None
    return locate(values["hf_config_path"], load_format="dummy", **download_options(values, env))


def _find_draft(drafts: Mapping[str, Any], values: Mapping[str, Any], env: Env) -> ModelFiles | None:
    """Return the files of the draft model; None if `drafts`, the speculative settings, name no separate
    model."""
    if drafts.get("model") is None or drafts["method"] in ("ngram", "suffix", "mtp"):
        return None
    return find_model(
        drafts["model"],
        revision=drafts.get("revision"),
        load_format=values.get("load_format", "auto"),
        **download_options(values, env),
    )


def _with_draft(config: EngineConfig, path: Path | None) -> EngineConfig:
    """Return the config with the draft model at `path`, if the drafting method uses a model. Raise a
    ConfigError if the draft model does not match the target model."""
    if config.speculation is None:
        return config
    target = config.checkpoint
    if config.machine.device == "cpu" and config.speculation.rejection_sample_method == "synthetic":
        raise ConfigError("rejection_sample_method='synthetic' is for GPU benchmarks: leave it out on a CPU")
    if config.parallel.pipeline_parallel_size > 1 or steps_together(config.parallel):
        raise ConfigError(
            "speculative decoding is not supported yet with pipeline parallelism, or with expert parallelism "
            "over several engines: leave speculative_config out"
        )
    if config.speculation.method not in DRAFT_METHODS:
        return config
    speculation, tp_size = config.speculation, config.parallel.tensor_parallel_size
    draft = read_draft(speculation.method, target, speculation.num_speculative_tokens, path)
    alike = {
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "attention_backend": config.attention.attention_backend,
        "draft_tensor_parallel_size": tp_size,
    }
    check_draft_settings(
        draft, {name: getattr(speculation, name) for name in ("quantization", *alike)}, alike
    )
    check_divisible(draft.facts, tp_size)
    vocabs = [None if x is None else x.get_vocab() for x in _tokenizers(config, draft)]
    check_vocabulary(draft, target.facts, *vocabs)
    return replace(config, draft=draft)


def _tokenizers(config: EngineConfig, draft: Draft) -> "tuple[Tokenizer | None, Tokenizer | None]":
    """Return the tokenizers of the target and the draft model, whose vocabularies must match. Both are None
    for a draft head, or if the draft model has no tokenizer."""
    path = draft.checkpoint.path
    if draft.method != "draft_model" or not (path.is_file() or (path / "tokenizer.json").is_file()):
        return None, None
    from quire.text.tokenizer import load_tokenizer

    return open_tokenizer(config), load_tokenizer(path, draft.checkpoint.format)


def open_tokenizer(config: EngineConfig) -> "Tokenizer | None":
    model = config.model
    if model.skip_tokenizer_init:
        return None
    path = Path(model.tokenizer)
    if path != config.checkpoint.path:
        env = Env.read(os.environ)
        path = locate(
            model.tokenizer,
            revision=model.tokenizer_revision,
            token=model.hf_token,
            cache_root=env.cache_root,
            load_format="dummy",
        )
    from quire.text.tokenizer import load_tokenizer

    return load_tokenizer(
        path, "gguf" if path.suffix == ".gguf" else "hf", trust_remote_code=model.trust_remote_code
    )


def eos_ids(config: EngineConfig, tokenizer: "Tokenizer | None") -> tuple[int, ...]:
    """Return the EOS token ids. The tokenizer's EOS token comes first: an output that ends with this token
    has no stop_reason."""
    tokenizer_eos = tokenizer.eos_token_id if tokenizer is not None else None
    return tuple(
        dict.fromkeys([*([] if tokenizer_eos is None else [tokenizer_eos]), *config.checkpoint.eos_ids])
    )


def open_grammars(
    config: EngineConfig,
    tokenizer: "Tokenizer | None" = None,
    *,
    max_bytes: int = MAX_BYTES,
    only_checks: bool = False,
) -> Grammars | None:
    """Return the compiler of grammars for constrained outputs; None for a pooling model or without a
    tokenizer. If `tokenizer` is None, it is opened on first use. Up to `max_bytes` of compiled grammars are
    cached. With `only_checks`, grammars are checked and no masks are computed."""
    if config.model.skip_tokenizer_init or config.pooling is not None:
        return None

    def vocabulary() -> Vocabulary:
        opened = open_tokenizer(config) if tokenizer is None else tokenizer
        assert opened is not None
        read = byte_vocabulary_of if only_checks else vocabulary_of
        return read(opened, config.checkpoint.facts.vocab, eos_ids(config, opened))

    num_threads = config.parallel.cpu_threads if config.machine.device == "cpu" else None
    switches = output_switches(config.model.structured_outputs_config)
    return Grammars(vocabulary, num_threads, switches, max_bytes)


def vocabulary_of(tokenizer: "Tokenizer", size: int, eos: tuple[int, ...]) -> Vocabulary:
    """Return the vocabulary, as grammars need it, of a model with `size` token ids. Raise a ValueError if the
    tokenizer does not support grammars."""
    table = _token_bytes(tokenizer, eos)
    return Vocabulary(
        tokens=[table[token_id] for token_id in range(max(size, tokenizer.max_token_id + 1))],
        special_ids=tokenizer.all_special_ids,
        eos_ids=eos,
        encode=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def byte_vocabulary_of(tokenizer: "Tokenizer", size: int, eos: tuple[int, ...]) -> Vocabulary:
    """Return a small vocabulary for checks of grammars: the special tokens of a model and one token for each
    byte, at ids of other tokens. A grammar is valid over it if it is valid over the whole vocabulary, which
    takes a second longer to open."""
    table, special_ids = _token_bytes(tokenizer, eos), frozenset(tokenizer.all_special_ids)
    taken = special_ids.union(eos)
    tokens = [b""] * max(size, max(taken) + 1)
    for token_id in special_ids:
        tokens[token_id] = table[token_id]
    ids = [token_id for token_id in range(len(tokens) + 256) if token_id not in taken][:256]
    tokens += [b""] * (ids[-1] + 1 - len(tokens))
    for byte, token_id in enumerate(ids):
        tokens[token_id] = bytes((byte,))

    def encode(text: str) -> list[int]:
        return [ids[byte] for byte in text.encode()]

    return Vocabulary(tokens, tokenizer.all_special_ids, eos, encode, slices=())


def _token_bytes(tokenizer: "Tokenizer", eos: tuple[int, ...]) -> "TokenBytes":
    table = tokenizer.token_bytes
    if table is None or not eos:
        raise ValueError("it has no EOS token" if table else "its decoder does not work token by token")
    return table


def cache_info(config: EngineConfig, *, num_blocks: int, num_tokens: int) -> dict[str, Any]:
    """Return the labels of the metric `vllm:cache_config_info`."""
    cache = config.cache
    return {
        "block_size": cache.block_size,
        "cache_dtype": cache.kv_cache_dtype,
        "enable_prefix_caching": cache.enable_prefix_caching,
        "gpu_memory_utilization": cache.gpu_memory_utilization,
        "mamba_block_size": cache.mamba_block_size,
        "mamba_cache_mode": cache.mamba_cache_mode,
        "num_gpu_blocks": num_blocks,
        "kv_cache_size_tokens": num_tokens,
    }


def settings_of(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """Return the resolved settings as {section: {field: value}}, without secrets (fields with
    `repr=False`)."""
    return {
        name: {field.name: getattr(section, field.name) for field in fields(section) if field.repr}
        for name in SECTIONS
        if (section := getattr(config, name)) is not None
    }
