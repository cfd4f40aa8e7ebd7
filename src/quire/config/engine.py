"""Resolution of the engine configuration: `resolve()` is the only place that fills in defaults."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire.checkpoint.draft import Draft
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.hub import DEFAULT_MODEL_ID, is_default_model
from quire.checkpoint.layout import cache_specs
from quire.checkpoint.model import Checkpoint
from quire.checkpoint.pooling import PoolingFacts, bidirectional_error, resolve_pooling
from quire.checkpoint.quant import choose_quant
from quire.checkpoint.quant.facts import QuantFacts
from quire.checkpoint.tensor_parallel import check_divisible, shard_facts
from quire.config.args import check_args
from quire.config.attention_backends import check_backend
from quire.config.batch_invariance import resolve_batch_invariant
from quire.config.cache_dtype import resolve_cache_dtype
from quire.config.cpu_kernels import Cpu, check_cpu_kernels
from quire.config.data_parallel import local_ranks
from quire.config.env import Env
from quire.config.expert_parallel import with_experts
from quire.config.extensions import ExtensionSection, extension_section
from quire.config.kv_events import check_events
from quire.config.kv_offloading import resolve_offloading
from quire.config.kv_transfer import check_transfer
from quire.config.load import load_section
from quire.config.lora import lora_section
from quire.config.machine import GIB, Machine
from quire.config.parallel import stage_layers
from quire.config.profiling import Profiling
from quire.config.routed_experts import check_routed_experts
from quire.config.sections import (
    AttentionSection,
    CacheSection,
    LoadSection,
    LoRASection,
    ModelSection,
    MultimodalSection,
    ObservabilitySection,
    ParallelSection,
    SchedulerSection,
    options,
)
from quire.config.speculation import SpecFacts
from quire.config.state_caching import limit_seqs_for_states, resolve_own_cache, resolve_state_caching
from quire.errors import ConfigError
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

CPU_KV_CACHE_LIMIT = 4 * GIB
_OVERFLOWS_FLOAT16 = ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma3nForCausalLM", "Glm4ForCausalLM")
"""Architectures with hidden states that overflow float16."""
DTYPE_ALIASES = {"half": "float16", "float": "float32"}

# Rows: least device memory in GiB, default tokens per step by usage, default requests. An A100 uses the last.
CUDA_BUDGETS = (
    (160, {"llm": 16384, "server": 16384}, 1024),
    (70, {"llm": 16384, "server": 8192}, 1024),
    (0, {"llm": 8192, "server": 2048}, 256),
)
CPU_BUDGETS = {"llm": (4096, 256), "server": (2048, 128)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The complete configuration of an engine. All values are resolved."""

    model: ModelSection
    load: LoadSection
    cache: CacheSection
    scheduler: SchedulerSection
    parallel: ParallelSection
    attention: AttentionSection
    lora: LoRASection
    multimodal: MultimodalSection
    observability: ObservabilitySection
    extensions: ExtensionSection = ExtensionSection()
    checkpoint: Checkpoint
    machine: Machine
    pooling: PoolingFacts | None = None
    """Pooling settings; None for a model that generates."""
    speculation: SpecFacts | None = None
    """Settings of speculative decoding; None without it."""
    draft: Draft | None = None
    """The draft model of speculative decoding; None if drafts come without a model."""
    largest_items: Mapping[str, int] = field(default_factory=dict)
    """Number of placeholder tokens of the largest possible image, video and audio clip, by modality."""
    broken_plugins: tuple[str, ...] = ()
    """Names of the plugins that failed in the first process; the other processes do not load them."""
    ray_group: str = ""
    """Hex id of an existing Ray placement group for the ranks; its first bundle is for another actor. If
    empty, a new group is created."""

    @property
    def quant(self) -> QuantFacts | None:
        """Return the quantization of the weights, by the checkpoint or by `--quantization`. None for a GGUF
        file."""
        if self.checkpoint.format == "gguf":
            return None
        return choose_quant(self.model.quantization, self.checkpoint.quant)

    @property
    def states_per_row(self) -> int:
        """Return the number of SSM states of a running request in each layer. A step with draft tokens stores
        the state after each position, since the first rejected draft token is known only afterwards."""
        return _states_per_row(self.speculation)

    @property
    def rank_facts(self) -> ArchFacts:
        """Return the layer sizes of the model shard on one tensor-parallel rank."""
        parallel = self.parallel
        with_experts = not parallel.enable_expert_parallel
        return shard_facts(self.checkpoint.facts, parallel.tensor_parallel_size, with_experts=with_experts)


