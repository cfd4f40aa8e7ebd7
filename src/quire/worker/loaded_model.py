"""LoadedModel: the layers of a worker, with their weights, caches and adapter slots."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionBackend, AttentionSpec, choose
from quire.checkpoint.facts import ArchFacts
from quire.checkpoint.layout import INT8_CACHE, CacheLayout, cache_specs, layout
from quire.checkpoint.pooling import PoolingFacts
from quire.config.engine import EngineConfig
from quire.config.expert_parallel import Eplb
from quire.config.generation import alignment_heads
from quire.config.load import has_fixed_weights
from quire.config.parallel import Stage
from quire.config.speculation import SpecFacts
from quire.errors import ConfigError
from quire.kernels import batch_invariant
from quire.kernels.cpu import attention, native
from quire.layers.attention import caching_layers
from quire.layers.lora import AdapterSlots
from quire.layers.ssm import state_layers
from quire.loader import load_model
from quire.loader.offload import LayerOffload
from quire.loader.update import LayerTwins
from quire.logs import get_logger
from quire.memory import ladder
from quire.parallel.all2all import open_dispatch
from quire.parallel.world import World
from quire.sampling.counts import Counts
from quire.sampling.sampler import Sampler
from quire.worker.cpu import CpuDevice
from quire.worker.cpu import sample_tokens as sample_on_host
from quire.worker.device import Device, Model
from quire.worker.extensions import open_processors
from quire.worker.features import ExpertsReadback, PromptLogprobs, StepFeature
from quire.worker.kv_tiers import BlockCopies, CacheEntries, CpuBlockCopies, cache_pages, state_slots
from quire.worker.lora import check_slots, no_extra_vocab_reason, slots_of
from quire.worker.memory import bind, free_bytes
from quire.worker.multimodal.encoder import CrossEncoder, MediaEncoder, open_encoder, tower_group
from quire.worker.multimodal.timestamps import Alignment
from quire.worker.pipeline import StageLink
from quire.worker.pooling import PoolingRunner, pooling_builder
from quire.worker.prefetch import LayerPrefetch
from quire.worker.rows import Rows
from quire.worker.runner import Runner
from quire.worker.spec.drafter import Drafter, check_ahead, load_draft, open_drafter
from quire.worker.spec.progress import open_draft_progress
from quire.worker.stage_runner import StageRunner
from quire.worker.state_checkpoints import StateCheckpoints

log = get_logger(__name__)

_CACHE_DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, INT8_CACHE: torch.int8}
"""KV cache dtypes that only store values and in which no model computes, by their name in the
configuration."""


class LoadedModel:
    """The layers of the model that one device runs. This class loads their weights, allocates their caches
    and builds the runner of steps."""

    def __init__(self, config: EngineConfig, world: World) -> None:
        self.config, self.world = config, world
        self.device = torch.device(config.machine.device)
        batch_invariant.switch(config.model.batch_invariant)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.cache_dtype = _CACHE_DTYPES.get(config.cache.kv_cache_dtype, self.dtype)
        facts, parallel = config.rank_facts, config.parallel
        self.stage = Stage(world.rank.pp, parallel.pipeline_parallel_size, parallel.pp_layer_partition)
        draft, tp_size = config.draft, parallel.tensor_parallel_size
        self.draft_facts = None if draft is None else draft.of_one(tp_size)
        self.layout = self._layout(facts)
        self.ep = open_dispatch(
            world,
            # Sums of outputs that are sent back have no fixed order.
            "allgather_reducescatter" if batch_invariant.is_on() else parallel.all2all_backend,
            strategy=parallel.expert_placement_strategy,
            num_redundant=Eplb.of(parallel).num_redundant_experts,
            num_few=0 if self.device.type == "cpu" else ladder(config.scheduler.max_num_seqs)[-1],
        )
        if self.ep is not None:
            self.ep.is_counted = parallel.enable_eplb
        self.backend = self._backend(facts)
        if batch_invariant.is_on() and self.device.type == "cpu":
            self._check_batch_invariant(facts)
        self.offload: LayerOffload | None = None
        """Layers with weights in host memory; None if cpu_offload_gb is 0."""
        self.drop()

    def drop(self) -> None:
        """Drop the weights and everything that references them."""
        self.model: Any = None
        self.encoder: MediaEncoder | None = None
        """Multimodal encoder; None for text-only models, and in pipeline stages after the first."""
        self.draft: Any = None
        """The draft model; None if no model proposes drafts."""
        self.drafter: Drafter | None = None
        self.slots: AdapterSlots | None = None
        """LoRA adapter slots; None if LoRA is off."""
        self.twins: LayerTwins | None = None
        """Copies of the layers without weights, made before loading, through which new weights are loaded;
        None if the weights cannot be updated."""
        if self.offload is not None:
            self.offload.close()
        self.offload = None

    def _layout(self, facts: ArchFacts) -> CacheLayout:
        """Return the cache layout of this pipeline stage's layers; layers of the draft model come last."""
        draft_specs = () if self.draft_facts is None else cache_specs(self.draft_facts)
        specs, longest = (*cache_specs(facts), *draft_specs), self.config.model.max_model_len
        full_layout = layout(specs, longest, self.config.states_per_row, self.config.cache.kv_cache_dtype)
        if (draft := self.config.draft) is not None and draft.facts.drafts is None:
            full_layout = full_layout.keeping(1)  # sliding windows: the draft model computes tokens twice
        num, end = len(facts.layers), len(full_layout.specs) if self.stage.is_last else 0
        return full_layout.of({*self.stage.layers(num), *range(num, end)})

    @property
    def _bidirectional(self) -> bool:
        media, pooling = self.config.checkpoint.facts.media, self.config.pooling
        return bool(media and media.is_whole) or bool(pooling and pooling.bidirectional)

    def _causal_groups(self) -> tuple[int, ...]:
        """Return the layer groups whose attention stays causal in models where images are bidirectional only
        in sliding-window layers."""
        facts = self.config.checkpoint.facts
        if facts.media is None or not facts.media.whole_in_windows:
            return ()
        windows = [layer.window for layer in facts.layers if layer.window is not None]
        if windows and min(windows) >= self.config.model.max_model_len:
            raise ConfigError(
                f"max_model_len={self.config.model.max_model_len} must exceed {min(windows)}, the sliding "
                "window of this model: images are only bidirectional within it. Or set language_model_only"
            )
        return tuple(number for number, window in enumerate(self.layout.windows) if window is None)

    def _backend(self, facts: ArchFacts) -> AttentionBackend:
        config = self.config
        name = config.attention.attention_backend
        if batch_invariant.is_on() and self.device.type == "cuda":
            name = "TRITON_ATTN"
        widest = max((facts.of_layer(layer) for layer in facts.layers), key=lambda layer: layer.head_dim)
        sizes = widest.heads, widest.kv_heads, widest.head_dim
        flags = {
            "sinks": facts.sinks,
            "uses_alibi": bool(facts.alibi_slopes),
            "bidirectional": self._bidirectional,
        }
        spec = AttentionSpec(*sizes, self.dtype, **flags, cache_dtype=self.cache_dtype)
        backend = choose(None if name == "AUTO" else name, spec, config.machine)
        if config.speculation is not None and self.device.type == "cuda":
            check_ahead(
                backend.name, config.speculation.num_speculative_tokens, uses_mla=facts.mla is not None
            )
        return backend

    def _check_batch_invariant(self, facts: ArchFacts) -> None:
        """Raise a ConfigError if a part of the model runs in torch on this CPU: only the C kernels compute
        the same bits in any batch."""
        step, mla, problem = attention.HEAD_DIM_STEP, facts.mla, ""
        if not native.serves(self.device, self.dtype):
            problem = f"the C kernels are not available for {self.dtype} here"
        elif facts.borrowed is not None:
            problem = "the code of transformers selects its own kernels"
        elif mla is not None and (mla.kv_latent + mla.rope_dim) % step:
            problem = f"a latent of {mla.kv_latent} + {mla.rope_dim} elements is not a multiple of {step}"
        elif mla is None and self.backend.name != "CPU_ATTN":
            problem = f"the attention backend is {self.backend.name}, not CPU_ATTN"
        if problem:
            raise ConfigError(
                f"batch_invariant is not supported for {facts.architecture} on this CPU: {problem}; leave it"
                " out, and unset QUIRE_BATCH_INVARIANT and VLLM_BATCH_INVARIANT"
            )

    def load(self, on_progress: Callable[[float], None] | None = None) -> None:
        """Load the model without a cache; `on_progress` is called with the loaded fraction of the weights."""
        config = self.config
        if self.device.type == "cuda" and self.stage.is_last and config.pooling is None:
            from quire.worker.cuda.dummy_batches import compile_sampling_ahead

            compile_sampling_ahead(config)
        slots = slots_of(config.lora, self.dtype, self.device, no_extra_vocab=no_extra_vocab_reason(config))
        if not has_fixed_weights(config.checkpoint, config.load):
            self.twins = LayerTwins(config.checkpoint, self.stage)
        if config.load.cpu_offload_gb:
            self.offload = LayerOffload(config.load.cpu_offload_gb * 2**30, self.device)
        self.model = load_model(
            config.checkpoint,
            dtype=self.dtype,
            device=self.device,
            backend=self.backend,
            max_model_len=config.model.max_model_len,
            load_format=config.load.load_format,
            show_progress=config.load.use_tqdm_on_load and on_progress is None,
            seed=config.model.seed,
            packed=config.model.quantization != "none",
            quant=config.quant,
            build=None if config.pooling is None else pooling_builder(config),
            on_progress=on_progress,
            world=self.world,
            stage=self.stage,
            ep=self.ep,
            adapters=slots,
            tower_group=tower_group(config, self.world.tp),
            offload=self.offload,
            on_built=None if self.twins is None else self.twins.record,
        )
        if self.offload is not None:
            self._prefetch(self.offload)
        self.encoder = open_encoder(config, self.model, self.world.tp, self.device)
        if slots is not None:
            check_slots(slots, free_bytes(config.machine))
            slots.allocate()
        self.slots = slots
        if config.draft is not None and self.draft_facts is not None and self.stage.is_last:
            backend = self._backend(self.draft_facts)
            self.draft = load_draft(config, config.draft, backend, self.device, self.world)
            self.drafter = open_drafter(config, self.draft, self.model, backend, self.device)

    def _prefetch(self, offload: LayerOffload) -> None:
        """Install the hooks by which every step copies the offloaded layers to the device."""
        from quire.worker.cuda.layer_copies import CudaLayerCopies

        offload.place()
        if offload.layers:
            LayerPrefetch(self.model, offload.layers, CudaLayerCopies(offload.layers, self.device))
        if not offload.is_pinned:
            log.warning(
                "Steps run without CUDA graphs: the host memory of offloaded weights could not be pinned; "
                "check `ulimit -l`"
            )

    @property
    def modules(self) -> nn.ModuleList:
        return nn.ModuleList(model for model in (self.model, self.draft) if model is not None)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all weights on the device, with the buffers of offloaded layers."""
        parameters = {parameter.data_ptr(): parameter for parameter in self.modules.parameters()}
        if self.offload is None:
            return sum(parameter.nbytes for parameter in parameters.values())
        resident = (x.nbytes for x in parameters.values() if not self.offload.holds(x))
        return sum(resident) + self.offload.buffer_bytes

    def bind(self, num_blocks: int, num_rows: int | None = None, num_checkpoints: int = 0) -> int:
        """Allocate the cache: KV blocks, and for layers with SSM states one state per row (by default
        max_num_seqs rows) and per checkpoint. Return the number of bytes."""
        return bind(
            caching_layers(self.modules.modules()),
            self.layout,
            num_blocks=num_blocks,
            num_rows=self.config.scheduler.max_num_seqs if num_rows is None else num_rows,
            num_checkpoints=num_checkpoints,
            block_size=self.config.cache.block_size,
            cache_dtype=self.cache_dtype,
            device=self.device,
        )

    def checkpoints(self) -> StateCheckpoints:
        layers, num_rows = state_layers(self.model.modules()), self.config.scheduler.max_num_seqs
        return StateCheckpoints(layers, num_rows, self.layout.states_per_row)

    def cache_entries(self, checkpoints: StateCheckpoints | None) -> list[CacheEntries]:
        """Return the contents of the allocated cache as entries: its KV blocks, then its SSM state
        checkpoints, if there are any."""
        pages = cache_pages(caching_layers(self.modules.modules()))
        return [pages] if checkpoints is None else [pages, state_slots(checkpoints)]

    def block_copies(self, checkpoints: StateCheckpoints | None) -> list[BlockCopies]:
        """Return the objects that copy KV blocks, and SSM state checkpoints if there are any, between the
        device and the host."""
        kinds = self.cache_entries(checkpoints)
        if self.device.type == "cpu":
            return [CpuBlockCopies(entries) for entries in kinds]
        from quire.worker.cuda.block_copies import CudaBlockCopies

        return [CudaBlockCopies(entries, self.device) for entries in kinds]

    # ---- runners

    def open_runner(self, all_rows: Rows) -> Runner | StageRunner | PoolingRunner:
        config = self.config
        if config.pooling is not None:
            return self._pooler(config.pooling, all_rows)
        link = None
        if self.stage.count > 1:
            link = StageLink(self.world.pp, config.checkpoint.facts.hidden, self.dtype, self.device)
        model = self._on_device(self.model.logits, link)
        slots = all_rows.slots = model.adapters
        device = open_device(model, all_rows, self.device, config.speculation)
        if self.drafter is not None:
            spec, first = config.speculation, len(config.rank_facts.layers)
            is_ahead = not isinstance(device, CpuDevice)
            progress = None
            if not self.drafter.observes:
                progress = open_draft_progress(all_rows, self.layout, first, ahead=is_ahead)
            device.use_drafter(
                self.drafter,
                progress,
                config.scheduler.max_num_batched_tokens,
                probabilistic=spec is not None and spec.draft_sample_method == "probabilistic",
            )
        if link is not None and not link.is_last:
            return StageRunner(device=device, all_rows=all_rows, link=link)
        counts, vocab = None, config.checkpoint.facts.vocab
        if self.device.type == "cuda":
            max_extra_vocab = 0 if slots is None else slots.max_extra_vocab
            counts = Counts(config.scheduler.max_num_seqs, vocab + max_extra_vocab, self.device)
        mode, processors = config.model.logprobs_mode, open_processors(config, self.device, all_rows)
        returns_mask = config.extensions.return_sampling_mask
        sampler = Sampler(vocab, self.device, mode, device.sample, counts, processors, returns_mask)
        parts: list[StepFeature] = [PromptLogprobs(self.model.logits, all_rows, mode, slots)]
        if processors is not None:
            parts.append(processors)
        if isinstance(self.encoder, CrossEncoder):
            heads = alignment_heads(config)
            parts.append(Alignment(self.encoder.cross_cache, heads, all_rows, self.world.tp))
        if self._routes_group is not None:
            parts.append(ExpertsReadback())
        return Runner(device=device, all_rows=all_rows, sampler=sampler, parts=parts)

    @property
    def _routes_group(self) -> int | None:
        """Return the KV cache group with the slots that identify tokens, if requests return their experts.
        None otherwise, and on all ranks but the first, since all ranks choose the same experts."""
        is_wanted = self.config.extensions.enable_return_routed_experts and self.world.tp.rank == 0
        return self.layout.windows.index(None) if is_wanted else None

    def _pooler(self, pooling: PoolingFacts, all_rows: Rows) -> PoolingRunner:
        self.model.finalize()
        windows = None if self.config.checkpoint.facts.encoder else self.layout.windows
        model = self._on_device(self.model.vectors)
        return PoolingRunner(self.model, model, all_rows, pooling, self.device, windows)

    def _on_device(self, head: Callable[[Tensor], Tensor], link: StageLink | None = None) -> Model:
        return Model(
            forward=self.model,
            head=head,
            attention=self.backend,
            link=link,
            ep=self.ep,
            adapters=self.slots,
            encoder=self.encoder,
            bidirectional=self._bidirectional,
            causal_groups=self._causal_groups(),
            is_capturable=self.offload is None or self.offload.is_pinned,
            routes_group=self._routes_group,
        )


def open_device(
    model: Model, all_rows: Rows, device: torch.device, drafts: SpecFacts | None = None
) -> Device:
    """Build the device that runs a model; a CPU without native kernels samples in torch."""
    if device.type == "cpu":
        return CpuDevice(model, all_rows, None if native.library() is None else sample_on_host)
    from quire.worker.cuda.device import CudaDevice
    from quire.worker.cuda.mask_sampling import sample_tokens

    return CudaDevice(model, all_rows, sample_tokens, device, drafts)
