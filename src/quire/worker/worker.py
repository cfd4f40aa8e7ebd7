"""The worker: one device's model, cache and runner, put together once."""

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from quire.attention.backend import AttentionSpec, choose
from quire.capacity import CacheRoom, CacheSize, activation_bytes, human, kv_bytes_per_block, size_cache
from quire.config.engine import EngineConfig
from quire.data.plan import StepPlan, StepResult
from quire.errors import EngineDead
from quire.layers.attention import attention_layers
from quire.loader import load_model
from quire.logs import get_logger
from quire.sampling.rows import SamplingRows
from quire.sampling.sampler import Sampler
from quire.worker.memory import cache_room
from quire.worker.parts import Part, PromptLogprobs
from quire.worker.runner import Runner
from quire.worker.slots import Slots

log = get_logger(__name__)


class Worker:
    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.device = torch.device(config.machine.device)
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self._runner: Runner | None = None

    def start(self) -> CacheSize:
        """Load the weights, give the cache what memory is left, and be ready to run."""
        config, facts = self.config, self.config.checkpoint.facts
        asked = config.attention.attention_backend
        spec = AttentionSpec(facts.heads, facts.kv_heads, facts.head_dim, self.dtype)
        backend = choose(None if asked == "AUTO" else asked, spec, config.machine)
        started = time.monotonic()
        model = load_model(
            config.checkpoint,
            dtype=self.dtype,
            device=self.device,
            backend=backend,
            max_model_len=config.model.max_model_len,
            load_format=config.load.load_format,
            show_progress=config.load.use_tqdm_on_load,
            seed=config.model.seed,
            packed=config.model.quantization != "none",
        )
        weights = sum(
            parameter.nbytes for parameter in {p.data_ptr(): p for p in model.parameters()}.values()
        )
        log.info("Loaded %s of weights in %.2f s", human(weights), time.monotonic() - started)
        size = self._make_cache(model, weights)
        sampling = SamplingRows(config.scheduler.max_num_seqs, facts.vocab, self.device)
        slots = Slots(
            max_rows=config.scheduler.max_num_seqs,
            max_len=size.max_model_len,
            block_size=config.cache.block_size,
            sampling=sampling,
        )
        head: Callable[[Tensor], Tensor] = cast(Any, model).logits
        parts: list[Part] = [PromptLogprobs(head, slots, config.model.logprobs_mode)]
        self._runner = Runner(
            forward=model,
            head=head,
            attention=backend,
            slots=slots,
            sampler=Sampler(facts.vocab, self.device, config.model.logprobs_mode),
            parts=parts,
            device=self.device,
        )
        return size

    def run(self, plan: StepPlan) -> StepResult:
        assert self._runner is not None, "start() comes first"
        try:
            return self._runner.run(plan)
        except torch.AcceleratorError as error:  # the device's state is lost, and with it every request
            raise EngineDead(f"the device failed: {error}") from error

    def _make_cache(self, model: nn.Module, weights: int) -> CacheSize:
        config, facts = self.config, self.config.checkpoint.facts
        block_size = config.cache.block_size
        activations = activation_bytes(
            facts,
            config.model.dtype,
            num_tokens=config.scheduler.max_num_batched_tokens,
            num_seqs=config.scheduler.max_num_seqs,
        )
        room: CacheRoom = cache_room(config.cache, config.machine, other_bytes=weights + activations)
        size = size_cache(
            facts,
            kv_dtype=config.model.dtype,
            block_size=block_size,
            max_model_len=config.model.max_model_len,
            auto_fit=config.model.auto_fit,
            room=room,
            useful_tokens=config.scheduler.max_num_seqs * config.model.max_model_len,
        )
        if size.max_model_len < config.model.max_model_len:
            log.info(
                "Auto-fit max_model_len: reduced from %d to %d to fit the KV cache",
                config.model.max_model_len,
                size.max_model_len,
            )
        shape = (size.num_blocks, block_size, facts.kv_heads, facts.head_dim)
        for layer in attention_layers(model):
            layer.bind(*(torch.empty(shape, dtype=self.dtype, device=self.device) for _ in range(2)))
        num_tokens = (size.num_blocks - 1) * block_size
        log.info(
            "KV cache: %s, %d tokens in %d blocks; %.2f requests of %d tokens fit at once",
            human(size.num_blocks * kv_bytes_per_block(facts, config.model.dtype, block_size)),
            num_tokens,
            size.num_blocks - 1,
            num_tokens / size.max_model_len,
            size.max_model_len,
        )
        return size