def resolve(
    args: Mapping[str, Any],
    *,
    checkpoint: Checkpoint,
    machine: Machine,
    usage: str = "llm",
    env: Env | None = None,
    draft: Mapping[str, Any] | None = None,
) -> EngineConfig:
    """Resolve the user's settings, which have vLLM's names. `usage` is `llm` (offline) or `server`; they
    differ in batch sizes and logging. `draft` is the config.json of the draft model."""
    env = env or Env.read(os.environ)
    check_cpu_kernels(env.cpu_kernels, Cpu.read())
    values = check_args(args)
    parallel = _resolve_parallel(values, machine)
    tp_size = parallel.tensor_parallel_size
    check_divisible(checkpoint.facts, tp_size, with_experts=not parallel.enable_expert_parallel)
    pooling = resolve_pooling(
        checkpoint.pooling,
        is_encoder=checkpoint.facts.encoder is not None,
        hidden=checkpoint.facts.size_out,
        token_types=checkpoint.facts.encoder.token_types if checkpoint.facts.encoder else 0,
        runner=values.get("runner", "auto"),
        convert=values.get("convert", "auto"),
        pooler=values.get("pooler_config"),
    )
    pools = pooling is not None
    parallel = _resolve_stages(parallel, checkpoint.facts, env, values, pools=pools)
    parallel = with_experts(parallel, checkpoint.facts, values, pools=pools)
    model = _resolve_model(values, checkpoint, machine, env, pools=pools)
    values = _disable_for_pooling(values, pooling, checkpoint, model.max_model_len)
    values = resolve_own_cache(values, checkpoint.facts)
    cache = _divide_cpu_memory(_resolve_cache(values, model.dtype, machine, env, checkpoint), parallel)
    check_transfer(cache, cache_specs(checkpoint.facts))
    check_events(values.get("kv_events_config", {}), parallel, cache)
    check_routed_experts(values, checkpoint.facts, parallel, cache, model.max_model_len, pools=pools)
    speculation = _spec_facts(values, draft, model.max_model_len, tp_size, pools=pools)
    specs, num_states = cache_specs(shard_facts(checkpoint.facts, tp_size)), _states_per_row(speculation)
    values = limit_seqs_for_states(
        values, specs, cache, machine, default=_budget(machine, usage, 1)[1], num_states=num_states
    )
    return EngineConfig(
        model=model,
        load=load_section(_section_args("load", values), checkpoint.facts, parallel, machine),
        cache=cache,
        scheduler=_resolve_scheduler(values, model.max_model_len, parallel, machine, usage),
        parallel=parallel,
        attention=_resolve_attention(values, env),
        lora=lora_section(_section_args("lora", values)),
        multimodal=MultimodalSection(**_section_args("multimodal", values)),
        observability=_resolve_observability(values, usage),
        checkpoint=checkpoint,
        machine=machine,
        pooling=pooling,
        speculation=speculation,
        extensions=extension_section(
            _section_args("extensions", values), pooling, speculation, model.logprobs_mode
        ),
    )


def _states_per_row(speculation: SpecFacts | None) -> int:
    return 1 if speculation is None else 1 + speculation.num_speculative_tokens


