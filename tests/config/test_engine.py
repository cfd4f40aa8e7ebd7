"""Tests of resolve(): names, types, ranges, and defaults that depend on the machine."""

import dataclasses
import json
import logging
import re
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.checkpoint.facts import ArchFacts, LayerFacts, RopeFacts
from quire.checkpoint.layout import CacheSpec
from quire.checkpoint.model import Checkpoint
from quire.checkpoint.quant.facts import QuantFacts
from quire.config.args import check_args
from quire.config.attention_backends import check_backend
from quire.config.engine import EngineConfig, resolve
from quire.config.engine_args import EngineArgs
from quire.config.env import Env
from quire.config.generation import default_sampling
from quire.config.load import load_section
from quire.config.machine import GIB, Machine
from quire.config.parallel import stage_layers
from quire.config.sections import SECTIONS, options
from quire.config.unsupported import UNSUPPORTED
from quire.config.vllm_names import IGNORED_SWITCHES, IGNORED_VALUES, LISTS, MAPPED, SHORT, other_names
from quire.errors import ConfigError
from quire.logs import warn_once

FACTS = ArchFacts("LlamaForCausalLM", 320, 64, 128, 4, 2, 16, 1e-5, (LayerFacts(RopeFacts()),) * 2)
ENV = Env(cache_root=Path("/nowhere"))


VLLM_FLAGS = re.findall(
    r"\S+",
    """
    additional-config aggregate-engine-logging all2all-backend allow-deprecated-quantization
    allowed-local-media-path allowed-media-domains async-scheduling attention-backend attention-config
    block-size code-revision collect-detailed-traces compilation-config config-format convert
    cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-gb cpu-offload-params
    cudagraph-capture-sizes cudagraph-metrics data-parallel-address data-parallel-backend
    data-parallel-external-lb data-parallel-hybrid-lb data-parallel-multi-port-external-lb
    data-parallel-rank data-parallel-rpc-port data-parallel-size data-parallel-size-local
    data-parallel-start-rank dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
    dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size default-mm-loras device-ids
    diffusion-config disable-cascade-attn disable-chunked-mm-input disable-custom-all-reduce
    disable-hybrid-kv-cache-manager disable-log-stats disable-nccl-for-dp-synchronization
    disable-sliding-window distributed-executor-backend distributed-timeout-seconds download-dir dtype
    ec-manager-config ec-transfer-config enable-bf16x3-router-gemm enable-chunked-prefill
    enable-cumem-allocator enable-dbo enable-elastic-ep enable-ep-weight-filter enable-eplb
    enable-expert-parallel enable-fault-tolerance enable-flashinfer-autotune enable-layerwise-nvtx-tracing
    enable-log-requests enable-logging-iteration-details enable-lora
    enable-mamba-cache-stochastic-rounding enable-mfu-metrics enable-mixed-moe-lora-format
    enable-mm-embeds enable-moe-shared-loras enable-prefix-caching enable-prompt-embeds
    enable-return-routed-experts enable-sleep-mode enable-tower-connector-lora enable-trace-replay
    enforce-eager eplb-config expert-placement-strategy fail-on-environ-validation fault-tolerance-config
    fully-sharded-loras gdn-prefill-backend generation-config gpu-memory-utilization hf-config-path
    hf-overrides hf-token ignore-patterns interleave-mm-strings io-processor-plugin ir-op-priority
    jit-monitor-mode jit-monitor-verbose kda-prefill-backend kernel-config kv-cache-dtype
    kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample
    kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill kv-transfer-config
    language-model-only limit-mm-per-prompt linear-backend load-format logits-processors logprobs-mode
    long-prefill-token-threshold lora-dtype lora-target-modules mamba-backend mamba-block-size
    mamba-cache-dtype mamba-cache-mode mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm
    master-addr master-port max-cpu-loras max-cudagraph-capture-size max-logprobs max-lora-rank max-loras
    max-model-len max-num-batched-tokens max-num-scheduled-tokens max-num-seqs
    max-parallel-loading-workers media-io-kwargs mm-device-do-normalize mm-encoder-attn-backend
    mm-encoder-attn-dtype mm-encoder-fp8-scale-path mm-encoder-fp8-scale-save-margin
    mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode mm-hasher-algorithm
    mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type mm-processor-device
    mm-processor-kwargs mm-shm-cache-max-object-size-mb mm-tensor-ipc model model-class-overrides
    model-impl model-loader-extra-config moe-backend nnodes node-rank num-gpu-blocks-override numa-bind
    numa-bind-cpus numa-bind-nodes offload-backend offload-group-size offload-num-in-group offload-params
    offload-prefetch-step optimization-level otlp-traces-endpoint override-generation-config
    per-request-spec-decode-metrics performance-mode pipeline-parallel-size pooler-config
    prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval
    prefix-caching-hash-algo prefix-match-unit profiler-config pt-load-map-location quantization
    quantization-config ray-workers-use-nsight reasoning-config reasoning-parser reasoning-parser-plugin
    renderer-num-workers replayssm-buffer-len return-sampling-mask revision runner
    safetensors-load-strategy safetensors-prefetch-block-size safetensors-prefetch-num-threads
    scheduler-cls scheduler-reserve-full-isl scheduling-policy seed served-model-name
    show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling skip-tokenizer-init spec-method
    spec-model spec-tokens specialize-active-lora speculative-config stream-interval
    structured-outputs-config tensor-parallel-size tokenizer tokenizer-mode tokenizer-revision
    trust-remote-code ubatch-size use-fp64-gumbel use-replayssm use-tqdm-on-load video-pruning-method
    video-pruning-rate watermark weight-transfer-config worker-cls worker-extension-cls
    """,
)


