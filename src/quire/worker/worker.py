"""The worker: one device's model, cache and runner, put together once."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from quire.attention.backend import AttentionBackend, AttentionSpec, choose
from quire.capacity import CacheSize, human, size_cache
from quire.config.engine import EngineConfig
from quire.config.layout import cache_specs, layout
from quire.data.plan import Pending, StepPlan
from quire.kernels import native, sampling
from quire.layers.attention import caching_layers
from quire.loader import load_model
from quire.logs import get_logger
from quire.sampling.counts import Counts
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler
from quire.worker.device import Device, Model, device_failures
from quire.worker.host import Host
from quire.worker.memory import Needs, bind, cache_room, table, unite_memory
from quire.worker.parts import Part, PromptLogprobs
from quire.worker.pooling import PoolingRunner, pooling_builder
from quire.worker.rows import Rows
from quire.worker.runner import Runner

log = get_logger(__name__)

_KEPT_AS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Types of a cache that no model computes in."""


class Worker:
    """One device, from loading its model to running its steps."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = torch.device(config.machine.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.parallel.cpu_threads)
        else:
            unite_memory()
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.kept_as = _KEPT_AS.get(config.cache.kv_cache_dtype, self.dtype)
        """The type of the cache."""
        self.layout = layout(cache_specs(config.checkpoint.facts), config.model.max_model_len)
        self._runner: Runner | PoolingRunner | None = None

    def _backend(self) -> AttentionBackend:
        config, facts = self.config, self.config.checkpoint.facts
        asked = config.attention.attention_backend
        sizes = facts.heads, facts.kv_heads, facts.head_dim
        spec = AttentionSpec(*sizes, self.dtype, sinks=facts.sinks, kept_as=self.kept_as)
        return choose(None if asked == "AUTO" else asked, spec, config.machine)

    def load(self, backend: AttentionBackend | None = None) -> Any:
        """The model with its weights, without a cache."""
        config = self.config
        return load_model(
            config.checkpoint,
            dtype=self.dtype,
            device=self.device,
            backend=backend or self._backend(),
            max_model_len=config.model.max_model_len,
            load_format=config.load.load_format,
            show_progress=config.load.use_tqdm_on_load,
            seed=config.model.seed,
            packed=config.model.quantization != "none",
            quant=config.quant,
            build=None if config.pooling is None else pooling_builder(config),
        )

    def start(self) -> CacheSize:
        """Load the weights, give the cache what memory is left, and be ready to run."""
        config, facts = self.config, self.config.checkpoint.facts
        backend = self._backend()
        started = time.monotonic()
        model = self.load(backend)
        weights = sum(
            parameter.nbytes for parameter in {p.data_ptr(): p for p in model.parameters()}.values()
        )
        log.info("Loaded %s of weights in %.2f s", human(weights), time.monotonic() - started)
        all_rows = Rows(
            max_rows=config.scheduler.max_num_seqs,
            max_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            sampling=SamplingRows(config.scheduler.max_num_seqs, facts.vocab, self.device),
            num_groups=len(self.layout.groups),
        )
        if config.pooling is not None:
            model.settle()
            plan = None if facts.encoder else backend.plan
            pooler = PoolingRunner(model, plan, all_rows, config.pooling, self.device)
            self._runner = pooler
            if facts.encoder is not None:
                return pooler.empty_cache(config, weights)
            return self._make_cache(model, lambda: pooler.needs(config, weights))
        device = open_device(Model(model, model.logits, backend), all_rows, self.device)
        counts = None
        if self.device.type == "cuda":
            counts = Counts(config.scheduler.max_num_seqs, facts.vocab, self.device)
        sampler = Sampler(facts.vocab, self.device, config.model.logprobs_mode, device.sample, counts)
        size = self._make_cache(model, lambda: device.needs(config, weights, sampler))
        device.warm_up(config)
        parts: list[Part] = [PromptLogprobs(model.logits, all_rows, config.model.logprobs_mode)]
        self._runner = Runner(device=device, all_rows=all_rows, sampler=sampler, parts=parts)
        return size

    def submit(self, plan: StepPlan) -> Pending:
        assert self._runner is not None, "start() comes first"
        with device_failures():
            return self._runner.submit(plan)

    def _make_cache(self, model: nn.Module, needed: Callable[[], Needs]) -> CacheSize:
        config = self.config
        self._bind(model, num_blocks=1)
        needs = needed()
        size = size_cache(
            self.layout,
            kv_dtype=config.cache.kv_cache_dtype,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            max_chunk=config.scheduler.max_chunk,
            num_rows=config.scheduler.max_num_seqs,
            auto_fit=config.model.auto_fit,
            room=cache_room(config.cache, config.machine, other_bytes=needs.total),
        )
        if size.max_model_len < config.model.max_model_len:
            log.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit the KV cache",
                config.model.max_model_len,
                size.max_model_len,
            )
        self._bind(model, size.num_blocks)
        log.info("%s", table(needs, size))
        return size

    def _bind(self, model: nn.Module, num_blocks: int) -> None:
        """Give every layer a cache of this many blocks."""
        bind(
            caching_layers(model.modules()),
            self.layout,
            num_blocks=num_blocks,
            num_rows=self.config.scheduler.max_num_seqs,
            block_size=self.config.cache.block_size,
            kept_as=self.kept_as,
            device=self.device,
        )


def open_device(model: Model, all_rows: Rows, device: torch.device) -> Device:
    if device.type == "cpu":
        if native.library() is None:
            return Host(model, all_rows)
        return Host(model, all_rows, lambda logits, asked: sampling.sample(logits, *asked))
    from quire.kernels.triton.sampling import sample
    from quire.worker.cuda import Cuda

    return Cuda(model, all_rows, lambda logits, asked: sample(logits, *asked), device)
