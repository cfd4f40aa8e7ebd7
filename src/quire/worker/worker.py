"""The worker: the model, the cache and the runner of one device."""

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionBackend, AttentionSpec, choose
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import CacheLayout, cache_specs, layout
from quire.checkpoint.pooling import PoolingFacts
from quire.config.engine import EngineConfig
from quire.config.expert_parallel import Eplb
from quire.config.generation import alignment_heads, suppressed_tokens
from quire.config.parallel import Stage
from quire.config.profiling import Profiling
from quire.data.control import MEMORY
from quire.data.lora import AdapterFacts, LoRARequest
from quire.data.plan import Masks, Pending, StepPlan
from quire.errors import RequestError
from quire.layers.attention import caching_layers
from quire.layers.lora import AdapterSlots
from quire.layers.moe import Experts
from quire.loader import load_model
from quire.logs import get_logger
from quire.memory import CacheSize, embeds_bytes, human, ladder, size_cache
from quire.parallel.all2all import open_dispatch
from quire.parallel.world import World
from quire.sampling.counts import Counts
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler
from quire.worker.cpu import CpuDevice
from quire.worker.device import Device, Model, device_failures
from quire.worker.eplb import Balancer
from quire.worker.features import PromptLogprobs, StepFeature
from quire.worker.lora import LoRAManager, check_slots, slots_of, why_no_own
from quire.worker.memory import Needs, bind, cache_room, free_bytes, table, use_expandable_segments
from quire.worker.multimodal.encoder import CrossEncoder, MediaEncoder, open_encoder, tower_group
from quire.worker.multimodal.timestamps import Alignment
from quire.worker.open_device import open_device
from quire.worker.pipeline import StageLink
from quire.worker.pooling import PoolingRunner, pooling_builder
from quire.worker.profiler import TorchProfiler
from quire.worker.rows import Rows
from quire.worker.runner import Runner, StageRunner
from quire.worker.sleep import OffloadedWeights, give_back, used_bytes
from quire.worker.spec.drafter import Drafter, check_ahead, draft_bytes, load_draft, open_drafter
from quire.worker.spec.progress import open_draft_progress

log = get_logger(__name__)

_ALONE = World()

