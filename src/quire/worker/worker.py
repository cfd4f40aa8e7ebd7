"""Worker: the model, the cache and the runner of one device."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import torch

from quire.config.engine import EngineConfig
from quire.config.expert_parallel import Eplb
from quire.config.generation import suppressed_tokens
from quire.config.profiling import Profiling
from quire.data.control import MEMORY
from quire.data.kv_tiers import BlockLoad, BlockRead, BlockStores, LoadDone
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.step_plan import Masks, Pending, StepPlan
from quire.errors import ConfigError, RequestError
from quire.layers.lora import AdapterSlots
from quire.layers.moe import Experts
from quire.loader.update import fixed_reason
from quire.logs import get_logger
from quire.memory import (
    CacheSize,
    check_weights_fit,
    embeds_bytes,
    human,
    model_memory,
    processor_bytes,
    size_cache,
    weights_too_large,
)
from quire.parallel.world import World
from quire.sampling.rows import SamplingRows
from quire.worker.cuda.ipc import CudaIpc
from quire.worker.device import device_failures
from quire.worker.disk_tier import open_disk_tiers
from quire.worker.eplb import Balancer
from quire.worker.kv_tiers import KindTiers, WorkerTiers
from quire.worker.loaded_model import LoadedModel
from quire.worker.lora import LoRAManager
from quire.worker.memory import Needs, cache_room, table, use_expandable_segments
from quire.worker.pooling import PoolingRunner
from quire.worker.profiler import TorchProfiler
from quire.worker.remote_tier import AT_ONCE_BYTES, open_remote_engines
from quire.worker.rows import Rows
from quire.worker.runner import Runner
from quire.worker.sleep import OffloadedWeights, release_memory, used_bytes
from quire.worker.spec.drafter import draft_bytes
from quire.worker.stage_runner import StageRunner
from quire.worker.state_checkpoints import StateCheckpoints
from quire.worker.vllm_weight_transfer import open_transport
from quire.worker.weight_update import WeightUpdater

log = get_logger(__name__)

_ALONE = World()


class Worker:
    """Runs one device, from loading its model to running its steps."""

    def __init__(self, config: EngineConfig, world: World = _ALONE) -> None:
        self.config = config
        self.world = world
        self.device = torch.device(config.machine.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.parallel.cpu_threads)
        else:
            use_expandable_segments()
        self.loaded = LoadedModel(config, world)
        self.dtype = self.loaded.dtype
        self.adapters: LoRAManager | None = None
        """LoRA adapters; None if LoRA is off."""
        self.balancer: Balancer | None = None
        """Expert load balancer; None without EPLB."""
        self._needs: Needs | None = None
        """Memory that the worker needs besides the cache; None for a model without a cache."""
        self._fatal: tuple[type[Exception], ...] = (torch.AcceleratorError,)
        if self.loaded.stage.count > 1 and self.device.type == "cuda":
            self._fatal = (Exception,)  # the next stages cannot be notified without a wait
        self._runner: Runner | StageRunner | PoolingRunner | None = None
        self._rows: Rows | None = None
        self._size: CacheSize | None = None
        """Size of the cache, as it was allocated."""
        self._checkpoints: StateCheckpoints | None = None
        """Object that copies SSM states to and from checkpoints; None without checkpoints."""
        self._tiers: WorkerTiers | None = None
        """Lower tiers of the KV cache; None if there are none."""
        self._offloaded: OffloadedWeights | None = None
        """Weights offloaded to host memory; None while they are on the device or dropped."""
        self._updater: WeightUpdater | None = None
        """Updater of the loaded weights; None before the first update."""
        self._asleep: set[str] = set()
        """Parts of the memory that are asleep: weights, KV cache, or both."""
        self._name = f"dp{world.rank.dp}_pp{world.rank.pp}_tp{world.rank.tp}_rank"
        profiling = Profiling.of(config.observability.profiler_config)
        self._profiler: TorchProfiler | None = None
        if profiling is not None:
            self._profiler = TorchProfiler(profiling, self._name, on_gpu=self.device.type == "cuda")

    @property
    def model(self) -> Any:
        """Return the target model (not the draft model); None while it is not loaded."""
        return self.loaded.model

    # ---- the phases of a start, in order

    def start(self) -> CacheSize:
        """Load the model, measure the memory, allocate the cache and warm up; return the size of the
        cache."""
        self.load()
        size = self.measure()
        self.allocate(size)
        self.warm_up()
        return size

    def load(self, on_progress: Callable[[float], None] | None = None) -> None:
        """Load the model without a cache; `on_progress` is called with the loaded fraction of the weights."""
        started, loaded = time.monotonic(), self.loaded
        check_weights_fit(self.config)
        try:
            loaded.load(on_progress)
        except torch.OutOfMemoryError as error:
            message = weights_too_large(self.config, model_memory(self.config).weights)
            raise ConfigError(f"out of memory: {message}") from error
        if loaded.slots is not None:
            self._open_adapters(loaded.slots)
        if loaded.ep is not None and loaded.ep.is_counted:
            layers = [module for module in loaded.model.modules() if isinstance(module, Experts)]
            self.balancer = Balancer(layers, loaded.ep.group, Eplb.of(self.config.parallel))
        log.info(
            "Model loading took %s memory and %.2f seconds",
            *(human(loaded.num_bytes), time.monotonic() - started),
        )
        if self.config.extensions.weight_transfer_config and (reason := fixed_reason(loaded.model)):
            log.warning("weight_transfer_config is set, but %s", reason)

    def measure(self) -> CacheSize:
        """Measure the memory that steps need, and return the size of the cache that fits beside the model.
        During the measurement the layers have a minimal cache."""
        config, facts = self.config, self.config.checkpoint.facts
        all_rows = self._rows = Rows(
            max_rows=config.scheduler.max_num_seqs,
            max_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            sampling=SamplingRows(
                config.scheduler.max_num_seqs, facts.vocab, self.device, suppressed_tokens(config)
            ),
            num_groups=len(self.loaded.layout.groups),
            max_drafts=0 if config.speculation is None else config.speculation.num_speculative_tokens,
            uses_mrope=any(layer.rope is not None and layer.rope.sections for layer in facts.layers),
        )
        loaded, weights = self.loaded, self.loaded.num_bytes
        bound = 0 if facts.encoder is not None else loaded.bind(num_blocks=1)
        runner = self._runner = loaded.open_runner(all_rows)
        if isinstance(runner, PoolingRunner):
            if facts.encoder is not None:
                return runner.empty_cache(config, weights)
            self._needs = runner.needs(config, weights, bound)
        else:
            sampler = runner.sampler if isinstance(runner, Runner) else None
            self._needs = runner.device.needs(config, weights, sampler, bound)
            extra = processor_bytes(config) if config.extensions.logits_processors else 0
            if config.model.enable_prompt_embeds:
                num_tokens = config.scheduler.max_num_batched_tokens
                extra += embeds_bytes(facts, config.model.dtype, num_tokens=num_tokens)
            self._needs = replace(self._needs, activations=self._needs.activations + extra)
            if loaded.draft_facts is not None:
                self._needs = self._needs.with_peak(draft_bytes(config, loaded.draft_facts))
        if loaded.encoder is not None and not config.multimodal.skip_mm_profiling:
            self._needs = loaded.encoder.add_needs(self._needs, config)
        if loaded.offload is not None:
            self._needs = self._needs.with_buffers(loaded.offload.buffer_bytes)
        if loaded.slots is not None:
            self._needs = self._needs.with_slots(loaded.slots.num_bytes, self.device.type)
        loaded.bind(num_blocks=1, num_rows=0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return size_cache(
            loaded.layout,
            kv_dtype=config.cache.kv_cache_dtype,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            max_chunk=config.scheduler.max_chunk,
            num_rows=config.scheduler.max_num_seqs,
            auto_fit=config.model.auto_fit,
            room=cache_room(config.cache, config.machine, other_bytes=self._needs.total),
            checkpoint_unit=config.cache.mamba_block_size,
        )

    def allocate(self, size: CacheSize) -> None:
        """Allocate a cache of this size: that of `measure`, or smaller if another worker has less memory."""
        self._size = size
        if self._needs is None:
            return
        longest = self.config.model.max_model_len
        if size.max_model_len < longest:
            log.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit the KV cache",
                longest,
                size.max_model_len,
            )
        self._bind(size)
        if self.world.tp.rank == 0:  # the other ranks would log the same
            log.info("%s", table(self._needs, size))

    def _bind(self, size: CacheSize) -> None:
        self.loaded.bind(size.num_blocks, num_checkpoints=size.num_checkpoints)
        self._checkpoints = self.loaded.checkpoints() if size.num_checkpoints else None
        self._rebind_tiers()

    def _rebind_tiers(self) -> None:
        """Connect the lower tiers of the KV cache to the newly allocated cache."""
        if self._tiers is not None:
            has_states = self._size is not None and self._size.num_checkpoints
            states = self.loaded.checkpoints() if has_states else None
            self._tiers.rebind(self.loaded.block_copies(states))

    def warm_up(self) -> None:
        """Warm up, for example capture CUDA graphs. All workers that run the same steps must have a cache,
        and warm up together."""
        assert not self._asleep, "wake_up() comes first"
        self._forget_steps()
        with self._cache_freed_on_error():
            if isinstance(self._runner, Runner | StageRunner):
                self._runner.device.warm_up(self.config)
            if self.balancer is not None:
                self.balancer.begin()

    # ---- steps

    def submit(self, plan: StepPlan) -> Pending:
        assert self._runner is not None, "start() comes first"
        with device_failures(self._fatal):
            if self._tiers is not None:
                self._tiers.begin_step()
            if plan.stores is not None:
                self.store_blocks(plan.stores)
            for placement in plan.adapters:
                assert self.adapters is not None, "enable_lora is off"
                self.adapters.put(placement.slot, placement.adapter)
            if self._checkpoints is not None:
                self._checkpoints.restore(plan)
            pending = self._runner.submit(plan)
            if self._checkpoints is not None:
                self._checkpoints.save(plan)
            if self.balancer is not None:
                self.balancer.step()
            return pending

    def sample_tokens(self, masks: Masks) -> None:
        """Sample the rows of the last plan, with these grammar masks for its constrained rows."""
        if isinstance(self._runner, Runner):
            with device_failures(self._fatal):
                self._runner.sample_tokens(masks)

    def close(self) -> None:
        """Free all memory of the device and of the host."""
        if self._tiers is not None:
            self._tiers.close()
        self._drop_models()
        if self.adapters is not None:
            self.adapters.close()
        self.adapters = self._rows = None

    def _drop_models(self) -> None:
        """Drop the weights, loaded or offloaded, and everything that references them."""
        if self._offloaded is not None:
            self._offloaded.drop()
        self.loaded.drop()
        self._runner = self.balancer = self._offloaded = self._updater = None

    # ---- adapters

    def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
        """Read a LoRA adapter into host memory; may run in any thread, while steps run."""
        if self.adapters is None:
            raise RequestError("LoRA is not enabled: start with enable_lora", param="lora_request")
        return self.adapters.fetch(lora)

    def drop_adapter(self, name: str) -> None:
        if self.adapters is not None:
            self.adapters.drop(name)

    def _open_adapters(self, slots: AdapterSlots) -> None:
        lora, facts, stage = self.config.lora, self.config.rank_facts, self.loaded.stage
        layers = stage.layers(len(facts.layers)) if stage.count > 1 else None
        if self.adapters is None:
            # The scheduler decides what to drop, and relies on all other adapters.
            max_cached = lora.max_cpu_loras + lora.max_loras + 2
            self.adapters = LoRAManager(slots, max_cached=max_cached, layers=layers)
        else:
            self.adapters.refill(slots)

    # ---- lower tiers of the KV cache

    def describe_tiers(self) -> tuple[int, int]:
        """Return the bytes of a block on this worker, and of a checkpoint of SSM states."""
        sizes = [entries.entry_bytes for entries in self.loaded.cache_entries(self._checkpoints)]
        return sizes[0], sum(sizes[1:])

    def open_tiers(self, num_slots: list[int], num_files: list[int]) -> list[bytes]:
        """Open the host tier with these numbers of slots for blocks and for checkpoints of SSM states, and
        the disk tier, with these numbers of files, if a directory is configured. Return the keys on disk, of
        each kind the least recently used first."""
        copies = self.loaded.block_copies(self._checkpoints)
        sizes = [kind.entries.entry_bytes for kind in copies]
        disks = open_disk_tiers(self.config, self.world.rank, sizes, num_files)
        parts = zip(copies, num_slots, disks, strict=False)
        ipc = None
        if self.device.type == "cuda" and self.config.cache.kv_transfer_config:
            ipc = CudaIpc(self.device, max(AT_ONCE_BYTES, *sizes))
        remote = open_remote_engines(self.config, self._rank_in_engine, ipc)
        self._tiers = WorkerTiers([KindTiers(*part) for part in parts], remote, ipc)
        return self._tiers.keys()

    def store_blocks(self, stores: BlockStores) -> None:
        """Copy KV cache entries to lower tiers, after the submitted steps."""
        assert self._tiers is not None, "open_tiers() comes first"
        self._tiers.store(msgspec.convert(stores, BlockStores))

    def load_blocks(self, load: BlockLoad) -> LoadDone:
        """Copy KV cache entries from lower tiers to the device, and wait for it; runs in a thread beside
        steps."""
        assert self._tiers is not None, "open_tiers() comes first"
        return self._tiers.load(load)

    def read_blocks(self, read: BlockRead) -> memoryview | None:
        """Return the contents of KV cache entries that another engine reads, or nothing if they were written
        to its shared memory. Return None if the entries are those of another rank. May run in any thread."""
        assert self._tiers is not None, "open_tiers() comes first"
        return self._tiers.read(read) if read.rank == self._rank_in_engine else None

    @property
    def _rank_in_engine(self) -> int:
        return replace(self.world.rank, dp=0).index(self.config.parallel)

    # ---- weight updates

    @property
    def weights(self) -> WeightUpdater:
        if self.model is None or self._offloaded is not None:
            raise RequestError("the weights are asleep: call wake_up first")
        if self._updater is None:
            index = self.world.rank.index(self.config.parallel)
            twins = None if self.balancer is not None else self.loaded.twins
            transport = open_transport(self.config, self.device, index, self.model)
            self._updater = WeightUpdater(self.model, twins, transport)
        return self._updater

    def update_weights(self, action: str, *args: Any) -> Any:
        """Call a method of the updater by name."""
        result = getattr(self.weights, action)(*args)
        if action == "commit" and self.loaded.encoder is not None:
            self.loaded.encoder.clear()
        return result

    # ---- sleep

    def sleep(self, level: int) -> int:
        """Free the memory of cache and weights and return the freed bytes. Level 1 offloads weights to host
        memory (on a CPU they stay); level 2 drops them. No step may be in flight."""
        before, started = used_bytes(self.device), time.monotonic()
        self._asleep = set(MEMORY)  # even if it fails: wake_up() keeps what is still here
        self._drop_cache()
        if level > 1:
            self._drop_models()
            self._release_slots()
        elif self.model is not None and self._offloaded is None and self.device.type == "cuda":
            self._offloaded = OffloadedWeights(self.loaded.modules)
            self._release_slots()
        release_memory(self.device)
        freed = before - used_bytes(self.device)
        log.info("Sleep mode freed %s in %.2f s", human(max(freed, 0)), time.monotonic() - started)
        return freed

    def wake_up(self, tags: list[str]) -> None:
        """Restore the memory in `tags`. The cache is restored after the weights, which may contain its
        scales. CUDA graphs are captured again by `warm_up`, once weights and cache are restored."""
        parts = self._asleep & set(tags)
        with self._cache_freed_on_error():
            if "weights" in parts:
                self._wake_weights()
                self._asleep.discard("weights")
            if "kv_cache" in parts and "weights" not in self._asleep:
                if self._needs is not None and self._size is not None:
                    self._bind(self._size)
                self._asleep.discard("kv_cache")

    @contextmanager
    def _cache_freed_on_error(self) -> Iterator[None]:
        """Free the cache if waking up fails: the next attempt needs the memory."""
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # frames hold what was allocated so far
            self._asleep.add("kv_cache")
            self._drop_cache()
            release_memory(self.device)
            raise

    def _wake_weights(self) -> None:
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None
            if self.adapters is not None:
                self.adapters.slots.allocate()
                self.adapters.refill(self.adapters.slots)
        if self.model is None:
            self.load(lambda share: None)
        if self._runner is None:
            assert self._rows is not None, "measure() comes first"
            self._runner = self.loaded.open_runner(self._rows)

    def _release_slots(self) -> None:
        if self.adapters is not None:
            self.adapters.slots.release()

    def _drop_cache(self) -> None:
        """Free the cache and everything that contains its address."""
        self._forget_steps()
        self._checkpoints = None
        if self.loaded.encoder is not None:
            self.loaded.encoder.clear()
        if self._needs is not None and self.model is not None and self._offloaded is None:
            self.loaded.bind(num_blocks=1, num_rows=0)
            self._rebind_tiers()

    def _forget_steps(self) -> None:
        if isinstance(self._runner, Runner | StageRunner):
            self._runner.device.forget()

    # ---- profiles

    def profile(self, start: bool, prefix: str | None = None) -> str | None:
        """Start or stop a profile of this thread and the device; return the trace's path at its end."""
        if self._profiler is None:
            raise RequestError("profiling is not enabled: set profiler in profiler_config")
        if start:
            self._profiler.start(prefix and f"{prefix}_{self._name}")
            return None
        return str(self._profiler.stop())

    # ---- status

    def check_health(self) -> None:
        """Do nothing: the return shows that the worker responds."""

    def memory_stats(self) -> dict[str, int]:
        """Return bytes of device memory: `weights`, of the loaded weights, and `used`, of this process in
        all."""
        is_here = self.model is not None and self._offloaded is None
        weights = self.loaded.num_bytes if is_here else 0
        return {"weights": weights, "used": used_bytes(self.device)}
