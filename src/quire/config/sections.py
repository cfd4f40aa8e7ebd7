"""Every field of the configuration, by section. A field's docstring is its help text on the command line.

A section holds resolved values; `resolve()` fills in fields without a default.
"""

import functools
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from quire.config.extensions import ExtensionSection
from quire.config.field_rule import FieldRule


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """The model and its tokenizer."""

    model: str
    """Directory with config.json, .gguf file (any part of a split one), hub id (`org/name`,
    `org/name:Q4_K_M`, `org/name:FILE.gguf`) or URL of either in an object store (`s3://bucket/path`,
    `gs://bucket/path`). Default: the packaged SmolLM2-135M-Instruct."""
    runner: Literal["auto", "generate", "pooling"] = "auto"
    """Task of the model: to generate, or to pool (embed, classify, score). `auto`: pooling for encoders,
    classifiers and models saved by sentence-transformers."""
    convert: Literal["auto", "none", "embed", "classify"] = "auto"
    """Output of a pooling model. `auto`: classes if it is a classifier, else embeddings."""
    pooler_config: dict[str, Any] = field(default_factory=dict)
    """JSON of pooling settings: pooling_type (LAST, CLS, MEAN; per token ALL, STEP), use_activation,
    dimensions, and for STEP step_tag_id and returned_token_ids. Default: the checkpoint's."""
    tokenizer: str
    """Directory, .gguf file, hub id or URL of the tokenizer. Default: the model's."""
    tokenizer_mode: Literal["auto", "hf", "slow"] = "auto"
    """Accepted for compatibility: the fast tokenizer is always used."""
    skip_tokenizer_init: bool = False
    """Do not load the tokenizer: prompts and outputs are token ids."""
    trust_remote_code: bool = False
    """Run the Python code of a checkpoint if neither Quire nor transformers supports its architecture. Not
    needed for other checkpoints, and not done for them."""
    model_impl: Literal["auto", "quire", "vllm", "transformers", "transformers_own_cache"] = "auto"
    """Implementation of the model: `quire` (also `vllm`), Quire's; `transformers`, slower, any decoder of the
    installed transformers; `transformers_own_cache`, far slower, the same with transformers' own cache, one
    sequence at a time; `auto`, transformers if Quire has none."""
    dtype: Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
    """Type of weights and activations. Default: the checkpoint's if the machine supports it natively; a
    float32 checkpoint becomes bfloat16 on CUDA, or float16 for pooling. Gemma 2 to 3n and GLM-4 overflow
    float16: they use bfloat16 or float32."""
    seed: int = 0
    """Sampling seed of requests that have none."""
    revision: str | None = None
    """Branch, tag or commit of the model on the hub."""
    tokenizer_revision: str | None = None
    """Branch, tag or commit of the tokenizer on the hub."""
    gguf_file: str | None = None
    """The .gguf file to read from a model directory, hub id or URL that has several."""
    max_model_len: Annotated[int, FieldRule(at_least=1, human=True, auto=True)]
    """Longest sequence in tokens, prompt and output together. Default: the checkpoint's maximum. `auto` or
    -1: as much of the maximum as fits in the KV cache."""
    auto_fit: Annotated[bool, FieldRule(derived=True)] = False
    """Whether the worker may lower max_model_len until one sequence fits in the KV cache."""
    quantization: Annotated[str | None, FieldRule(short="-q")] = None
    """Format of the weights. Default: the checkpoint's. The quantized blocks of a GGUF file are used as they
    are (`gguf`), or dequantized to dtype (`none`)."""
    max_logprobs: Annotated[int, FieldRule(at_least=-1)] = 20
    """Most logprobs per token that a request may set; -1: the whole vocabulary."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = (
        "raw_logprobs"
    )
    """Content of `logprobs`: before or after penalties and temperature, normalised or not."""
    enable_sleep_mode: bool = False
    """Allow the engine to be put to sleep, which frees its memory, and to be woken up."""
    enable_prompt_embeds: bool = False
    """Let requests send their prompts as embeddings (`prompt_embeds`), instead of texts or token ids."""
    enforce_eager: bool = False
    """Never capture CUDA graphs on a GPU, nor record decode steps on a CPU."""
    batch_invariant: bool = False
    """Compute the same bits for a request in any batch, at some cost in speed on a GPU. The C kernels of a
    CPU always do, except for long chunks of models with latent attention."""
    served_model_name: tuple[str, ...]
    """Model names that the API accepts; it reports the first name. Default: the model argument."""
    hf_token: str | None = field(default=None, repr=False)
    """Token for private or gated models on the hub."""
    hf_config_path: str | None = None
    """Directory, hub id or URL with the config.json to read instead of the model's."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """JSON of overrides of the checkpoint's config.json."""
    generation_config: str = "auto"
    """Source of default sampling parameters: `auto` (the checkpoint), `quire` or `vllm` (neutral values), or
    a directory with a generation_config.json."""
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    """JSON of default sampling parameters, overriding the generation config."""
    structured_outputs_config: dict[str, Any] = field(default_factory=dict)
    """JSON of switches for all constrained outputs: disable_any_whitespace, disable_additional_properties,
    enable_in_reasoning. With any key, their vocabulary is prepared at the start."""
    chat_template: str | None = None
    """Chat template: a file, the template itself, or the name of a template in docs/tools.md. Default: the
    tokenizer's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSection:
    """Loading of weights from disk to the device."""

    load_format: Literal["auto", "safetensors", "pt", "gguf", "dummy", "sharded_state"] = "auto"
    """Format of the weight files; `pt` is pytorch_model.bin, `dummy` fills random weights, `sharded_state` is
    the output of `quire save-sharded-state`."""
    download_dir: str | None = None
    """Directory of downloads from the hub and from object stores. Default: the hub's cache, and `stores`
    in QUIRE_CACHE_ROOT."""
    use_tqdm_on_load: bool = True
    """Show progress while downloading and loading."""
    cpu_offload_gb: Annotated[float, FieldRule(at_least=0)] = 0
    """GiB of weights per GPU that are kept in host memory, for models that do not fit: whole layers, which
    every step copies to the GPU. Ignored on a CPU, where all weights are in host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSection:
    """The KV cache: its size and its blocks."""

    block_size: Annotated[int, FieldRule(at_least=1, at_most=256)] = 16
    """Tokens in a block; a power of two."""
    gpu_memory_utilization: Annotated[float, FieldRule(above=0, at_most=1)]
    """Share of the device's memory for weights, activations and KV cache. Default: 0.92. On a CPU, setting it
    also lifts kv_cache_memory_limit."""
    kv_cache_memory_bytes: Annotated[int | None, FieldRule(at_least=1, human=True)] = None
    """Exact size of the KV cache of each device in bytes, instead of measuring free memory."""
    kv_cache_memory_limit: Annotated[int | None, FieldRule(derived=True)] = None
    """Upper bound in bytes of a measured KV cache, None for none. On a CPU without a flag that sizes the
    cache it is 4 GiB, or QUIRE_CPU_KVCACHE_SPACE in GiB. The cache is the smaller of this and
    gpu_memory_utilization of the memory that is free after the model is loaded."""
    num_gpu_blocks_override: Annotated[int | None, FieldRule(at_least=2)] = None
    """Exact number of KV cache blocks, instead of measuring free memory; for tests of preemption."""
    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prefixes between requests, and SSM states after them. Default: on, unless
    all layers have SSM states instead of KV blocks."""
    mamba_cache_mode: Literal["none", "all", "align"] = "none"
    """Positions whose SSM states are kept for prefix caching. `align` (also `none`): the end of a prompt, the
    end of a prefix that earlier prompts share, and by prefix_cache_retention_interval; `all`: every
    mamba_block_size tokens."""
    mamba_block_size: Annotated[int | None, FieldRule(at_least=1)] = None
    """Prefix caching keeps SSM states after multiples of this number of tokens, a multiple of block_size.
    Default: 64, or 512 with mamba_cache_mode `all`."""
    prefix_cache_retention_interval: Annotated[int | None, FieldRule(at_least=0)] = None
    """Tokens between two kept SSM states of a long prompt, a multiple of mamba_block_size; 0: none in
    between. Default: at a half, a quarter and so on of a prompt, from 1024 tokens up."""
    prefix_caching_hash_algo: Literal["sha256", "sha256_cbor"] = "sha256"
    """Hash of a block's content; `sha256_cbor` is read as sha256."""
    kv_offloading_size: Annotated[float | None, FieldRule(at_least=0, at_most=1 << 30)] = None
    """GiB of host memory, over all ranks, for blocks that are evicted from a GPU. 0: off. Default: a tenth of
    the free host memory, at most 16 GiB and at most the size of the KV cache for each GPU."""
    kv_offloading_backend: Literal["native"] = "native"
    """Implementation of KV cache offloading."""
    kv_offloading_dir: str | None = None
    """Directory for full blocks of the KV cache, which survive a restart. Only its user can read it."""
    kv_offloading_dir_size: Annotated[float, FieldRule(above=0, at_most=1 << 30)] = 16.0
    """Most GiB in kv_offloading_dir, over all ranks; the least recently used blocks are deleted."""
    kv_offloading_salted: bool = False
    """Write blocks of requests with a cache_salt to kv_offloading_dir, too."""
    kv_transfer_config: dict[str, Any] = field(default_factory=dict)
    """JSON of prefill and decode in different engines (docs/disaggregation.md): kv_connector
    (`NixlConnector`), kv_role (`kv_producer`, `kv_consumer` or `kv_both`), engine_id, kv_load_failure_policy,
    and kv_connector_extra_config with peers and load_timeout. `OffloadingConnector` sets kv_offloading_size
    and kv_offloading_dir. Default: none."""
    kv_cache_dtype: str
    """Type of keys and values in the cache. `fp8`, which is `fp8_e4m3`, and `fp8_e5m2` take half the memory;
    scales are the checkpoint's, or 1.0. `int8`, which is `int8_per_token_head`, has a scale for each token
    and head, and takes 3 % more than `fp8` with heads of 128. Default: `auto`, the model's dtype."""

    @property
    def has_tiers(self) -> bool:
        """Whether blocks are kept in host memory or on disk, or exchanged with other engines."""
        is_below = self.kv_offloading_size != 0 or self.kv_offloading_dir is not None
        return is_below or bool(self.kv_transfer_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerSection:
    """Limits of one step, and the order of requests."""

    max_num_batched_tokens: Annotated[int, FieldRule(at_least=1, human=True)]
    """Most tokens of one step. Default: by device memory, larger for offline use than for serving."""
    max_num_scheduled_tokens: Annotated[int, FieldRule(at_least=1, human=True)]
    """Most tokens that the scheduler plans for one step. Default: max_num_batched_tokens."""
    max_num_seqs: Annotated[int, FieldRule(at_least=1)]
    """Most requests running at once. Default: by device memory."""
    long_prefill_token_threshold: Annotated[int, FieldRule(at_least=0)] = 0
    """Most prompt tokens of one request in a step; 0: no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission: by arrival, or by priority (lower first) and then arrival."""
    share_by_key: bool = False
    """Divide the tokens of the engine between API keys by their weights; scheduling_policy applies within a
    key. On by default if --api-key is a file."""
    enable_chunked_prefill: bool = True
    """Spread a long prompt over several steps, together with running requests."""
    scheduler_reserve_full_isl: bool = True
    """Admit a request only when the cache has room for its whole prompt."""
    watermark: Annotated[float, FieldRule(at_least=0, below=1)] = 0.0
    """Share of the KV cache blocks that must stay free when a request is admitted."""
    stream_interval: Annotated[int, FieldRule(at_least=1)] = 1
    """Tokens between two chunks of a streamed answer."""
    resume_requests: bool = True
    """Continue answers after their engine core has died, in another core or the restarted one: streams pause.
    Off: answers that have streamed something end with an error."""
    async_scheduling: bool
    """Plan the next step while the device runs this one. Default: on with CUDA. Off with pipeline stages,
    which run as many steps of different requests at once as there are stages."""
    slo_ttft_ms: Annotated[float | None, FieldRule(above=0)] = None
    """Target of the time to the first token, in milliseconds: of the waiting prompts, the one that must start
    first to meet its target is next. A key or a request may have its own target. Default: none."""
    slo_itl_ms: Annotated[float | None, FieldRule(above=0)] = None
    """Target of the time between two tokens of an answer, in milliseconds: prompts are cut so that running
    answers meet it. Default: none."""
    slo_max_wait: Annotated[float, FieldRule(at_least=0)] = 4.0
    """A request whose first token is expected later than this multiple of slo_ttft_ms is refused with 429; 0:
    no request is refused."""
    performance_mode: Literal["balanced", "interactivity", "throughput"] = "balanced"
    """`throughput` doubles the defaults of max_num_batched_tokens and max_num_seqs."""

    @property
    def has_targets(self) -> bool:
        """Whether there are latency targets."""
        return self.slo_ttft_ms is not None or self.slo_itl_ms is not None

    @property
    def max_chunk(self) -> int:
        """Return the most tokens that a step computes for one request."""
        bounds = (self.max_num_scheduled_tokens, self.long_prefill_token_threshold)
        return min(bound for bound in bounds if bound)

    @property
    def max_prompt_len(self) -> int | None:
        """Return the longest prompt that a step can hold; None with chunked prefill."""
        return None if self.enable_chunked_prefill else self.max_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSection:
    """Devices and processes that the model runs on."""

    device: Literal["auto", "cpu", "cuda"]
    """Kind of device. Default: CUDA if available."""
    tensor_parallel_size: Annotated[int, FieldRule(at_least=1, short="-tp")] = 1
    """Devices that share each layer."""
    pipeline_parallel_size: Annotated[int, FieldRule(at_least=1, short="-pp")] = 1
    """Groups of devices that hold consecutive layers."""
    data_parallel_size: Annotated[int, FieldRule(at_least=1, short="-dp")] = 1
    """Copies of the engine behind one address."""
    data_parallel_size_local: Annotated[int | None, FieldRule(at_least=0, short="-dpl")] = None
    """Copies that run on this machine. Default: all, or one with data_parallel_rank."""
    data_parallel_start_rank: Annotated[int, FieldRule(at_least=0, short="-dpr")] = 0
    """Rank of the first copy on this machine."""
    data_parallel_rank: Annotated[int | None, FieldRule(at_least=0, short="-dpn")] = None
    """Rank of the only copy of this server, if an external load balancer spreads requests over the
    servers."""
    data_parallel_address: Annotated[str, FieldRule(short="-dpa")] = "127.0.0.1"
    """Address of the machine with the API processes that all copies connect to."""
    data_parallel_rpc_port: Annotated[int, FieldRule(at_least=1, at_most=65535, short="-dpp")] = 29550
    """Port on data_parallel_address where copies on other machines register."""
    data_parallel_backend: Annotated[Literal["mp", "ray"], FieldRule(short="-dpb")] = "mp"
    """How the copies of the engine are started; only processes of the operating system (`mp`) are
    supported."""
    data_parallel_hybrid_lb: Annotated[bool, FieldRule(short="-dph")] = False
    """Every machine has API processes, which use only the copies on that machine."""
    data_parallel_external_lb: Annotated[bool, FieldRule(short="-dpe")] = False
    """Every copy has its own API processes."""
    data_parallel_routing: Literal["affinity", "load", "round_robin"] = "affinity"
    """The copy that a request goes to: the copy with its prefix in the cache unless that is busier than the
    others (`affinity`), the least busy copy, or each copy in turn."""
    distributed_executor_backend: Literal["uni", "mp", "ray", "external_launcher"] = "uni"
    """How workers are started: in the engine's process (uni), one process each (mp), or by ray. Default: uni
    for one worker, mp for more."""
    pp_layer_partition: str = ""
    """Number of layers of each pipeline stage, as `8,8,6`. Default: VLLM_PP_LAYER_PARTITION, or even;
    remaining layers go to stages before the last."""
    enable_expert_parallel: Annotated[bool, FieldRule(short="-ep")] = False
    """Each device has some of the experts of a layer, instead of a part of each expert."""
    all2all_backend: str = "allgather_reducescatter"
    """How tokens reach experts on other devices: `allgather_reducescatter` sends every token to all devices,
    `all2all` only to the devices of its experts."""
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    """Experts of a device: consecutive experts, or every n-th expert."""
    enable_eplb: bool = False
    """Move experts between devices as their load changes."""
    eplb_config: dict[str, Any] = field(default_factory=dict)
    """JSON of EPLB settings: window_size, step_interval, num_redundant_experts."""
    nnodes: Annotated[int, FieldRule(at_least=1, short="-n")] = 1
    """Number of machines that the workers of an engine run on."""
    node_rank: Annotated[int, FieldRule(at_least=0, short="-r")] = 0
    """Rank of this machine among the nnodes machines."""
    master_addr: str = "127.0.0.1"
    """Address of the first machine."""
    master_port: Annotated[int, FieldRule(at_least=0, at_most=65535)] = 29501
    """Port on the first machine where the workers connect."""
    device_ids: tuple[str, ...] = ()
    """GPUs to use, in this order, as in CUDA_VISIBLE_DEVICES."""
    disable_custom_all_reduce: bool = False
    """Use only NCCL for all-reduce between GPUs."""
    distributed_timeout_seconds: Annotated[int, FieldRule(at_least=1)] = 600
    """Seconds that workers wait for each other before they fail."""
    cpu_threads: Annotated[int, FieldRule(at_least=1)]
    """Compute threads on a CPU. Default: one for each core that this process may use, shared by the ranks on
    this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSection:
    """Attention backend."""

    attention_backend: str = "AUTO"
    """TRITON_ATTN, FLASH_ATTN, FLASHINFER, TORCH_SDPA or CPU_ATTN; AUTO takes the first that is supported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoRASection:
    """LoRA adapters that requests may name."""

    enable_lora: bool = False
    """Enable LoRA adapters in requests."""
    max_loras: Annotated[int, FieldRule(at_least=1)] = 1
    """Most adapters in one step: as many are held on the device, regardless of their rank."""
    max_lora_rank: Annotated[int, FieldRule(at_least=1)] = 16
    """Largest rank of an adapter: 1, 8, 16, 32, 64, 128, 256, 320 or 512. Memory for this rank is reserved
    per adapter."""
    max_cpu_loras: Annotated[int, FieldRule(at_least=1)]
    """Adapters that are kept in host memory after loading. Default: max_loras, which is also the minimum."""
    lora_dtype: Literal["auto", "float16", "bfloat16", "float32"] = "auto"
    """Type of the adapters' weights; `auto` is the model's."""
    fully_sharded_loras: bool = False
    """Shard both LoRA matrices among the tensor-parallel devices; otherwise one of them is replicated. Takes
    less memory, and one more exchange per layer."""
    lora_target_modules: tuple[str, ...] = ()
    """Names of the layers that adapters may change, as `q_proj`. Default: all that are supported."""
    lora_whole_modules: tuple[str, ...] = ()
    """Modules that adapters may replace as a whole (modules_to_save): `embed_tokens`, `lm_head`. Each slot
    reserves as much memory as the model's module takes. Default: neither."""
    lora_extra_vocab_size: Annotated[int, FieldRule(at_least=0)] = 256
    """Most tokens that an adapter may add, or train individually; 0: none. Each of max_loras slots reserves
    as many rows of the embedding and of the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalSection:
    """Images, videos and audio in prompts."""

    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    """JSON of the most items of each modality in a prompt, such as {"image": 16, "video": 1}; also an object
    with `count` and the largest expected size. Default: 999 of each. With 0 for all of a model's modalities
    its encoder is not loaded."""
    language_model_only: bool = False
    """Set the limit of every modality to 0."""
    enable_mm_embeds: bool = False
    """Let requests send embeddings instead of images, videos and audio."""
    media_io_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON of how media are read, by modality, such as {"video": {"num_frames": 40}}."""
    mm_processor_kwargs: dict[str, Any] = field(default_factory=dict)
    """JSON of arguments of the model's processor, such as {"max_pixels": 1003520}."""
    mm_processor_cache_gb: Annotated[float, FieldRule(at_least=0)] = 4.0
    """GiB of processed items that are cached for later requests; 0: none."""
    mm_processor_cache_type: Literal["lru", "shm"] = "lru"
    """Location of the cache of processed items: in processes, or in `shm`, memory that all workers of an
    engine share; `shm` needs one API process for the engine."""
    mm_shm_cache_max_object_size_mb: Annotated[int, FieldRule(at_least=1)] = 128
    """Largest item that is cached with `shm`, in MiB."""
    mm_hasher_algorithm: Literal["blake3", "sha256", "sha512"] = "blake3"
    """Hash that identifies items; `blake3` if it is installed, else sha256."""
    mm_encoder_tp_mode: Literal["weights", "data"] = "weights"
    """How devices share the work of a vision or audio encoder: each has a part of its weights, or some of the
    items."""
    cudagraph_mm_encoder: bool = False
    """On a GPU, capture small encoder batches with recurring shapes as CUDA graphs."""
    interleave_mm_strings: bool = False
    """For templates that support only text: items keep their places among the texts of a message."""
    skip_mm_profiling: bool = False
    """Do not measure at start how much memory the largest items take; the user must leave enough memory for
    them."""
    disable_chunked_mm_input: bool = False
    """Never divide the tokens of an item between steps."""
    allowed_local_media_path: str = ""
    """Directory from which requests may read media by `file:` urls. Default: none."""
    allowed_media_domains: tuple[str, ...] = ()
    """Hosts from which media may be fetched. Default: any public host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilitySection:
    """Logs, traces, profiles and KV events of the engine."""

    disable_log_stats: bool
    """Do not log periodic statistics. Default: off for a server, on for offline use."""
    otlp_traces_endpoint: str = ""
    """Endpoint for the spans of requests: `http://host:4318/v1/traces`, or by gRPC `http://host:4317`. Needs
    the extra `otel`. Default: no spans."""
    profiler_config: dict[str, Any] = field(default_factory=dict)
    """JSON of what /start_profile records: profiler (`torch`), torch_profiler_dir, and other torch_profiler
    settings."""
    kv_events_config: dict[str, Any] = field(default_factory=dict)
    """JSON of the events of the prefix cache (docs/kv_events.md): enable_kv_cache_events, publisher (`zmq` or
    `null`), endpoint (`tcp://*:5557`; data-parallel ranks add theirs to the port), replay_endpoint,
    buffer_steps, hwm, max_queue_size, topic, and encoding (`map` or `array`). Default: no events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSection:
    """Settings of speculative decoding as given by the user; `SpecFacts` is the resolved form."""

    speculative_config: Annotated[dict[str, Any], FieldRule(short="-sc")] = field(default_factory=dict)
    """JSON of speculative decoding (docs/speculation.md has all keys): method (`ngram`, `suffix`,
    `draft_model`, `eagle`, `eagle3`, `mtp`), model, num_speculative_tokens, prompt_lookup_min,
    prompt_lookup_max. Default: no speculation."""
    spec_method: str | None = None
    """`method` of speculative_config."""
    spec_model: str | None = None
    """`model` of speculative_config: the draft model."""
    spec_tokens: Annotated[int | None, FieldRule(at_least=1)] = None
    """`num_speculative_tokens` of speculative_config: the most draft tokens of a request in a step."""


SECTIONS: dict[str, type] = {
    "model": ModelSection,
    "load": LoadSection,
    "cache": CacheSection,
    "scheduler": SchedulerSection,
    "parallel": ParallelSection,
    "attention": AttentionSection,
    "lora": LoRASection,
    "multimodal": MultimodalSection,
    "observability": ObservabilitySection,
    "speculation": SpeculationSection,
    "extensions": ExtensionSection,
}


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a section, in the form that validation and command-line flags use."""

    name: str
    section: str
    kind: type
    """bool, int, float, str, dict, or tuple (of str)."""
    choices: tuple[str, ...]
    optional: bool
    """Whether None is accepted; it means the default."""
    default: Any
    """The field's default; None if `resolve()` fills it in."""
    rule: FieldRule


def _option(section: str, name: str, annotation: Any, default: Any) -> Option:
    rule, choices, optional = FieldRule(), (), default is None
    if get_origin(annotation) is Annotated:
        annotation, rule = get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        choices, annotation = get_args(annotation), str
    kind = get_origin(annotation) or annotation
    return Option(name, section, kind, choices, optional, default, rule)


@functools.cache
def options() -> dict[str, Option]:
    """Return every engine field that a user may set, by name."""
    return options_of(SECTIONS)


def options_of(sections: Mapping[str, type]) -> dict[str, Option]:
    """Return every field of these sections that a user may set, by name."""
    known = {}
    for section, cls in sections.items():
        for item in fields(cls):
            default = None if item.default is MISSING else item.default
            if item.default_factory is not MISSING:
                default = item.default_factory()
            option = _option(section, item.name, item.type, default)
            if not option.rule.derived:
                known[item.name] = option
    return known
