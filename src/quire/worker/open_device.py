"""open_device: the CPU or CUDA device that runs the steps of a worker."""

import torch

from quire.config.speculation import SpecFacts
from quire.kernels.cpu import native
from quire.worker.cpu import CpuDevice
from quire.worker.cpu import draw as draw_on_host
from quire.worker.device import Device, Model
from quire.worker.rows import Rows


def open_device(
    model: Model, all_rows: Rows, device: torch.device, drafts: SpecFacts | None = None
) -> Device:
    """Return the device for a model; without native kernels, the CPU samples in torch."""
    if device.type == "cpu":
        return CpuDevice(model, all_rows, None if native.library() is None else draw_on_host)
    from quire.worker.cuda.device import CudaDevice
    from quire.worker.cuda.mask_sampling import draw

    return CudaDevice(model, all_rows, draw, device, drafts)
