"""Builds an engine core from a configuration."""

from dataclasses import replace

from quire.checkpoint.layout import cache_specs, has_ssm_state
from quire.config.engine import EngineConfig
from quire.config.structured_outputs import constrains_reasoning
from quire.configure import open_grammars, open_tokenizer
from quire.core.dp_sync import open_lockstep
from quire.core.engine_core import EngineCore
from quire.core.kv_events import open_publisher, report_events
from quire.core.kv_tiers import open_tiers
from quire.executor import EXECUTORS, Executor
from quire.executor.worker_process import num_compilers
from quire.kernels.compile_processes import compile_processes
from quire.logs import get_logger
from quire.memory import MAX_SAMPLES, CacheSize, max_forced, max_kept, max_span, max_vectors
from quire.sched.encoder_cache import EncoderCache
from quire.sched.forced import ForcedDrafts
from quire.sched.kv_manager import KVManager
from quire.sched.lora import LoRAScheduler
from quire.sched.proposers import NUM_DRAFT_KINDS, proposer_of
from quire.sched.proposers.adaptive_length import AdaptiveDraftLength
from quire.sched.routed_experts import RoutedExperts
from quire.sched.scheduler import Scheduler
from quire.sched.spec import Drafting
from quire.sched.state_cache import StateCache
from quire.sched.targets import Targets
from quire.system.process import limit_thread_spinning
from quire.text.grammar import Grammars

log = get_logger(__name__)

_LEAST_GAP = 1024
"""On a GPU, number of tokens after a reused checkpoint of SSM states in which no new checkpoint is taken. A
checkpoint needs a step of its own, which takes longer than recomputing fewer tokens."""


def build_core(
    config: EngineConfig, grammars: Grammars | None = None, token: str | None = None
) -> tuple[EngineCore, CacheSize]:
    """Start the executor, then build a scheduler over its KV blocks; return the core and the size of its
    cache. `grammars` may be shared with the request validation; `token` is the secret of engines that step
    together."""
    limit_thread_spinning()
    config = with_largest(config)
    lockstep = open_lockstep(config.parallel, token)
    publisher, backend = None, config.parallel.distributed_executor_backend
    try:
        publisher = open_publisher(config)
        if config.model.structured_outputs_config:
            grammars = grammars or open_grammars(config)
            if grammars is not None:
                grammars.prepare()  # beside the loading of weights
        # Before torch is imported, which takes as long here as in the processes that compile kernels.
        with compile_processes(num_compilers(config) if backend == "uni" else 0):
            executor: Executor = EXECUTORS[backend](config)
            cache = executor.start()
    except BaseException:
        if lockstep is not None:
            lockstep.abandon()  # the other engines end at once, not after the timeout
        if publisher is not None:
            publisher.close()
        raise
    depth = max(config.parallel.pipeline_parallel_size, 2 if config.scheduler.async_scheduling else 1)
    if config.speculation is not None and not config.model.logprobs_mode.startswith("raw"):
        depth = 1  # the host samples with random numbers by position
    if config.extensions.logits_processors:
        depth = 1  # logits processors read all earlier tokens of a request
    lora = config.lora
    adapters = None
    if lora.enable_lora:
        adapters = LoRAScheduler(
            executor,
            max_slots=lora.max_loras,
            max_read=lora.max_cpu_loras,
            vocab=config.checkpoint.facts.vocab,
        )
    kv = build_kv_manager(config, cache)
    if publisher is not None:
        report_events(config, kv, publisher)
    if config.cache.has_tiers and kv.share_prefixes:
        try:
            open_tiers(config, executor, kv)
        except BaseException:
            executor.close()
            if publisher is not None:
                publisher.close()
            raise
    scheduler = build_scheduler(config, cache, grammars or open_grammars(config), adapters, kv)
    return EngineCore(executor, scheduler, depth=depth, lockstep=lockstep), cache


def with_largest(config: EngineConfig) -> EngineConfig:
    """Return the configuration with `largest_items` set: the number of encoder embeddings of the largest
    possible item of each modality (image, video, audio)."""
    media = config.checkpoint.facts.media
    if media is None:
        return config
    from quire.multimodal.largest_items import largest_items

    path, longest = config.checkpoint.path, config.model.max_model_len
    sizes = largest_items(path, media, config.multimodal, open_tokenizer(config), longest)
    return replace(config, largest_items=sizes)


