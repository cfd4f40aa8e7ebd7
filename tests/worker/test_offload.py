"""Tests of offloaded layers: equal logits, the memory that they take, and the order of copies and uses."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from formats import SIZES, STORED
from oracle import load_tiny, make_tiny, run_paged
from torch import Tensor, nn

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant import ONLINE
from quire.errors import ConfigError
from quire.kernels import ops
from quire.kernels.reference import ssm
from quire.loader.offload import LayerOffload, OffloadedLayer
from quire.worker.prefetch import LayerPrefetch
from quire.worker.sleep import OffloadedWeights

PROMPTS, STEPS = [[5, 9, 30, 31, 32, 2, 8], [7, 8, 11]], [[4, 0], [2, 3], [1, 0]]
CPU = torch.device("cpu")


class PlainCopies:
    """Copies at once, since a CPU has no streams."""

    def __init__(self, layers: list[OffloadedLayer]) -> None:
        self.layers = layers
        self.num_copies = 0

    def fork(self) -> None: ...

    def copy(self, number: int) -> None:
        self.layers[number].buffer.copy_(self.layers[number].host)
        self.num_copies += 1

    def wait(self, number: int) -> None: ...

    def join(self) -> None: ...


@pytest.fixture(autouse=True)
def _torch_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use torch kernels, which read tensors: those in C hold the addresses of weights."""
    monkeypatch.setattr("quire.kernels.cpu.native.library", lambda: None)
    for choose in (ops.choose, ssm.choose):
        choose.cache_clear()
    yield
    for choose in (ops.choose, ssm.choose):
        choose.cache_clear()


def offloaded(path: Path, wanted_bytes: float, **options: Any) -> tuple[Any, LayerOffload, PlainCopies]:
    offload = LayerOffload(wanted_bytes, CPU, small=1024, initial=1024)
    model = load_tiny(path, load_format="dummy", offload=offload, **options)
    offload.place()
    copies = PlainCopies(offload.layers)
    LayerPrefetch(model, offload.layers, copies)
    return model, offload, copies


def bytes_of(model: nn.Module) -> int:
    """Return the memory of all parameters, counted by storage."""
    storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