def checkpoint(dtype: str = "bfloat16", max_len: int = 8192, **more: Any) -> Checkpoint:
    settings: dict[str, Any] = {"format": "hf", "bos_id": 1, "eos_ids": (2,), **more}
    return Checkpoint(path=Path("/m"), facts=FACTS, dtype=dtype, derived_max_len=max_len, **settings)


def cuda(gib: float = 80, name: str = "NVIDIA H100", capability: tuple[int, int] = (9, 0)) -> Machine:
    total = int(gib * GIB)
    return Machine("cuda", name, 1, total, total, 8, capability, bf16=capability >= (8, 0), fp16=True)


def cpu(**more: Any) -> Machine:
    return Machine("cpu", "a CPU", 1, 16 * GIB, 12 * GIB, 4, **more)


def make(arguments: dict[str, Any] | None = None, **more: Any) -> EngineConfig:
    settings: dict[str, Any] = {"checkpoint": checkpoint(), "machine": cpu(), "env": ENV, **more}
    return resolve(arguments or {}, **settings)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Any:
    """Yield the messages of Quire's loggers, which do not propagate."""
    warn_once.cache_clear()
    logger = logging.getLogger("quire")
    logger.addHandler(caplog.handler)
    yield lambda: [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    logger.removeHandler(caplog.handler)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"gpu_memory_utilization": 0}, ["gpu_memory_utilization=0.0", "above 0", "at most 1"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization=1.5", "at most 1"]),
        ({"gpu_memory_utilization": float("nan")}, ["nan", "above 0"]),
        ({"gpu_memory_utilization": "half"}, ["'half'", "a number"]),
        ({"pipeline_parallel_size": 3}, ["pipeline_parallel_size=3", "2 layers", "at most 2"]),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "1,1,1"}, ["3 parts", "is 2"]),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "2,1"}, ["'2,1'", "3 layers", "has 2"]),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "2,0"}, ["'2,0'", "each part needs one"]),
        ({"pipeline_parallel_size": 2, "pp_layer_partition": "1;1"}, ["'1;1'", "'8,8,6'"]),
        ({"pipeline_parallel_size": 2, "runner": "pooling"}, ["pipeline_parallel_size=2", "pooling"]),
        ({"pipeline_parallel_size": 2, "load_format": "sharded_state"}, ["sharded_state"]),
        ({"block_size": 24}, ["block_size=24", "power of two"]),
        ({"block_size": 512}, ["block_size=512", "at most 256"]),
        ({"block_size": True}, ["block_size=True", "an integer"]),
        ({"block_size": 16.5}, ["block_size=16.5", "an integer"]),
        ({"tensor_parallel_size": 3}, ["tensor_parallel_size=3", "4 attention heads", "use 1, 2 or 4"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0", "at least 1"]),
        ({"max_num_batched_tokens": -5}, ["max_num_batched_tokens=-5", "at least 1"]),
        ({"watermark": 1.0}, ["watermark=1.0", "below 1"]),
        ({"stream_interval": 0}, ["stream_interval=0", "at least 1"]),
        ({"max_logprobs": -2}, ["max_logprobs=-2", "at least -1"]),
        ({"max_model_len": 0}, ["max_model_len=0", "at least 1"]),
        ({"max_model_len": "long"}, ["'long'", "an integer or `auto`"]),
        ({"max_model_len": 9000}, ["max_model_len=9000", "8192", "QUIRE_ALLOW_LONG_MAX_MODEL_LEN=1"]),
        ({"enforce_eager": 1}, ["enforce_eager=1", "true or false"]),
        ({"dtype": "fp8"}, ["dtype='fp8'", "known:", "bfloat16"]),
        ({"scheduling_policy": "sjf"}, ["'sjf'", "fcfs, priority"]),
        ({"tokenizer_mode": "mistral"}, ["'mistral'", "auto, hf, slow"]),
        ({"prefix_caching_hash_algo": "xxhash"}, ["'xxhash'", "sha256"]),
        ({"hf_overrides": "x"}, ["hf_overrides='x'", "a JSON object"]),
        ({"served_model_name": [1]}, ["served_model_name=[1]", "list of names"]),
        ({"long_prefill_token_threshold": 9000}, ["(9000)", "(8192)"]),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65}, ["(64)", "max_num_seqs (65)"]),
        ({"max_num_batched_tokens": 64, "max_num_scheduled_tokens": 65}, ["(65)", "(64)"]),
        ({"max_num_batched_tokens": 64, "enable_chunked_prefill": False}, ["(64)", "max_model_len (8192)"]),
        (
            {"max_num_scheduled_tokens": 64, "enable_chunked_prefill": False},
            ["max_num_scheduled_tokens (64)", "max_model_len (8192)", "enable_chunked_prefill"],
        ),
        (
            {"long_prefill_token_threshold": 64, "enable_chunked_prefill": False},
            ["long_prefill_token_threshold (64)", "max_model_len (8192)", "enable_chunked_prefill"],
        ),
        ({"device": "cuda"}, ["device='cuda'", "cpu"]),
        ({"max_model_length": 5}, ["'max_model_length'", "did you mean 'max_model_len'?"]),
        ({"zzzz": 5}, ["unknown engine argument 'zzzz'", "--help=all"]),
        ({"api_server_count": 4}, ["not an engine argument", "`quire serve --api-server-count`"]),
        ({"lora_modules": ("a=b",)}, ["not an engine argument", "`quire serve --lora-modules`"]),
    ],
)
def test_invalid_value_is_reported_with_value_and_limit(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        make(settings)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel_backend": "ray"},
        {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 2},
        {"speculative_config": {"method": "medusa"}},
        {"offload_group_size": 4},
        {"worker_cls": "a.B"},
    ],
)
def test_unsupported_arguments_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not supported yet"):
        make(settings)