def _spec_facts(
    values: Mapping[str, Any],
    draft: Mapping[str, Any] | None,
    max_model_len: int,
    tp_size: int,
    *,
    pools: bool,
) -> SpecFacts | None:
    facts = SpecFacts.of(values, max_model_len=max_model_len, tensor_parallel_size=tp_size, draft=draft)
    if facts is not None and pools:
        raise ConfigError("speculative_config is not supported for a pooling model, which generates nothing")
    return facts


def _resolve_observability(values: Mapping[str, Any], usage: str) -> ObservabilitySection:
    args = {"disable_log_stats": usage == "llm", **_section_args("observability", values)}
    Profiling.of(args.get("profiler_config", {}))  # raises if it is invalid
    return ObservabilitySection(**args)


def _disable_for_pooling(
    values: dict[str, Any], pooling: PoolingFacts | None, checkpoint: Checkpoint, max_model_len: int
) -> dict[str, Any]:
    """Return the settings without those that pooling does not support; warn about each that was on."""
    facts = checkpoint.facts
    if pooling is not None and facts.borrowed is not None:
        raise ConfigError(
            "a model that runs through transformers only generates: leave runner and convert out, or set"
            " runner to 'generate'"
        )
    if pooling is None:
        return values
    if facts.media is not None and facts.media.num_cross_states:
        raise ConfigError(
            f"{facts.architecture} transcribes audio and does not support pooling: leave runner out"
        )
    off = {"async_scheduling": "a pooling model"}
    if pooling.needs_all_states:
        off["enable_prefix_caching"] = f"pooling of the type {pooling.needs_all_states}"
    if facts.encoder is not None or pooling.bidirectional:
        whole = "an encoder" if facts.encoder is not None else "attention in both directions"
        off |= dict.fromkeys(("enable_prefix_caching", "enable_chunked_prefill"), whole)
        if pooling.bidirectional and (
            reason := bidirectional_error(checkpoint.pooling, facts, max_model_len)
        ):
            raise ConfigError(reason)
        for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
            if values.get(name, max_model_len) < max_model_len:
                raise ConfigError(
                    f"{name} ({values[name]}) is smaller than max_model_len ({max_model_len}), and {whole}"
                    " reads a whole prompt in one step: raise the first or lower the second"
                )
    if facts.encoder is not None:  # an encoder has no KV cache: blocks are empty, one per prompt
        values = {**values, "block_size": 1 << (max_model_len - 1).bit_length()}
    for name in (name for name in off if values.get(name)):
        warn_once(logger, f"{name} has no effect with {off[name]} and is off")
    return {**values, **dict.fromkeys(off, False)}


def _section_args(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if options()[name].section == section}


