"""Tests of a torch that is imported without its kernels for meta tensors in Python."""

import subprocess
import sys

import pytest

LEAN = """
import sys
from quire.system.torch_import import complete_torch, import_torch
import_torch()
import torch
assert "torch._meta_registrations" not in sys.modules
"""
IS_COMPLETE = """
assert "torch._meta_registrations" in sys.modules
q = torch.ones(1, 2, 3, 4, device="meta")
assert torch.nn.functional.scaled_dot_product_attention(q, q, q).shape == q.shape
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "code",
    [
        "complete_torch()",
        "import torch._refs, torch._refs.fft; assert torch._refs.__spec__.origin.endswith('.py')",
        "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2, 2]",
        "from torch._meta_registrations import meta_index_Tensor",
    ],
    ids=["complete_torch", "module that is imported by them", "compile", "module itself"],
)
def test_torch_is_completed_by_what_needs_it(code: str) -> None:
    """Catches an import in another order than torch's, which raises errors of circular imports or of
    duplicate registrations."""
    run(LEAN + code + IS_COMPLETE)


def test_weights_without_memory_need_no_more() -> None:
    """Check what the engine does with meta tensors while torch is not complete."""
    run(LEAN + "x = torch.ones(4, 6)[:, :3]\nx.detach().to('meta').copy_(x).narrow(0, 1, 2).view(2, 3).t()\n")


def test_engine_core_on_a_cpu_needs_no_more() -> None:
    run(
        "from quire.entrypoints.early_core import _import_engine\n_import_engine()\n"
        "import sys\nassert 'torch' in sys.modules and 'torch._meta_registrations' not in sys.modules"
    )