def test_external_launcher_of_one_worker_is_this_process() -> None:
    settings = {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": 1}
    assert make(settings).parallel.distributed_executor_backend == "uni"


def test_offloading_is_for_gpus(warnings: Any) -> None:
    assert make({"cpu_offload_gb": 2.5}, machine=cuda()).load.cpu_offload_gb == 2.5 and warnings() == []
    assert make({"cpu_offload_gb": 4}).load.cpu_offload_gb == 0
    assert warnings() == ["cpu_offload_gb=4 has no effect on a CPU: all weights are in host memory"]
    with pytest.raises(ConfigError, match="cpu_offload_gb"):
        make({"cpu_offload_gb": -1}, machine=cuda())


@pytest.mark.parametrize(
    ("facts", "kind"),
    [
        (replace(FACTS, borrowed=object()), "a model that runs through transformers"),
        (replace(FACTS, encoder=object()), "an encoder model"),
        (replace(FACTS, media=types.SimpleNamespace(num_cross_states=3)), "a model with cross-attention"),
    ],
)
def test_models_that_cannot_be_offloaded_are_named(facts: Any, kind: str) -> None:
    parallel = make().parallel
    with pytest.raises(ConfigError, match=f"cpu_offload_gb=4 is not supported with {kind}: leave it out"):
        load_section({"cpu_offload_gb": 4}, facts, parallel, cuda())
    with pytest.raises(ConfigError, match="with enable_eplb"):
        load_section({"cpu_offload_gb": 4}, FACTS, replace(parallel, enable_eplb=True), cuda())


def test_speculation_is_resolved() -> None:
    fields = {"spec_method": "ngram", "spec_tokens": 4}
    result = make(fields).speculation
    assert make().speculation is None and result is not None and result.num_speculative_tokens == 4
    with pytest.raises(ConfigError, match="pooling model"):
        make({**fields, "runner": "pooling"})


def test_lora_defaults_and_limits() -> None:
    lora = make({"enable_lora": True, "max_loras": 4, "max_lora_rank": 64}).lora
    assert (lora.enable_lora, lora.max_cpu_loras, lora.lora_dtype) == (True, 4, "auto")
    assert make({}).lora.max_cpu_loras == 1
    with pytest.raises(ConfigError, match="max_cpu_loras .2. must be at least max_loras .4."):
        make({"enable_lora": True, "max_loras": 4, "max_cpu_loras": 2})
    with pytest.raises(ConfigError, match="lora_whole_modules has 'norm'; known: embed_tokens, lm_head"):
        make({"enable_lora": True, "lora_whole_modules": ["lm_head", "norm"]})
    with pytest.raises(ConfigError, match="max_lora_rank=12 is not supported; known: 1, 8, 16"):
        make({"max_lora_rank": 12})


@pytest.mark.parametrize(
    ("settings", "backend", "threads"),
    [
        ({}, "uni", 4),
        ({"distributed_executor_backend": "mp"}, "mp", 4),
        ({"tensor_parallel_size": 2}, "mp", 2),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}, "ray", 2),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "mp", 4),
        ({"tensor_parallel_size": 2, "cpu_threads": 3}, "mp", 3),
    ],
)
def test_ranks_are_processes_that_share_the_cores(
    settings: dict[str, Any], backend: str, threads: int
) -> None:
    parallel = make(settings).parallel
    assert (parallel.distributed_executor_backend, parallel.cpu_threads) == (backend, threads)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "uni"}, "use 'mp'"),
        (
            {"tensor_parallel_size": 2, "machine": cuda()},
            "need as many GPUs, and there are 1: .* ray, or --nnodes",
        ),
        ({"device_ids": ["1"]}, "names GPUs"),
    ],
)
def test_impossible_ranks_are_refused(settings: dict[str, Any], words: str) -> None:
    more = {"machine": settings.pop("machine")} if "machine" in settings else {}
    with pytest.raises(ConfigError, match=words):
        make(settings, **more)