def _resolve_parallel(values: Mapping[str, Any], machine: Machine) -> ParallelSection:
    device = values.get("device", "auto")
    if device not in ("auto", machine.device):
        raise ConfigError(
            f"device={device!r} was requested, but the engine runs on {machine.device} ({machine.name})"
        )
    args = _section_args("parallel", values)
    tp, pp = args.get("tensor_parallel_size", 1), args.get("pipeline_parallel_size", 1)
    world, nnodes = tp * pp, args.get("nnodes", 1)
    backend = args.get("distributed_executor_backend") or ("uni" if world == 1 else "mp")
    if backend == "uni" and tp * pp > 1:
        raise ConfigError(
            f"distributed_executor_backend='uni' runs on one device, but {tp} x {pp} are requested; use 'mp'"
        )
    args = {"cpu_threads": 1, **args, "device": machine.device, "distributed_executor_backend": backend}
    section = ParallelSection(**args)
    local = local_ranks(section)
    section = replace(section, data_parallel_size_local=len(local), data_parallel_start_rank=local.start)
    num_local = max(len(local), 1) * world
    _check_nodes(args, backend, machine, num_local, nnodes)
    if "cpu_threads" in values:
        return section
    return replace(section, cpu_threads=max(machine.num_cores * nnodes // num_local, 1))


def _check_nodes(args: Mapping[str, Any], backend: str, machine: Machine, world: int, nnodes: int) -> None:
    node_rank = args.get("node_rank", 0)
    if node_rank >= nnodes:
        raise ConfigError(f"node_rank={node_rank} must be below nnodes ({nnodes}): the first machine is 0")
    if world % nnodes:
        raise ConfigError(f"{world} workers cannot be divided evenly over nnodes={nnodes} machines")
    if nnodes > 1 and args.get("data_parallel_size", 1) > 1:
        raise ConfigError(
            "nnodes is for one engine on several machines; for copies use data_parallel_address"
        )
    if machine.device == "cpu" and args.get("device_ids"):
        raise ConfigError(f"device_ids={args['device_ids']} names GPUs, and the engine runs on a CPU")
    num_gpus = machine.num_devices
    shared = machine.device == "cpu" or os.environ.get("QUIRE_TEST_SHARE_GPU") == "1"
    if world // nnodes > num_gpus and backend != "ray" and not shared:
        raise ConfigError(
            f"{world // nnodes} workers on this machine need as many GPUs, and there are {num_gpus}: for more"
            " machines use --distributed-executor-backend ray, or --nnodes with --node-rank and --master-addr"
        )


def _resolve_stages(
    parallel: ParallelSection, facts: ArchFacts, env: Env, values: Mapping[str, Any], *, pools: bool
) -> ParallelSection:
    """Return the section with the layers of each pipeline stage; raise if the model cannot be divided."""
    count = parallel.pipeline_parallel_size
    if count == 1:
        return replace(parallel, pp_layer_partition="")
    cannot = {
        "a pooling model or an encoder": pools or facts.encoder is not None,
        "a model that runs through transformers": facts.borrowed is not None,
        "load_format='sharded_state'": values.get("load_format") == "sharded_state",
    }
    for kind in (kind for kind, applies in cannot.items() if applies):
        raise ConfigError(
            f"pipeline_parallel_size={count} is not supported with {kind}: "
            "leave it out, and use data_parallel_size for more devices"
        )
    partition = parallel.pp_layer_partition or env.pp_layer_partition
    stage_layers(len(facts.layers), count, partition)
    return replace(parallel, pp_layer_partition=partition)


def _resolve_quantization(method: str | None, checkpoint: Checkpoint) -> str | None:
    """Return the requested quantization method or that of the checkpoint. `none` dequantizes a GGUF file."""
    if checkpoint.format != "gguf":
        quant = choose_quant(method, checkpoint.quant)
        return None if quant is None else quant.method
    if method not in (None, "gguf", "none"):
        raise ConfigError(
            f"quantization={method!r} contradicts the checkpoint, which is a GGUF file; leave it out, or use"
            " 'none' to dequantize it"
        )
    return method or "gguf"


def _resolve_model(
    values: Mapping[str, Any], checkpoint: Checkpoint, machine: Machine, env: Env, *, pools: bool
) -> ModelSection:
    named = values.get("model")
    model = DEFAULT_MODEL_ID if named is None or is_default_model(named) else named
    max_len = values.get("max_model_len")
    auto_fit = max_len in ("auto", -1)
    length = checkpoint.derived_max_len if max_len is None or auto_fit else max_len
    if length > checkpoint.derived_max_len and not env.allow_long_max_model_len:
        raise ConfigError(
            f"max_model_len={length} is above the {checkpoint.derived_max_len} tokens that this checkpoint"
            " was made for; lower it, or set QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1 (outputs may be nonsense)"
        )
    max_logprobs = values.get("max_logprobs", 20)
    resolved = {
        "model": model,
        "tokenizer": values.get("tokenizer") or str(checkpoint.path),
        "served_model_name": values.get("served_model_name") or (model,),
        "dtype": _resolve_dtype(values.get("dtype", "auto"), checkpoint, machine, pools=pools),
        "quantization": _resolve_quantization(values.get("quantization"), checkpoint),
        "max_model_len": length,
        "auto_fit": auto_fit,
        "max_logprobs": checkpoint.facts.vocab if max_logprobs == -1 else max_logprobs,
        "batch_invariant": resolve_batch_invariant(checkpoint.facts, machine, values, env, pools=pools),
    }
    borrowed = checkpoint.facts.borrowed
    if borrowed is not None and (borrowed.own_cache or machine.device != "cpu"):
        resolved["enforce_eager"] = True  # code of transformers may not be capturable as a CUDA graph
    return ModelSection(**{**_section_args("model", values), **resolved})


def _resolve_dtype(dtype: str, checkpoint: Checkpoint, machine: Machine, *, pools: bool) -> Any:
    native = {"bfloat16": machine.bf16, "float16": machine.fp16, "float32": True}
    dtype, stored = DTYPE_ALIASES.get(dtype, dtype), checkpoint.dtype
    if machine.device == "cpu":
        if dtype == "auto":
            return stored if native[stored] else "float32"
        return dtype
    if dtype == "bfloat16" and not machine.bf16:
        raise ConfigError(
            f"dtype='bfloat16' needs compute capability 8.0; {machine.name} has"
            f" {machine.capability[0]}.{machine.capability[1]}: use dtype='float16'"
        )
    if dtype != "auto":
        return dtype
    if checkpoint.facts.architecture in _OVERFLOWS_FLOAT16:
        return "bfloat16" if machine.bf16 else "float32"
    # Embeddings are compared element by element: precision matters more than range, hence float16.
    wanted = stored if stored != "float32" else "float16" if pools else "bfloat16"
    return wanted if native[wanted] else "float16"


def _resolve_cache(
    values: Mapping[str, Any], dtype: str, machine: Machine, env: Env, checkpoint: Checkpoint
) -> CacheSection:
    args = _section_args("cache", values)
    block_size = args.get("block_size", 16)
    if block_size & (block_size - 1):
        raise ConfigError(f"block_size={block_size} must be a power of two from 1 to 256")
    if args.get("prefix_caching_hash_algo") == "sha256_cbor":
        warn_once(logger, "prefix_caching_hash_algo='sha256_cbor' is read as 'sha256'")
        args["prefix_caching_hash_algo"] = "sha256"
    whole = {"enable_chunked_prefill": False, "disable_chunked_mm_input": True}
    fixed = (f"and {name} is {off}" for name, off in whole.items() if values.get(name) is off)
    args = resolve_state_caching(args, cache_specs(checkpoint.facts), block_size, next(fixed, ""))
    by_default = not values.get("enable_return_routed_experts") and not values.get("kv_transfer_config")
    args = resolve_offloading(args, cache_specs(checkpoint.facts), machine, by_default=by_default)
    kv_dtype = resolve_cache_dtype(args.get("kv_cache_dtype", "auto"), dtype, machine, checkpoint)
    sized = {"gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override"} & args.keys()
    if machine.device == "cpu" and not sized:
        space = env.cpu_kvcache_space
        if space is not None and not space > 0:
            raise ConfigError(
                f"QUIRE_CPU_KVCACHE_SPACE={space} must be above 0 (GiB); unset it for the default of 4"
            )
        args["kv_cache_memory_limit"] = CPU_KV_CACHE_LIMIT if space is None else int(space * GIB)
    args.setdefault("gpu_memory_utilization", 0.92)
    return CacheSection(**{**args, "kv_cache_dtype": kv_dtype})


def _divide_cpu_memory(cache: CacheSection, parallel: ParallelSection) -> CacheSection:
    """Return the section with gpu_memory_utilization divided by the number of ranks that share a CPU."""
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    ranks *= max(parallel.data_parallel_size_local or 1, 1)
    if parallel.device != "cpu" or ranks == 1:
        return cache
    return replace(cache, gpu_memory_utilization=cache.gpu_memory_utilization / ranks)


def _resolve_attention(values: Mapping[str, Any], env: Env) -> AttentionSection:
    backend = values.get("attention_backend") or env.attention_backend or "AUTO"
    return AttentionSection(attention_backend=check_backend(backend))


def _budget(machine: Machine, usage: str, world: int) -> tuple[int, int]:
    """Return the default number of tokens per step and the default number of running requests."""
    if usage not in CPU_BUDGETS:
        return 2048, 128
    if machine.device == "cpu":
        tokens, seqs = CPU_BUDGETS[usage]
        return tokens * world, seqs * world
    rows = (
        CUDA_BUDGETS[-1:]
        if "a100" in machine.name.lower() and machine.total_bytes < 160 * GIB
        else CUDA_BUDGETS
    )
    by_usage, seqs = next((by, seqs) for least, by, seqs in rows if machine.total_bytes >= least * GIB)
    return by_usage[usage], seqs


def _resolve_scheduler(
    values: Mapping[str, Any], max_model_len: int, parallel: ParallelSection, machine: Machine, usage: str
) -> SchedulerSection:
    args = _section_args("scheduler", values)
    chunked = args.get("enable_chunked_prefill", True)
    tokens, seqs = _budget(machine, usage, parallel.tensor_parallel_size * parallel.pipeline_parallel_size)
    if args.get("performance_mode") == "throughput":
        tokens, seqs = 2 * tokens, 2 * seqs
    if not chunked:
        tokens = max(tokens, max_model_len)
    max_seqs = args.get("max_num_seqs", seqs)
    tokens = min(tokens, max_seqs * max_model_len)
    if "max_num_seqs" in args:
        tokens = max(tokens, max_seqs)
    args.setdefault("max_num_batched_tokens", tokens)
    args.setdefault("max_num_seqs", min(seqs, args["max_num_batched_tokens"]))
    args.setdefault("max_num_scheduled_tokens", args["max_num_batched_tokens"])
    args.setdefault("async_scheduling", machine.device == "cuda")
    if args["async_scheduling"] and machine.device == "cpu":
        warn_once(logger, "async_scheduling=True has no effect on a CPU and is ignored")
        args["async_scheduling"] = False
    if args["async_scheduling"] and parallel.pipeline_parallel_size > 1:
        if "async_scheduling" in values:
            warn_once(logger, "async_scheduling=True has no effect with pipeline stages and is off")
        args["async_scheduling"] = False
    section = SchedulerSection(**args)
    _check_budget(section, max_model_len)
    return section


def _check_budget(section: SchedulerSection, max_model_len: int) -> None:
    tokens, seqs = section.max_num_batched_tokens, section.max_num_seqs
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens", "long_prefill_token_threshold"):
        limit = getattr(section, name)
        if 0 < limit < max_model_len and not section.enable_chunked_prefill:
            raise ConfigError(
                f"{name} ({limit}) is smaller than max_model_len ({max_model_len}) and chunked prefill is"
                " off, so that a longer prompt could never run: raise the first, lower the second, or turn"
                " enable_chunked_prefill on"
            )
    if tokens < seqs:
        raise ConfigError(
            f"max_num_batched_tokens ({tokens}) is smaller than max_num_seqs ({seqs}): each running request"
            " needs a token per step; raise the first or lower the second"
        )
    if section.max_num_scheduled_tokens > tokens:
        raise ConfigError(
            f"max_num_scheduled_tokens ({section.max_num_scheduled_tokens}) is above max_num_batched_tokens"
            f" ({tokens}); lower it or leave it out"
        )
    if section.long_prefill_token_threshold > max_model_len:
        raise ConfigError(
            f"long_prefill_token_threshold ({section.long_prefill_token_threshold}) is above max_model_len"
            f" ({max_model_len}); lower it, or set it to 0 for no bound"
        )
    if tokens > seqs * max_model_len:
        warn_once(
            logger,
            f"max_num_batched_tokens ({tokens}) is above max_num_seqs * max_model_len"
            f" ({seqs * max_model_len}): the rest can never be used",
        )