def assert_same_logits(model: Any, expected: list[Tensor]) -> None:
    for actual, row in zip(run_paged(model, PROMPTS, STEPS), expected, strict=True):
        assert torch.equal(actual, row)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"num_hidden_layers": 5, "tie_word_embeddings": True}),
        ("deepseek_v3", {"num_hidden_layers": 3}),
        ("jamba", {}),  # layers of different sizes
        ("zamba2", {}),  # blocks that several layers share
    ],
)
def test_offloaded_layers_compute_the_same(family: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    path, _ = make_tiny(family, tmp_path, **overrides)
    whole = load_tiny(path, load_format="dummy")
    expected, num_bytes = run_paged(whole, PROMPTS, STEPS), bytes_of(whole)
    model, offload, copies = offloaded(path, float("inf"))
    assert len(offload.layers) == len(model.layers) and len(offload.buffers) == 2
    assert_same_logits(model, expected)
    assert copies.num_copies == len(STEPS) * len(offload.layers)
    resident = bytes_of(model) - offload.buffer_bytes
    padding = 256 * sum(1 for _ in model.parameters())
    assert num_bytes <= resident + offload.host_bytes < num_bytes + padding
    assert all(offload.holds(layer.buffer) for layer in offload.layers)
    assert not any(offload.holds(parameter) for parameter in model.embed.parameters())


@pytest.mark.parametrize("name", ["online fp8", "online int8", "fp8 block", "int8 channel", "awq", "gptq"])
def test_quantized_layers_compute_the_same(name: str, tmp_path: Path) -> None:
    path, _ = make_tiny("qwen3_moe", tmp_path, **SIZES["qwen3_moe"], num_hidden_layers=3)
    quant = ONLINE.get(name.removeprefix("online "))
    if quant is None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": STORED[name].config}))
        quant = read_checkpoint(path).quant
    expected = run_paged(load_tiny(path, load_format="dummy", quant=quant), PROMPTS, STEPS)
    model, offload, _ = offloaded(path, float("inf"), quant=quant)
    assert len(offload.layers) == 3
    assert_same_logits(model, expected)


def test_some_layers_stay_on_the_device(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path, num_hidden_layers=8)
    expected = run_paged(load_tiny(path, load_format="dummy"), PROMPTS, STEPS)
    _, whole, _ = offloaded(path, float("inf"))
    model, offload, _ = offloaded(path, whole.host_bytes / 2)
    assert [layer.module for layer in offload.layers] == [model.layers[number] for number in (1, 3, 5, 7)]
    assert offload.host_bytes == whole.host_bytes // 2
    assert_same_logits(model, expected)


def test_layer_takes_memory_only_while_it_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_tiny("llama", tmp_path, num_hidden_layers=8)
    live: list[int] = []
    finish = LayerOffload.finish

    def record(offload: LayerOffload, module: Any) -> None:
        live.append(sum(bytes_of(layer) for layer in offload._built))
        finish(offload, module)

    monkeypatch.setattr(LayerOffload, "finish", record)
    model, offload, _ = offloaded(path, float("inf"))
    layer_bytes = max(len(layer.host) for layer in offload.layers)
    small = sum(p.nbytes for p in model.layers.parameters() if p.nbytes < 1024)
    assert layer_bytes <= max(live) <= layer_bytes + small
    assert sum(len(layer.host) for layer in offload.layers) > 7 * layer_bytes


def test_offloaded_model_sleeps_and_wakes_up(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path, num_hidden_layers=4)
    model, offload, _ = offloaded(path, float("inf"))
    expected = run_paged(model, PROMPTS, STEPS)
    asleep = OffloadedWeights(model)
    assert bytes_of(model) == 0 and [buffer.untyped_storage().nbytes() for buffer in offload.buffers] == [
        0,
        0,
    ]
    asleep.restore()
    assert_same_logits(model, expected)


def test_model_with_two_layers_is_not_offloaded(tmp_path: Path) -> None:
    path, _ = make_tiny("llama", tmp_path)
    expected = run_paged(load_tiny(path, load_format="dummy"), PROMPTS, STEPS)
    model, offload, copies = offloaded(path, float("inf"))
    assert offload.layers == [] and offload.buffer_bytes == 0
    assert_same_logits(model, expected)


def test_too_little_host_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = make_tiny("llama", tmp_path, num_hidden_layers=4)
    monkeypatch.setattr("psutil.virtual_memory", lambda: type("Memory", (), {"available": 1000}))
    with pytest.raises(ConfigError, match=r"cpu_offload_gb=inf needs .* for 4 layers, and .* are free"):
        offloaded(path, float("inf"))


# ---- the order of copies and uses


class TwoStreams:
    """Streams as logical clocks: an operation may run at any time that the waits before it allow."""

    def __init__(self, num_buffers: int = 2) -> None:
        self.num_buffers = num_buffers
        self.now = 0
        """Number of layers computed."""
        self.copies_after = 0
        """Copies from now on run after this many layers."""
        self.copied = set[int]()
        """Layers that the computation has waited for."""
        self.content: dict[int, int] = {}
        """The last layer copied to each buffer."""
        self.last_use: dict[int, int] = {}
        """The value of `now` at the end of the last use of each buffer."""
        self.joined = 0

    def fork(self) -> None:
        self.copies_after = self.now

    def copy(self, number: int) -> None:
        buffer = number % self.num_buffers
        assert self.last_use.get(buffer, 0) <= self.copies_after, f"{number} may overwrite a layer in use"
        self.copied.discard(number)
        self.content[buffer] = number

    def wait(self, number: int) -> None:
        assert self.content[number % self.num_buffers] == number
        self.copied.add(number)

    def use(self, number: int) -> None:
        buffer = number % self.num_buffers
        assert number in self.copied and self.content[buffer] == number, f"{number} is not there yet"
        self.now += 1
        self.last_use[buffer] = self.now

    def join(self) -> None:
        self.joined += 1


class Used(nn.Module):
    """A layer that records its use."""

    def __init__(self, streams: TwoStreams, number: int) -> None:
        super().__init__()
        self.streams, self.number, self.fails = streams, number, False

    def forward(self) -> None:
        if self.fails:
            raise RuntimeError("out of memory")
        self.streams.use(self.number)


class Stack(nn.Module):
    """Layers in sequence."""

    def __init__(self, layers: list[Used]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self) -> None:
        for layer in self.layers:
            layer()


def stack(num_layers: int) -> tuple[TwoStreams, Stack]:
    streams = TwoStreams()
    model = Stack([Used(streams, number) for number in range(num_layers)])
    nothing = torch.empty(0, dtype=torch.uint8)
    layers = [OffloadedLayer(layer, [], nothing) for layer in model.layers]
    LayerPrefetch(model, layers, streams)
    return streams, model


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 7])
def test_no_layer_is_overwritten_before_its_use(num_layers: int) -> None:
    streams, model = stack(num_layers)
    for step in range(1, 4):
        model()
        assert streams.now == step * num_layers and streams.joined == 0


def test_failed_step_waits_for_its_copies() -> None:
    streams, model = stack(5)
    model.layers[2].fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        model()
    assert streams.joined == 1 and streams.now == 2
    model.layers[2].fails = False
    model()
    assert streams.joined == 1 and streams.now == 7


def test_layers_run_in_order() -> None:
    _, model = stack(4)
    model.layers = model.layers[::-1]
    with pytest.raises(AssertionError, match="offloaded layer 3 runs in place of layer 0"):
        model()
