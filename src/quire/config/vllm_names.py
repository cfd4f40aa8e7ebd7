"""Names of vLLM's arguments that Quire maps to its own names or ignores."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.config.kv_transfer import transfer_of
from quire.config.sections import options
from quire.config.unsupported import UNSUPPORTED
from quire.logs import get_logger, warn_once

logger = get_logger(__name__)

# Arguments of vLLM without effect in Quire: accepted, with one warning. First switches, then values.
IGNORED_SWITCHES = frozenset(
    """
    aggregate-engine-logging allow-deprecated-quantization calculate-kv-scales cudagraph-metrics
    dcp-q-replicate disable-async-output-proc disable-cascade-attn
    disable-frontend-multiprocessing disable-hybrid-kv-cache-manager
    disable-log-requests disable-nccl-for-dp-synchronization enable-bf16x3-router-gemm
    enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter enable-fault-tolerance
    enable-flashinfer-autotune enable-layerwise-nvtx-tracing enable-log-requests
    enable-logging-iteration-details enable-mamba-cache-stochastic-rounding enable-mfu-metrics
    enable-mixed-moe-lora-format enable-moe-shared-loras enable-reasoning
    enable-tower-connector-lora enable-trace-replay fail-on-environ-validation
    kv-cache-metrics kv-sharing-fast-prefill
    mm-device-do-normalize mm-encoder-only multi-step-stream-outputs numa-bind ray-workers-use-nsight
    specialize-active-lora use-fp64-gumbel use-replayssm use-v2-block-manager
    """.replace("-", "_").split()
)
IGNORED_VALUES = frozenset(
    """
    additional-config code-revision
    collect-detailed-traces cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-params
    cuda-graph-sizes cudagraph-capture-sizes dbo-decode-token-threshold dbo-prefill-token-threshold
    dcp-comm-backend
    dcp-kv-cache-interleave-size default-mm-loras diffusion-config
    ec-manager-config fault-tolerance-config gdn-prefill-backend
    guided-decoding-backend ignore-patterns ir-op-priority jit-monitor-mode jit-monitor-verbose
    kda-prefill-backend kernel-config kv-cache-metrics-sample linear-backend mamba-backend
    mamba-cache-dtype mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm
    max-cudagraph-capture-size max-long-partial-prefills
    max-num-partial-prefills max-parallel-loading-workers
    mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
    mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path
    mm-ipc-gpu-memory-gb mm-processor-device
    mm-tensor-ipc model-loader-extra-config
    moe-backend num-lookahead-slots num-scheduler-steps numa-bind-cpus numa-bind-nodes offload-backend
    offload-num-in-group offload-params offload-prefetch-step
    per-request-spec-decode-metrics preemption-mode prefill-schedule-interval
    prefix-match-unit pt-load-map-location
    renderer-num-workers replayssm-buffer-len safetensors-load-strategy
    safetensors-prefetch-block-size safetensors-prefetch-num-threads show-hidden-metrics-for-version
    shutdown-timeout ubatch-size video-pruning-method
    video-pruning-rate
    """.replace("-", "_").split()
)

LISTS = frozenset(
    """
    cuda-graph-sizes cudagraph-capture-sizes ignore-patterns kv-cache-dtype-skip-layers
    numa-bind-cpus numa-bind-nodes
    """.replace("-", "_").split()
)
"""Arguments of vLLM that Quire refuses or ignores, and that take several values."""

SHORT = {
    "attention_config": "-ac",
    "compilation_config": "-cc",
    "data_parallel_multi_port_external_lb": "-dpm",
    "decode_context_parallel_size": "-dcp",
    "diffusion_config": "-dc",
    "optimization_level": "-O",
    "prefill_context_parallel_size": "-pcp",
}
"""Short flags of arguments that are only accepted for compatibility."""


def _from_compilation_config(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    mode = value.get("cudagraph_mode")
    mapped = {"enforce_eager": True} if isinstance(mode, str) and mode.upper() == "NONE" else {}
    return mapped | {name: value[name] for name in ("cudagraph_mm_encoder",) if name in value}


def _from_attention_config(value: Any) -> dict[str, Any]:
    backend = value.get("backend") if isinstance(value, dict) else None
    return {"attention_backend": backend} if backend else {}


_TASKS: dict[Any, dict[str, Any]] = {
    **dict.fromkeys(("auto", "generate"), {}),
    **dict.fromkeys(("embed", "embedding"), {"runner": "pooling", "convert": "embed"}),
    **dict.fromkeys(("classify", "score"), {"runner": "pooling", "convert": "classify"}),
    "encode": {"runner": "pooling"},
}
MAPPED: dict[str, Callable[[Any], dict[str, Any]]] = {
    "attention_config": _from_attention_config,
    "compilation_config": _from_compilation_config,
    "max_seq_len_to_capture": lambda value: {"max_cudagraph_capture_size": value},
    "num_speculative_tokens": lambda value: {"speculative_config": {"num_speculative_tokens": value}},
    "optimization_level": lambda value: {"enforce_eager": True} if value == 0 else {},
    "rope_scaling": lambda value: {"hf_overrides": {"rope_scaling": value}},
    "rope_theta": lambda value: {"hf_overrides": {"rope_theta": value}},
    "speculative_model": lambda value: {"speculative_config": {"model": value}},
    "swap_space": lambda value: {"kv_offloading_size": value},
    "task": lambda value: _TASKS.get(value, {"runner": value}),
}
"""Arguments of vLLM by name, with the function that maps their value to Quire's arguments. The function
returns an empty dict if the value has no effect."""


REREAD: dict[str, Callable[[Any], dict[str, Any]]] = {"kv_transfer_config": transfer_of}
"""Arguments that Quire has, too, but with some values that are mapped to other arguments."""


def other_names() -> frozenset[str]:
    """Return the accepted argument names that no section of the configuration has."""
    unbuilt = UNSUPPORTED["engine argument"].keys() - options().keys()
    return IGNORED_SWITCHES | IGNORED_VALUES | unbuilt | MAPPED.keys()


def translate(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments with those of MAPPED and REREAD replaced by Quire's. Arguments that the user sets
    under Quire's names take precedence."""
    mappings = MAPPED | REREAD
    values = {name: value for name, value in args.items() if name not in mappings}
    sizes = (values.get(f"{name}_parallel_size") for name in ("tensor", "pipeline"))
    if values.get("distributed_executor_backend") == "external_launcher" and {*sizes} <= {None, 1}:
        values["distributed_executor_backend"] = "uni"  # a trainer with one process runs the engine in it
    for name, value in args.items():
        if name not in mappings or value is None:
            continue
        mapped = mappings[name](value)
        for target, part in mapped.items():
            if isinstance(part, dict):
                values[target] = {**part, **(values.get(target) or {})}
            elif values.get(target) is None:
                values[target] = part
        if name in mapped:
            continue
        settings = ", ".join(f"{target}={part!r}" for target, part in mapped.items())
        warn_once(
            logger,
            f"{name}={value!r} is read as {settings}"
            if settings
            else f"{name}={value!r} has no effect in Quire",
        )
    return values