def test_pooling_engine_disables_unsupported_features() -> None:
    for result in ({"runner": "pooling"}, {"task": "embed"}):
        config = make(result)
        assert config.pooling is not None and config.pooling.task == "embed"
        assert config.cache.enable_prefix_caching and not config.scheduler.async_scheduling
    config = make({"runner": "pooling", "pooler_config": {"pooling_type": "MEAN"}})
    assert config.scheduler.enable_chunked_prefill and not config.cache.enable_prefix_caching
    assert make({}).pooling is None


def test_fp8_kv_cache_names() -> None:
    kinds = {"fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
    for name, kind in kinds.items():
        assert make({"kv_cache_dtype": name}).cache.kv_cache_dtype == kind
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp9' is not supported on this cpu; known: auto"):
        make({"kv_cache_dtype": "fp9"})


def test_unsupported_features_at_their_defaults_are_accepted(warnings: Any) -> None:
    unbuilt = UNSUPPORTED["engine argument"].items()
    off = {name: values[0] if values else None for name, values in unbuilt}
    make(
        {**off, "tensor_parallel_size": 1, "quantization": None, "kv_cache_dtype": "auto", "task": "generate"}
    )
    make({"quantization": "gguf"}, checkpoint=checkpoint(format="gguf"))


def test_quantized_gguf_stays_quantized() -> None:
    packed = checkpoint(format="gguf")
    assert make({}, checkpoint=packed).model.quantization == "gguf"
    assert make({"quantization": "none"}, checkpoint=packed).model.quantization == "none"
    assert make({}, checkpoint=packed, machine=cuda(80, "A100", (8, 0))).model.quantization == "gguf"


def test_checkpoint_sets_the_kv_cache_dtype() -> None:
    narrow = checkpoint(quant=QuantFacts("compressed-tensors", (), "fp8_e4m3"))
    assert make({}, checkpoint=narrow).cache.kv_cache_dtype == "fp8_e4m3"
    assert make({"kv_cache_dtype": "fp8_e5m2"}, checkpoint=narrow).cache.kv_cache_dtype == "fp8_e5m2"
    wide = make().model.dtype
    assert make({"kv_cache_dtype": wide}, checkpoint=narrow).cache.kv_cache_dtype == wide


def test_none_means_not_given() -> None:
    assert make(dict.fromkeys(options())) == make({})


def test_ignored_names_warn_once_and_change_nothing(warnings: Any) -> None:
    fields: dict[str, Any] = {"ubatch_size": 4, "disable_log_requests": True}
    fields |= {"mm_encoder_attn_backend": "TORCH_SDPA", "disable_custom_all_reduce": False}
    assert make(fields) == make({})
    make(fields)
    assert sorted(warnings()) == [
        "disable_log_requests=True has no effect in Quire and is ignored",
        "mm_encoder_attn_backend='TORCH_SDPA' has no effect in Quire and is ignored",
        "ubatch_size=4 has no effect in Quire and is ignored",
    ]


def test_old_names_are_mapped_and_explicit_ones_win(warnings: Any) -> None:
    assert make({"optimization_level": 0}).model.enforce_eager
    assert not make({"optimization_level": 0, "enforce_eager": False}).model.enforce_eager
    assert make({"compilation_config": {"cudagraph_mode": "NONE"}}).model.enforce_eager
    assert not make({"compilation_config": 3, "optimization_level": 2}).model.enforce_eager
    assert make({"attention_config": {"backend": "cpu_attn"}}).attention.attention_backend == "CPU_ATTN"
    scaled = make({"rope_scaling": {"factor": 2}, "rope_theta": 5.0, "hf_overrides": {"rope_theta": 7.0}})
    assert scaled.model.hf_overrides == {"rope_scaling": {"factor": 2}, "rope_theta": 7.0}
    assert make({"max_seq_len_to_capture": 8192}) == make({})
    assert any("max_cudagraph_capture_size=8192 has no effect" in text for text in warnings())


def test_tables_of_foreign_names_do_not_overlap() -> None:
    """A name in two tables would be both ignored and refused, or shadow a real field."""
    tables = [
        set(IGNORED_SWITCHES),
        set(IGNORED_VALUES),
        set(UNSUPPORTED["engine argument"]) - set(options()),
        set(MAPPED),
        set(options()),
    ]
    assert sum(map(len, tables)) == len(set.union(*tables))
    assert other_names() >= LISTS and other_names() >= set(SHORT)


def test_every_vllm_flag_is_known() -> None:
    """A launch script with any real vLLM flag must not fail with an unknown name."""
    known = options().keys() | other_names()
    assert sorted(name for name in VLLM_FLAGS if name.replace("-", "_") not in known) == []


@pytest.mark.parametrize(
    ("requested", "stored", "machine", "expected"),
    [
        ("auto", "bfloat16", cuda(), "bfloat16"),
        ("auto", "float16", cuda(), "float16"),
        ("auto", "float32", cuda(), "bfloat16"),
        ("auto", "float32", cuda(16, "Tesla T4", (7, 5)), "float16"),
        ("auto", "bfloat16", cuda(16, "Tesla T4", (7, 5)), "float16"),
        ("float", "bfloat16", cuda(), "float32"),
        ("half", "bfloat16", cuda(), "float16"),
        ("auto", "bfloat16", cpu(), "float32"),
        ("auto", "float16", cpu(bf16=True), "float32"),
        ("auto", "bfloat16", cpu(bf16=True), "bfloat16"),
        ("auto", "float16", cpu(fp16=True), "float16"),
        ("auto", "float32", cpu(bf16=True, fp16=True), "float32"),
        ("half", "float32", cpu(), "float16"),
        ("bfloat16", "float32", cpu(), "bfloat16"),
    ],
)
def test_dtype(requested: str, stored: str, machine: Machine, expected: str) -> None:
    config = make({"dtype": requested}, checkpoint=checkpoint(stored), machine=machine)
    assert (config.model.dtype, config.cache.kv_cache_dtype) == (expected, expected)


def test_models_that_overflow_float16_do_not_use_it() -> None:
    wide = replace(checkpoint("float32"), facts=replace(FACTS, architecture="Gemma3ForCausalLM"))
    for runner in ("generate", "pooling"):
        assert make({"runner": runner}, checkpoint=wide, machine=cuda()).model.dtype == "bfloat16"
        old = cuda(16, "Tesla T4", (7, 5))
        assert make({"runner": runner}, checkpoint=wide, machine=old).model.dtype == "float32"
    plain = make({"runner": "pooling"}, checkpoint=checkpoint("float32"), machine=cuda())
    assert plain.model.dtype == "float16"


def test_bfloat16_on_an_old_gpu_names_the_alternative() -> None:
    with pytest.raises(ConfigError, match=r"7\.5: use dtype='float16'"):
        make({"dtype": "bfloat16"}, machine=cuda(16, "Tesla T4", (7, 5)))


@pytest.mark.parametrize(
    ("machine", "usage", "tokens", "seqs"),
    [
        (cuda(180, "NVIDIA B200"), "llm", 16384, 1024),
        (cuda(180, "NVIDIA B200"), "server", 16384, 1024),
        (cuda(79.6), "llm", 16384, 1024),
        (cuda(79.6), "server", 8192, 1024),
        (cuda(79.6, "NVIDIA A100-SXM4-80GB", (8, 0)), "llm", 8192, 256),
        (cuda(22, "NVIDIA L4", (8, 9)), "server", 2048, 256),
        (cpu(), "llm", 4096, 256),
        (cpu(), "server", 2048, 128),
        (cpu(), "other", 2048, 128),
    ],
)
def test_batch_defaults_by_machine_and_usage(machine: Machine, usage: str, tokens: int, seqs: int) -> None:
    scheduler = make(machine=machine, usage=usage).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)
    assert scheduler.max_num_scheduled_tokens == tokens
    assert scheduler.async_scheduling == (machine.device == "cuda")