_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""KV cache dtypes that no model computes in."""


class Worker:
    """One device, from loading its model to running its steps."""

    def __init__(self, config: EngineConfig, world: World = _ALONE) -> None:
        self.config = config
        self.world = world
        self.device = torch.device(config.machine.device)
        if self.device.type == "cpu":
            torch.set_num_threads(config.parallel.cpu_threads)
        else:
            use_expandable_segments()
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.cache_dtype = _CACHE_DTYPES.get(config.cache.kv_cache_dtype, self.dtype)
        facts, parallel = config.own_facts, config.parallel
        self.stage = Stage(world.rank.pp, parallel.pipeline_parallel_size, parallel.pp_layer_partition)
        draft, tp_size = config.draft, parallel.tensor_parallel_size
        self._own_draft = None if draft is None else draft.of_one(tp_size)
        self.layout = self._layout(facts)
        self.ep = open_dispatch(
            world,
            parallel.all2all_backend,
            strategy=parallel.expert_placement_strategy,
            num_redundant=Eplb.of(parallel).num_redundant_experts,
            num_few=0 if self.device.type == "cpu" else ladder(config.scheduler.max_num_seqs)[-1],
        )
        if self.ep is not None:
            self.ep.is_counted = parallel.enable_eplb
        self.balancer: Balancer | None = None
        self.backend = self._backend(facts)
        self.model: Any = None
        self.encoder: MediaEncoder | None = None
        """None for text-only models, and in pipeline stages after the first."""
        self.adapters: LoRAManager | None = None
        """None if LoRA is off."""
        self.draft: Any = None
        """The draft model; None without one."""
        self.drafter: Drafter | None = None
        self._needs: Needs | None = None
        """Memory beside the cache; None for a model without a cache."""
        self._fatal: tuple[type[Exception], ...] = (torch.AcceleratorError,)
        if self.stage.count > 1 and self.device.type == "cuda":
            self._fatal = (Exception,)  # the next stages cannot be notified without a wait
        self._runner: Runner | StageRunner | PoolingRunner | None = None
        self._rows: Rows | None = None
        self._size: CacheSize | None = None
        """Size of the cache, as it was allocated."""
        self._offloaded: OffloadedWeights | None = None
        """Weights offloaded to host memory."""
        self._asleep: set[str] = set()
        """Parts of `MEMORY` that are asleep."""
        self._name = f"dp{world.rank.dp}_pp{world.rank.pp}_tp{world.rank.tp}_rank"
        profiling = Profiling.of(config.observability.profiler_config)
        self._profiler: TorchProfiler | None = None
        if profiling is not None:
            self._profiler = TorchProfiler(profiling, self._name, on_gpu=self.device.type == "cuda")

    def _layout(self, facts: ArchFacts) -> CacheLayout:
        """Return the cache layout of this stage's layers, those of the draft last."""
        draft_specs = () if self._own_draft is None else cache_specs(self._own_draft)
        whole = layout((*cache_specs(facts), *draft_specs), self.config.model.max_model_len)
        if (draft := self.config.draft) is not None and draft.facts.drafts is None:
            whole = whole.keeping(1)  # the KV of its drafts is recomputed
        num, end = len(facts.layers), len(whole.specs) if self.stage.is_last else 0
        return whole.of({*self.stage.layers(num), *range(num, end)})

    @property
    def _reaches(self) -> bool:
        media, pooling = self.config.checkpoint.facts.media, self.config.pooling
        return bool(media and media.is_whole) or bool(pooling and pooling.both_ways)

    def _backend(self, facts: ArchFacts) -> AttentionBackend:
        config = self.config
        name = config.attention.attention_backend
        widest = max((facts.of_layer(layer) for layer in facts.layers), key=lambda layer: layer.head_dim)
        sizes = widest.heads, widest.kv_heads, widest.head_dim
        flags = {"sinks": facts.sinks, "uses_alibi": bool(facts.alibi_slopes), "reaches": self._reaches}
        spec = AttentionSpec(*sizes, self.dtype, **flags, cache_dtype=self.cache_dtype)
        backend = choose(None if name == "AUTO" else name, spec, config.machine)
        if config.speculation is not None and self.device.type == "cuda":
            check_ahead(backend.name, config.speculation.num_speculative_tokens, latent=facts.mla is not None)
        return backend

    # ---- the phases of a start, in order

    def start(self) -> CacheSize:
        """Run all phases of a single worker's start."""
        self.load()
        size = self.measure()
        self.allocate(size)
        self.warm_up()
        return size

    def load(self, tell: Callable[[float], None] | None = None) -> None:
        """Load the model without a cache; `tell` is called with the loaded share of the weights."""
        config, started = self.config, time.monotonic()
        slots = slots_of(config.lora, self.dtype, self.device, no_own=why_no_own(config))
        self.model = load_model(
            config.checkpoint,
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
            max_model_len=config.model.max_model_len,
            load_format=config.load.load_format,
            show_progress=config.load.use_tqdm_on_load and tell is None,
            seed=config.model.seed,
            packed=config.model.quantization != "none",
            quant=config.quant,
            build=None if config.pooling is None else pooling_builder(config),
            tell=tell,
            world=self.world,
            stage=self.stage,
            ep=self.ep,
            adapters=slots,
            tower_group=tower_group(config, self.world.tp),
        )
        self.encoder = open_encoder(config, self.model, self.world.tp, self.device)
        if slots is not None:
            self._open_slots(slots)
        if config.draft is not None and self._own_draft is not None and self.stage.is_last:
            backend = self._backend(self._own_draft)
            self.draft = load_draft(config, config.draft, backend, self.device, self.world)
            self.drafter = open_drafter(config, self.draft, self.model, backend, self.device)
        if self.ep is not None and self.ep.is_counted:
            layers = [module for module in self.model.modules() if isinstance(module, Experts)]
            self.balancer = Balancer(layers, self.ep.group, Eplb.of(config.parallel))
        log.info("Loaded %s of weights in %.2f s", human(self._weights), time.monotonic() - started)

    @property
    def _models(self) -> nn.ModuleList:
        """Return the target model and the draft model."""
        return nn.ModuleList(model for model in (self.model, self.draft) if model is not None)

    @property
    def _weights(self) -> int:
        """Return the bytes of all weights."""
        parameters = {parameter.data_ptr(): parameter for parameter in self._models.parameters()}
        return sum(parameter.nbytes for parameter in parameters.values())

    def measure(self) -> CacheSize:
        """Return the size of the cache that fits beside the model; the layers get a minimal cache."""
        config, facts = self.config, self.config.checkpoint.facts
        all_rows = self._rows = Rows(
            max_rows=config.scheduler.max_num_seqs,
            max_len=config.model.max_model_len,
            block_size=config.cache.block_size,
            sampling=SamplingRows(
                config.scheduler.max_num_seqs, facts.vocab, self.device, suppressed_tokens(config)
            ),
            num_groups=len(self.layout.groups),
            most_drafts=0 if config.speculation is None else config.speculation.num_speculative_tokens,
            turns=any(layer.rope is not None and layer.rope.sections for layer in facts.layers),
        )
        weights = self._weights
        bound = 0 if facts.encoder is not None else self._bind(num_blocks=1)
        if config.pooling is not None:
            pooler = self._pooler(config.pooling, all_rows)
            if facts.encoder is not None:
                return pooler.empty_cache(config, weights)
            self._needs = pooler.needs(config, weights, bound)
        else:
            device, sampler = self._generator(all_rows)
            self._needs = device.needs(config, weights, sampler, bound)
            if config.model.enable_prompt_embeds:
                num_tokens = config.scheduler.max_num_batched_tokens
                extra = embeds_bytes(facts, config.model.dtype, num_tokens=num_tokens)
                self._needs = replace(self._needs, activations=self._needs.activations + extra)
            if self._own_draft is not None:
                self._needs = self._needs.beside(draft_bytes(config, self._own_draft))
        if self.encoder is not None and not config.multimodal.skip_mm_profiling:
            self._needs = self.encoder.counted_in(self._needs, config)
        if self.adapters is not None:
            self._needs = self._needs.with_slots(self.adapters.slots.num_bytes, self.device.type)
        self._bind(num_blocks=1, num_rows=0)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return self._cache_size(self._needs)

    def allocate(self, size: CacheSize) -> None:
        """Allocate the cache: as large as measured, or smaller if another worker has less memory."""
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
        self._bind(size.num_blocks)
        if self.world.tp.rank == 0:  # the other ranks would log the same
            log.info("%s", table(self._needs, size))

    def warm_up(self) -> None:
        """Warm up, together with the workers that run the same steps: all of them have a cache by now."""
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
            for placement in plan.adapters:
                assert self.adapters is not None, "enable_lora is off"
                self.adapters.put(placement.slot, placement.adapter)
            pending = self._runner.submit(plan)
            if self.balancer is not None:
                self.balancer.step()
            return pending

    def draw(self, masks: Masks) -> None:
        """Sample the last plan, its constrained rows under `masks`."""
        if isinstance(self._runner, Runner):
            with device_failures(self._fatal):
                self._runner.draw(masks)

    def close(self) -> None:
        """Free all memory of the device and of the host."""
        self._drop_models()
        if self.adapters is not None:
            self.adapters.close()
        self.adapters = self._rows = None

    def _drop_models(self) -> None:
        """Drop the weights, loaded or offloaded, and everything that references them."""
        if self._offloaded is not None:
            self._offloaded.drop()
        self.model = self.draft = self.drafter = self.encoder = None
        self._runner = self.balancer = self._offloaded = None

    # ---- adapters

    def fetch_adapter(self, lora: LoRARequest) -> AdapterFacts:
        """Read a LoRA adapter into host memory; may run in any thread, while steps run."""
        if self.adapters is None:
            raise RequestError("LoRA is not enabled: start with enable_lora", param="lora_request")
        return self.adapters.fetch(lora)

    def drop_adapter(self, name: str) -> None:
        """Drop an adapter that no request uses any more."""
        if self.adapters is not None:
            self.adapters.drop(name)

    def _open_slots(self, slots: AdapterSlots) -> None:
        lora, facts = self.config.lora, self.config.own_facts
        check_slots(slots, free_bytes(self.config.machine))
        slots.allocate()
        layers = self.stage.layers(len(facts.layers)) if self.stage.count > 1 else None
        if self.adapters is None:
            # The scheduler decides what to drop, and relies on all other adapters.
            max_kept = lora.max_cpu_loras + lora.max_loras + 2
            self.adapters = LoRAManager(slots, max_kept=max_kept, layers=layers)
        else:
            self.adapters.refill(slots)

    # ---- sleep

    def sleep(self, level: int) -> int:
        """Free the memory of cache and weights and return the freed bytes. Level 1 offloads weights to host
        memory; on a CPU they stay. No step may be in flight."""
        before, started = used_bytes(self.device), time.monotonic()
        self._asleep = set(MEMORY)  # even if it fails: wake_up() keeps what is still here
        self._drop_cache()
        if level > 1:
            self._drop_models()
            self._release_slots()
        elif self.model is not None and self._offloaded is None and self.device.type == "cuda":
            self._offloaded = OffloadedWeights(self._models)
            self._release_slots()
        give_back(self.device)
        freed = before - used_bytes(self.device)
        log.info("Sleep mode freed %s in %.2f s", human(max(freed, 0)), time.monotonic() - started)
        return freed

    def wake_up(self, tags: list[str]) -> None:
        """Restore the memory in `tags`. The cache waits for the weights, which may contain its scales; CUDA
        graphs are captured again by `warm_up`, once both are there."""
        wanted = self._asleep & set(tags)
        with self._cache_freed_on_error():
            if "weights" in wanted:
                self._wake_weights()
                self._asleep.discard("weights")
            if "kv_cache" in wanted and "weights" not in self._asleep:
                if self._needs is not None and self._size is not None:
                    self._bind(self._size.num_blocks)
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
            give_back(self.device)
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
            if self.config.pooling is not None:
                self._pooler(self.config.pooling, self._rows)
            else:
                self._generator(self._rows)

    def _release_slots(self) -> None:
        if self.adapters is not None:
            self.adapters.slots.release()

    def _drop_cache(self) -> None:
        """Free the cache and everything that holds its address."""
        self._forget_steps()
        if self.encoder is not None:
            self.encoder.clear()
        if self._needs is not None and self.model is not None and self._offloaded is None:
            self._bind(num_blocks=1, num_rows=0)

    def _forget_steps(self) -> None:
        if isinstance(self._runner, Runner | StageRunner):
            self._runner.device.forget()

    # ---- profiles

    def profile(self, start: bool, prefix: str | None = None) -> str | None:
        """Start or stop a profile of this thread and the device; return the path of the trace when it
        stops."""
        if self._profiler is None:
            raise RequestError("profiling is not enabled: set profiler in profiler_config")
        if start:
            self._profiler.start(prefix and f"{prefix}_{self._name}")
            return None
        return str(self._profiler.stop())

    # ---- status

    def check_health(self) -> None:
        """Return, which shows that the worker responds."""

    def memory_stats(self) -> dict[str, int]:
        """Return the bytes of the weights on the device, and the bytes that this process uses of it."""
        is_here = self.model is not None and self._offloaded is None
        weights = self._weights if is_here else 0
        return {"weights": weights, "used": used_bytes(self.device)}

    # ---- runners

    def _generator(self, all_rows: Rows) -> tuple[Device, Sampler | None]:
        config, facts, model = self.config, self.config.checkpoint.facts, self.model
        link = None
        if self.stage.count > 1:
            link = StageLink(self.world.pp, facts.hidden, self.dtype, self.device)
        whole = self._device_model(model.logits, link)
        slots = all_rows.slots = whole.adapters
        device = open_device(whole, all_rows, self.device, config.speculation)
        if self.drafter is not None:
            spec, first = config.speculation, len(config.own_facts.layers)
            is_ahead = not isinstance(device, CpuDevice)
            progress = None
            if not self.drafter.follows:
                progress = open_draft_progress(all_rows, self.layout, first, ahead=is_ahead)
            device.draft_by(
                self.drafter,
                progress,
                config.scheduler.max_num_batched_tokens,
                by_chance=spec is not None and spec.draft_sample_method == "probabilistic",
            )
        if link is not None and not link.is_last:
            self._runner = StageRunner(device=device, all_rows=all_rows, link=link)
            return device, None
        counts = None
        if self.device.type == "cuda":
            num_own = 0 if slots is None else slots.num_own
            counts = Counts(config.scheduler.max_num_seqs, facts.vocab + num_own, self.device)
        sampler = Sampler(facts.vocab, self.device, config.model.logprobs_mode, device.sample, counts)
        parts: list[StepFeature] = [PromptLogprobs(model.logits, all_rows, config.model.logprobs_mode, slots)]
        if isinstance(self.encoder, CrossEncoder):
            heads = alignment_heads(config)
            parts.append(Alignment(self.encoder.crossing, heads, all_rows, self.world.tp))
        self._runner = Runner(device=device, all_rows=all_rows, sampler=sampler, parts=parts)
        return device, sampler

    def _pooler(self, pooling: PoolingFacts, all_rows: Rows) -> PoolingRunner:
        self.model.settle()
        windows = None if self.config.checkpoint.facts.encoder else self.layout.windows
        model = self._device_model(self.model.vectors)
        self._runner = PoolingRunner(self.model, model, all_rows, pooling, self.device, windows)
        return self._runner

    def _device_model(self, head: Callable[[Tensor], Tensor], link: StageLink | None = None) -> Model:
        slots = None if self.adapters is None else self.adapters.slots
        return Model(self.model, head, self.backend, link, self.ep, slots, self.encoder, self._reaches)

    def _cache_size(self, needs: Needs) -> CacheSize:
        config = self.config
        return size_cache(
            self.layout,
            kv_dtype=config.cache.kv_cache_dtype,
            block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len,
            max_chunk=config.scheduler.max_chunk,
            num_rows=config.scheduler.max_num_seqs,
            auto_fit=config.model.auto_fit,
            room=cache_room(config.cache, config.machine, other_bytes=needs.total),
        )

    def _bind(self, num_blocks: int, num_rows: int | None = None) -> int:
        """Give every layer a cache of this many blocks, or a state per row. Return the bytes of all."""
        return bind(
            caching_layers(self._models.modules()),
            self.layout,
            num_blocks=num_blocks,
            num_rows=self.config.scheduler.max_num_seqs if num_rows is None else num_rows,
            block_size=self.config.cache.block_size,
            cache_dtype=self.cache_dtype,
            device=self.device,
        )