def build_scheduler(
    config: EngineConfig,
    cache: CacheSize,
    grammars: Grammars | None = None,
    adapters: LoRAScheduler | None = None,
    kv: KVManager | None = None,
) -> Scheduler:
    limits, moe = config.scheduler, config.checkpoint.facts.moe
    kv, routed, targets = kv or build_kv_manager(config, cache), None, None
    if limits.has_targets:
        targets = Targets(fair=limits.share_by_key, policy=limits.scheduling_policy)
    if config.extensions.enable_return_routed_experts and moe is not None:
        routed = RoutedExperts(kv, moe.experts + moe.num_identity_experts)
    scheduler = Scheduler(
        kv=kv,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_scheduled_tokens,
        max_model_len=cache.max_model_len,
        long_prefill_token_threshold=limits.long_prefill_token_threshold,
        policy=limits.scheduling_policy,
        chunked_prefill=limits.enable_chunked_prefill,
        reserve_full_prompt=limits.scheduler_reserve_full_isl,
        watermark=limits.watermark,
        num_stages=config.parallel.pipeline_parallel_size,
        grammars=grammars,
        fair=limits.share_by_key,
        targets=targets,
        drafting=_build_drafting(config),
        routed=routed,
        adapters=adapters,
        media=EncoderCache(
            size=max_kept(config),
            max_encoded=max_vectors(config),
            undivided_items=max_span(config) is not None,
        ),
    )
    scheduler.constraints.constrains_reasoning = constrains_reasoning(config.model.structured_outputs_config)
    if (most := max_forced(config)) and grammars is not None:
        scheduler.admitter.forced = ForcedDrafts(scheduler.constraints, most)
    return scheduler


def build_kv_manager(config: EngineConfig, cache: CacheSize) -> KVManager:
    share, unit = config.cache.enable_prefix_caching, config.cache.mamba_block_size
    states, off_reason = None, "" if share else _why_no_prefixes(config)
    if unit is not None and not cache.num_checkpoints:
        log.warning(
            "Prefix caching is off: no memory is left for checkpoints of SSM states. Lower max_num_seqs (%d)"
            " or max_model_len (%d), or raise gpu_memory_utilization",
            config.scheduler.max_num_seqs,
            cache.max_model_len,
        )
        share, off_reason = False, "no memory is left for checkpoints of SSM states"
    elif unit is not None:
        states = StateCache(
            num_slots=cache.num_checkpoints,
            max_rows=config.scheduler.max_num_seqs,
            block_size=config.cache.block_size,
            unit=unit,
            interval=config.cache.prefix_cache_retention_interval,
            least_gap=_LEAST_GAP if config.machine.device == "cuda" else 0,
            whole_items=max_span(config) is not None,
        )
    specs, has_draft = cache_specs(config.checkpoint.facts), config.draft is not None
    return KVManager(
        num_blocks=cache.num_blocks,
        block_size=config.cache.block_size,
        max_rows=config.scheduler.max_num_seqs,
        share_prefixes=share,
        windows=cache.windows,
        max_chunk=config.scheduler.max_chunk,
        states=states,
        has_pages=states is None or any(spec is not None and spec.is_paged for spec in specs) or has_draft,
        off_reason=off_reason,
    )


def _why_no_prefixes(config: EngineConfig) -> str:
    """Return why prefix caching is off, as the reason to report for cache misses."""
    pooling, facts = config.pooling, config.checkpoint.facts
    if facts.borrowed is not None and facts.borrowed.own_cache:
        return "the model keeps the cache of transformers, not blocks"
    if facts.encoder is not None:
        return "the model is an encoder"
    if pooling is not None and pooling.bidirectional:
        return "the model attends in both directions"
    if pooling is not None and pooling.needs_all_states:
        return f"pooling of the type {pooling.needs_all_states} needs the states of all tokens"
    if has_ssm_state(cache_specs(facts)):
        return "the model has SSM states, and enable_prefix_caching is off or no step may end inside a prompt"
    return "enable_prefix_caching is off"


def _build_drafting(config: EngineConfig) -> Drafting | None:
    spec = config.speculation
    if spec is None:
        return None
    max_drafts = spec.num_speculative_tokens
    on_gpu = config.machine.device == "cuda"
    proposer = None if on_gpu and spec.method == "ngram" else proposer_of(spec)
    num_kinds = 1 if proposer is None else NUM_DRAFT_KINDS
    draft_length = AdaptiveDraftLength(
        max_rows=config.scheduler.max_num_seqs, max_drafts=max_drafts, num_kinds=num_kinds
    )
    max_samples = MAX_SAMPLES if on_gpu else None
    return Drafting(
        draft_length,
        proposer,
        max_drafts=max_drafts,
        ahead=on_gpu,
        max_samples=max_samples,
        max_len=spec.max_model_len,
        vocab=config.checkpoint.facts.vocab,
        max_drafts_of=spec.most if spec.num_speculative_tokens_per_batch_size else None,
    )