@pytest.mark.parametrize(
    ("settings", "tokens", "seqs"),
    [
        ({"performance_mode": "throughput"}, 8192, 512),
        ({"enable_chunked_prefill": False}, 8192, 256),
        ({"max_num_seqs": 1, "max_model_len": 100}, 100, 1),
        ({"max_num_batched_tokens": 50}, 50, 50),
        ({"max_num_seqs": 5000}, 5000, 5000),
        ({"max_num_batched_tokens": 512, "max_num_seqs": 7}, 512, 7),
    ],
)
def test_batch_sizes_follow_the_arguments(settings: dict[str, Any], tokens: int, seqs: int) -> None:
    scheduler = make(settings).scheduler
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (tokens, seqs)


def test_batch_that_can_never_fill_is_warned_about(warnings: Any) -> None:
    make({"max_num_batched_tokens": 500, "max_num_seqs": 2, "max_model_len": 100})
    assert "above max_num_seqs * max_model_len (200)" in warnings()[0]


def test_async_scheduling_on_a_cpu_is_disabled_with_a_warning(warnings: Any) -> None:
    assert make({"async_scheduling": True}).scheduler.async_scheduling is False
    assert "async_scheduling" in warnings()[0]
    assert make({"async_scheduling": False}, machine=cuda()).scheduler.async_scheduling is False


