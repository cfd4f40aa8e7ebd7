"""Tests of gpt-oss with published MXFP4 experts against transformers with dequantized values."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from formats import E2M1, gpt_oss
from oracle import load_tiny, random_prompts, run_hf, run_paged

from quire.checkpoint.model import read_checkpoint
from quire.checkpoint.quant.schemes import Mxfp4
from quire.errors import ConfigError
from quire.kernels.cpu import native
from quire.kernels.reference.mxfp4 import in_halves, unpack
from quire.quant.experts import ExpertShape
from quire.quant.mxfp4 import Mxfp4Experts, Mxfp4Format
from quire.quant.unquantized import PlainFormat
from quire.quant.weight import LinearShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kernels", [True, False], ids=["native", "torch"])
def test_logits_match_the_dequantized_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: bool
) -> None:
    """Check interleaved gate and up, the order of nibbles and scales, and that experts stay packed."""
    if kernels and native.library() is None:
        pytest.skip("there are no native kernels here")
    if not kernels:
        without_kernels = SimpleNamespace(**vars(native) | {"serves": lambda *_: False})
        monkeypatch.setattr("quire.quant.mxfp4.native", without_kernels)
    path, hf_model = gpt_oss(tmp_path)
    model = load_tiny(path, quant=read_checkpoint(path).quant)
    experts = [module for module in model.modules() if isinstance(module, Mxfp4Experts)]
    packed = sum(p.nbytes for expert in experts for p in expert.parameters() if p.dtype == torch.uint8)
    numbers = 3 * 64 * 96 * len(experts) * experts[0].shape.experts
    assert packed <= numbers * 17 / 32 + 64 * 2 * len(experts)
    prompts = random_prompts(17, 10)
    for actual, ids in zip(run_paged(model, prompts, [[9, 5], [1, 4], [7, 1]]), prompts, strict=True):
        expected = run_hf(hf_model, ids)
        assert (actual - expected).norm() / expected.norm() < 1e-2


def test_unsupported_dtype_uses_torch() -> None:
    """Check float16 on a CPU, for which the kernels reject every call."""
    torch.manual_seed(0)
    experts = Mxfp4Experts(
        ExpertShape(2, 64, 32, "clamped_swiglu", False, torch.float16, torch.device("cpu"))
    )
    for part in experts.parts().values():
        part["_blocks"].tensor.random_(0, 256)
        part["_scales"].tensor.random_(119, 123)
    experts.finish()
    x, ids = torch.randn(3, 64, dtype=torch.float16), torch.zeros(3, 1, dtype=torch.int32)
    assert experts(x, ids, torch.ones(3, 1)).isfinite().all()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
def test_mxfp4_experts_on_the_gpu() -> None:
    shape = ExpertShape(4, 64, 96, "clamped_swiglu", True, torch.bfloat16, DEVICE)
    experts = Mxfp4Experts(shape)
    torch.manual_seed(0)
    for part in experts.parts().values():
        part["_blocks"].tensor.random_(0, 256)
        part["_scales"].tensor.random_(119, 123)
    for piece in experts.bias_parts().values():
        piece.tensor.normal_()
    on_cpu = Mxfp4Experts(ExpertShape(4, 64, 96, "clamped_swiglu", True, torch.float32, torch.device("cpu")))
    on_cpu.load_state_dict({name: tensor.cpu() for name, tensor in experts.state_dict().items()})
    x, ids = torch.randn(9, 64), torch.rand(9, 4).topk(2).indices.to(torch.int32)
    weights = torch.rand(9, 2)
    experts.finish()
    on_cpu.finish()
    actual = experts(x.to(DEVICE, torch.bfloat16), ids.to(DEVICE), weights.to(DEVICE)).float().cpu()
    expected = on_cpu(x, ids, weights)
    assert (actual - expected).norm() / expected.norm() < 1e-2


def test_values_of_every_code() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    actual = unpack(in_halves(blocks), torch.tensor([[127 + i % 3 for i in range(16)]], dtype=torch.uint8))
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2).long()
    expected = E2M1[codes] * torch.tensor([2.0 ** (i % 3) for i in range(16)])[:, None]
    assert torch.equal(actual, expected.flatten(1))


def test_unsupported_settings_are_rejected_before_loading(tmp_path: Path) -> None:
    made, cpu = Mxfp4Format(Mxfp4(), PlainFormat()), torch.device("cpu")
    with pytest.raises(ConfigError, match="mxfp4 is for experts"):
        made.linear(("q_proj",), LinearShape(64, (64,), False, torch.float32, cpu))
    shape = ExpertShape(4, 64, 48, "silu", True, torch.float32, cpu)
    with pytest.raises(ConfigError, match="multiples of 32, not intermediate 48"):
        made.experts(("gate_up", "down"), shape)
    with pytest.raises(ConfigError, match="gate and up together"):
        made.experts(("gate", "up", "down"), shape)
