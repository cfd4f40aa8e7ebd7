"""Choosing a backend: the first that fits, or the named one, or a reason."""

from dataclasses import replace

import pytest
import torch

from quire.attention import backend
from quire.attention.backend import AttentionSpec, choose
from quire.attention.torch_sdpa import TorchSDPA
from quire.config.machine import Machine
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.registry import LazyTable

MACHINE = Machine(device="cpu", name="a CPU", num_devices=1, total_bytes=1, free_bytes=1, num_cores=1)
SPEC = AttentionSpec(4, 2, 16, torch.float32)


class Picky(TorchSDPA):
    name = "PICKY"

    def fits(self, spec: AttentionSpec, machine: Machine) -> str | None:
        return None if machine.device == "cuda" else f"needs CUDA, this is {machine.device}"


@pytest.fixture
def with_picky(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"PICKY": f"{__name__}:Picky", "TORCH_SDPA": backend.BACKENDS.entries["TORCH_SDPA"]}
    monkeypatch.setattr(backend, "BACKENDS", LazyTable("attention backend", entries))


@pytest.mark.usefixtures("with_picky")
def test_the_first_that_fits_is_taken() -> None:
    assert choose(None, SPEC, MACHINE).name == "TORCH_SDPA"


@pytest.mark.usefixtures("with_picky")
def test_a_named_backend_that_does_not_fit_is_an_error_with_its_reason() -> None:
    """A silent fall back to another backend than the one asked for."""
    with pytest.raises(ConfigError, match="PICKY: needs CUDA, this is cpu"):
        choose("PICKY", SPEC, MACHINE)


def test_an_unknown_name_lists_the_known() -> None:
    with pytest.raises(ConfigError, match="unknown attention backend 'FLASH'; known: .*TORCH_SDPA"):
        choose("flash", SPEC, MACHINE)


def test_the_native_backend_comes_first_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """And gives way where it was not compiled, on other devices, and for shapes that it cannot do."""
    monkeypatch.setattr(native, "library", lambda: object())
    assert choose(None, SPEC, MACHINE).name == "CPU_ATTN"
    for spec, machine in [
        (SPEC, replace(MACHINE, device="cuda")),
        (replace(SPEC, head_dim=20), MACHINE),
        (replace(SPEC, dtype=torch.float16), MACHINE),
    ]:
        assert choose(None, spec, machine).name == "TORCH_SDPA"
    monkeypatch.setattr(native, "library", lambda: None)
    assert choose(None, SPEC, MACHINE).name == "TORCH_SDPA"
    with pytest.raises(ConfigError, match="CPU_ATTN: the native kernels are not available; omit it"):
        choose("cpu_attn", SPEC, MACHINE)


def test_every_backend_of_the_table_can_be_made() -> None:
    """A name that leads to no class, or to one that calls itself otherwise."""
    assert [backend.BACKENDS[name]().name for name in backend.BACKENDS] == list(backend.BACKENDS)


def test_on_a_gpu_our_own_kernels_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(MACHINE, device="cuda", capability=(9, 0))
    monkeypatch.setattr("quire.attention.triton_attn.find_spec", lambda name: object())
    assert choose(None, SPEC, gpu).name == "TRITON_ATTN"
    monkeypatch.setattr("quire.attention.triton_attn.find_spec", lambda name: None)
    assert choose(None, SPEC, gpu).name == "TORCH_SDPA"


def test_names_are_taken_in_any_case() -> None:
    assert choose("torch_sdpa", SPEC, MACHINE).name == "TORCH_SDPA"


def test_no_fit_at_all_gives_every_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "BACKENDS", LazyTable("attention backend", {"PICKY": f"{__name__}:Picky"}))
    with pytest.raises(ConfigError, match="no attention backend fits .*PICKY: needs CUDA"):
        choose(None, SPEC, MACHINE)