@pytest.mark.parametrize(
    ("settings", "length", "auto_fit"),
    [({}, 8192, False), ({"max_model_len": 100}, 100, False), ({"max_model_len": -1}, 8192, True)]
    + [({"max_model_len": "auto"}, 8192, True)],
)
def test_max_model_len(settings: dict[str, Any], length: int, auto_fit: bool) -> None:
    model = make(settings).model
    assert (model.max_model_len, model.auto_fit) == (length, auto_fit)


def test_environment_allows_a_longer_max_model_len() -> None:
    env = Env.read({"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    assert make({"max_model_len": 9000}, env=env).model.max_model_len == 9000


@pytest.mark.parametrize(
    ("settings", "machine", "env", "limit"),
    [
        ({}, cpu(), {}, 4 * GIB),
        ({}, cpu(), {"VLLM_CPU_KVCACHE_SPACE": "2"}, 2 * GIB),
        ({"gpu_memory_utilization": 0.5}, cpu(), {"VLLM_CPU_KVCACHE_SPACE": "2"}, None),
        ({"kv_cache_memory_bytes": 1000}, cpu(), {}, None),
        ({"num_gpu_blocks_override": 10}, cpu(), {}, None),
        ({}, cuda(), {"VLLM_CPU_KVCACHE_SPACE": "2"}, None),
    ],
)
def test_cpu_kv_cache_is_bounded(
    settings: dict[str, Any], machine: Machine, env: dict[str, str], limit: int | None
) -> None:
    cache = make(settings, machine=machine, env=Env.read(env)).cache
    assert cache.kv_cache_memory_limit == limit
    assert cache.gpu_memory_utilization == settings.get("gpu_memory_utilization", 0.92)


def test_zero_cpu_cache_space_is_an_error() -> None:
    with pytest.raises(ConfigError, match="must be above 0"):
        make(env=Env.read({"QUIRE_CPU_KVCACHE_SPACE": "0"}))


@pytest.mark.parametrize(
    ("settings", "environ"),
    [
        ({"attention_backend": "xformers"}, {}),
        ({"attention_config": {"backend": "XFORMERS"}}, {}),
        ({}, {"VLLM_ATTENTION_BACKEND": "XFORMERS"}),
    ],
)
def test_retired_attention_backend_becomes_the_default(
    settings: dict[str, Any], environ: dict[str, str], warnings: Any
) -> None:
    assert make(settings, env=Env.read(environ)).attention.attention_backend == "AUTO"
    assert any("XFORMERS is retired" in text for text in warnings())


def test_sha256_cbor_is_sha256(warnings: Any) -> None:
    assert make({"prefix_caching_hash_algo": "sha256_cbor"}).cache.prefix_caching_hash_algo == "sha256"
    assert "sha256_cbor" in warnings()[0]


def test_model_names_and_logging_depend_on_usage() -> None:
    plain = make()
    assert plain.model.model == "SmolLM2-135M-Instruct" == plain.model.served_model_name[0]
    assert plain.model.tokenizer == "/m"
    assert plain.observability.disable_log_stats
    named = make({"model": Path("org/x"), "served_model_name": ["a", "b"]}, usage="server")
    assert (named.model.model, named.model.served_model_name) == ("org/x", ("a", "b"))
    assert not named.observability.disable_log_stats
    assert make({"max_logprobs": -1}).model.max_logprobs == FACTS.vocab


def test_cpu_threads_are_divided_among_engines() -> None:
    assert make().parallel.cpu_threads == cpu().num_cores
    assert make({"data_parallel_size": 3}).parallel.cpu_threads == max(cpu().num_cores // 3, 1)
    assert make({"data_parallel_size": 999}).parallel.cpu_threads == 1
    both = make({"data_parallel_size": 2, "gpu_memory_utilization": 0.8})
    assert both.cache.gpu_memory_utilization == 0.4, "the engines share one memory"
    assert make({"cpu_threads": 3}).parallel.cpu_threads == 3
    with pytest.raises(ConfigError, match="cpu_threads"):
        make({"cpu_threads": 0})


def test_resolved_values_are_not_none() -> None:
    """A None left where a default exists would fail in the worker."""
    config = make()
    may_be_none = {
        "revision",
        "tokenizer_revision",
        "quantization",
        "hf_token",
        "chat_template",
        "download_dir",
        "gguf_file",
        "hf_config_path",
    }
    may_be_none |= {"mamba_block_size", "prefix_cache_retention_interval"}
    may_be_none |= {
        "kv_offloading_dir",
        "kv_cache_memory_bytes",
        "num_gpu_blocks_override",
        "data_parallel_rank",
        "slo_ttft_ms",
        "slo_itl_ms",
    }
    results = {
        f.name
        for s in SECTIONS.keys() - {"speculation"}
        for f in dataclasses.fields(getattr(config, s))
        if getattr(getattr(config, s), f.name) is None
    }
    assert results == may_be_none
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.cache.block_size = 1  # type: ignore[misc]


def test_secrets_are_not_printed() -> None:
    assert "s3cret" not in repr(make({"hf_token": "s3cret"}))
    assert "s3cret" not in repr(Env.read({"QUIRE_API_KEY": "s3cret"}))


def test_generation_defaults(tmp_path: Path, warnings: Any) -> None:
    generation = {"temperature": 0.6, "top_k": 20, "max_new_tokens": 9, "min_p": None, "eos_token_id": 2}
    stored = checkpoint(generation=generation)
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_p": 0.5}))

    def defaults(**settings: Any) -> dict[str, Any]:
        return default_sampling(make(settings, checkpoint=stored))

    assert defaults() == {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert defaults(generation_config="vllm") == {} == defaults(generation_config="quire")
    assert defaults(generation_config=str(tmp_path)) == {"top_p": 0.5}
    assert defaults(override_generation_config={"top_k": 3, "foo": 1})["top_k"] == 3
    assert "foo" in warnings()[0]
    with pytest.raises(ConfigError, match="generation_config='/nowhere'"):
        defaults(generation_config="/nowhere")


def test_quire_variables_override_vllm_ones() -> None:
    both = {"QUIRE_PORT": "1", "VLLM_PORT": "2", "VLLM_HOST_IP": "h", "XDG_CACHE_HOME": "/c"}
    env = Env.read(both)
    assert (env.port, env.host_ip, env.cache_root) == (1, "h", Path("/c/quire"))
    assert Env.read({}).cache_root == Path.home() / ".cache/quire"
    assert Env.read({"QUIRE_CACHE_ROOT": "~/q"}).cache_root == Path.home() / "q"
    assert (
        make(env=Env.read({"VLLM_ATTENTION_BACKEND": "triton_attn"})).attention.attention_backend
        == "TRITON_ATTN"
    )
    assert len(dataclasses.fields(Env)) <= 23
    with pytest.raises(ConfigError, match="VLLM_PORT='tcp'"):
        Env.read({"VLLM_PORT": "tcp"})


def test_engine_args_return_only_changed_values() -> None:
    args = EngineArgs(model="m", seed=0, max_num_seqs=4, swap_space=4, hf_overrides={})
    assert args.given() == {"model": "m", "max_num_seqs": 4, "swap_space": 4}
    assert EngineArgs(gpu_memory_utilization=0.92).given() == {"gpu_memory_utilization": 0.92}
    assert EngineArgs(hf_overrides={"a": 1}).given() == {"hf_overrides": {"a": 1}}
    with pytest.raises(TypeError):
        EngineArgs(nonsense=1)


def test_checking_names_needs_no_model() -> None:
    checked = check_args({"max_num_seqs": 4, "swap_space": 0, "seed": None})
    assert checked == {"max_num_seqs": 4, "kv_offloading_size": 0.0}


def test_config_does_not_import_torch() -> None:
    heavy = {"torch", "transformers", "tokenizers"}
    code = f"import sys, quire.config.engine; assert not {heavy} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_state_models_limit_max_num_seqs_by_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the default batch size of a large device would not fit on it; an explicit value
    stays."""
    states = (CacheSpec("state", bytes_per_row=100 << 20),)
    monkeypatch.setattr("quire.config.engine.cache_specs", lambda facts: states)
    assert make({"kv_cache_memory_bytes": 4 << 30}).scheduler.max_num_seqs == 20
    assert make({"kv_cache_memory_bytes": 4 << 30, "max_num_seqs": 64}).scheduler.max_num_seqs == 64
    drafting = {"kv_cache_memory_bytes": 4 << 30, "spec_method": "ngram", "spec_tokens": 4}
    config = make(drafting)
    assert (config.states_per_row, config.scheduler.max_num_seqs) == (5, 4)
    total = config.machine.total_bytes
    wanted = total // (500 << 20) + 1
    words = (
        rf"{wanted} exceeds .* 100.0 MiB, 5 times .*=4. Lower .*most {wanted - 1}\) or num_speculative_tokens"
    )
    with pytest.raises(ConfigError, match=words):
        make(drafting | {"max_num_seqs": wanted})
    assert make(drafting | {"max_num_seqs": wanted - 1}).scheduler.max_num_seqs == wanted - 1


@pytest.mark.parametrize(
    ("layers", "stages", "partition", "counts"),
    [
        (6, 3, "", [2, 2, 2]),
        (7, 3, "", [2, 3, 2]),
        (8, 3, "", [3, 3, 2]),
        (22, 4, "", [5, 6, 6, 5]),
        (3, 2, "", [2, 1]),
        (22, 3, "8,8,6", [8, 8, 6]),
        (5, 1, "", [5]),
    ],
)
def test_layers_of_pipeline_stages(layers: int, stages: int, partition: str, counts: list[int]) -> None:
    """Check that the last stage, which has the LM head, gets none of the remaining layers, as in vLLM."""
    made = stage_layers(layers, stages, partition)
    assert [len(stage) for stage in made] == counts
    assert [layer for stage in made for layer in stage] == [*range(layers)]


def test_pipeline_partition_and_async_scheduling(warnings: Any) -> None:
    env = Env.read({"VLLM_PP_LAYER_PARTITION": "1,1"})
    two = make(
        {"pipeline_parallel_size": 2, "async_scheduling": True},
        machine=dataclasses.replace(cuda(), num_devices=2),
        env=env,
    )
    assert two.parallel.pp_layer_partition == "1,1" and not two.scheduler.async_scheduling
    assert [message for message in warnings() if "async_scheduling" in message]
    assert make(env=Env.read({"VLLM_PP_LAYER_PARTITION": "7"})).parallel.pp_layer_partition == ""


def test_an_unknown_attention_backend_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown attention backend 'FLASH'; did you mean.*known: AUTO, CPU_"
    ):
        check_backend("flash")
    assert check_backend("auto") == "AUTO" and check_backend("triton_attn") == "TRITON_ATTN"
