"""A CUDA-like device on the CPU: its bookkeeping, with stand-ins for captured graphs."""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention.batch import Batch
from quire.attention.torch_sdpa import TorchSDPA
from quire.attention.triton_attn import TritonAttention
from quire.config.engine import EngineConfig
from quire.sampling.sampler import Sampler
from quire.worker.cuda.device import CudaDevice
from quire.worker.cuda.draft_graphs import DraftGraphs
from quire.worker.device import ForwardResult, Model
from quire.worker.memory import Needs
from quire.worker.pipeline import IntermediateTensors
from quire.worker.rows import Rows

NEEDS_KERNELS = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="the kernels are for a GPU here"
)


class OnCPU(CudaDevice):
    """Runs everything except the graphs."""

    def needs(self, config: EngineConfig, weights: int, sampler: Sampler, bound: int = 0) -> Needs:
        return Needs(weights, 1 << 20)

    def warm_up(self, config: EngineConfig) -> None: ...


class Replayed:
    """A stand-in for a captured graph: it computes again into the tensors of the first run."""

    capturing: list["Replayed"] = []

    def replay(self) -> None:
        for old, new in zip(self.done, _flat(self.again()), strict=True):
            old.copy_(new)

    def remember(
        self, recompute: Callable[[], Any], done: ForwardResult | IntermediateTensors | Tensor
    ) -> None:
        self.again, self.done = recompute, _flat(done)


def _flat(done: ForwardResult | IntermediateTensors | Tensor) -> list[Tensor]:
    if isinstance(done, Tensor):
        return [done]
    if not isinstance(done, ForwardResult):
        return [*done]
    assert done.token_ids is not None and done.sampling is not None
    actual = [] if done.verified is None else [done.verified]
    routes = () if done.routes is None else (done.routes.slots, *done.routes.experts)
    states = done.hidden, *done.aux_hidden_states
    return [*states, done.logits, done.token_ids, *done.sampling, *actual, *routes]


@contextmanager
def captured(graph: Replayed, pool: object, capture_error_mode: str) -> Iterator[None]:
    assert capture_error_mode == "thread_local"  # other threads pin memory meanwhile
    Replayed.capturing.append(graph)
    yield
    Replayed.capturing.pop()


class WithGraphs(OnCPU):
    captures_prompts = False

    def compute(self, batch: Batch, inputs: dict[str, Tensor]) -> ForwardResult | IntermediateTensors:
        compute = functools.partial(super().compute, batch, inputs)
        done = compute()
        if Replayed.capturing:
            Replayed.capturing[-1].remember(compute, done)
        return done

    def _verify(self, done: ForwardResult) -> Tensor:
        verify = functools.partial(super()._verify, done)
        actual = verify()
        if Replayed.capturing:
            Replayed.capturing[-1].remember(verify, actual)
        return actual

    @torch.inference_mode()
    def warm_up(self, config: EngineConfig) -> None:
        self.graphs.capture(
            self.compute,
            config.scheduler.max_num_seqs,
            self.model.lora_variants,
            seconds=600,
            mixed_shapes=[(min(16, config.scheduler.max_num_seqs * self._max_samples_per_row), 32)]
            * self.captures_prompts,
            verify=self._verify_to_capture,
        )
        if self._draft_graphs is not None:
            self._capture_draft_graphs(self._draft_graphs, config.scheduler.max_num_seqs)


class WithPrompts(WithGraphs):
    captures_prompts = True


def _remembered(compute: Callable[..., None]) -> Callable[..., None]:
    """Return the function with outputs copied into the tensors of its first call."""

    def computed(*args: Any) -> None:
        compute(*args)
        if Replayed.capturing:
            Replayed.capturing[-1].remember(lambda: (compute(*args), torch.empty(0))[1], torch.empty(0))

    return computed


def use_fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftGraphs, "compute", _remembered(DraftGraphs.compute))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(torch.cuda, "graph", captured)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("quire.worker.loaded_model.choose", lambda *args: TritonAttention())


def use_fake_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the next engines run ahead of the host in graphs, with torch attention and greedy sampling."""

    run_model = Model.hidden

    def hidden(self: Model, batch: Batch) -> Any:
        for group in batch.groups:
            # a GPU's attention kernel would read them from there
            group.seq_lens_host = batch.seq_lens.numpy().copy()
        return run_model(self, batch)

    def open_device(model: Model, all_rows: Rows, device: torch.device, drafts: Any) -> WithGraphs:
        return WithGraphs(model, all_rows, lambda logits, *_: logits.argmax(-1), device, drafts)

    use_fake_graphs(monkeypatch)
    monkeypatch.setattr("quire.worker.loaded_model.choose", lambda *args: TorchSDPA())
    monkeypatch.setattr(Model, "hidden", hidden)
    monkeypatch.setattr("quire.worker.loaded_model.open_device", open_device)
