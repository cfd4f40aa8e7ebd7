"""Devices by name: memory and peak rates, as stated by their vendors."""

import re
from typing import NamedTuple

from quire.config.machine import GIB, Machine
from quire.errors import ConfigError, nearest

_PCIE_5 = 64e9


class Accelerator(NamedTuple):
    """One kind of GPU or other device. Rates are peaks of dense arithmetic, as stated by the vendor."""

    label: str
    total_bytes: int
    """Memory reported by the driver, which is less than advertised."""
    bytes_s: float
    """Memory bandwidth in bytes per second."""
    flops: float
    """Operations per second in bfloat16."""
    narrow_flops: float
    """Operations per second in fp8 or int8; those of bfloat16 if unsupported."""
    capability: tuple[int, int] = (9, 0)
    per_node: int = 8
    pcie_bytes_s: float = 32e9
    """Bytes per second to host memory, one way, as stated for PCIe 4.0 or 5.0 with 16 lanes."""
    served: bool = True
    """Whether Quire runs on this device; otherwise only its memory is planned."""

    def machine(self, count: int) -> Machine:
        """Return what `detect` would find on a machine with `count` of these devices."""
        return Machine(
            device="cuda",
            name=self.label,
            num_devices=count,
            total_bytes=self.total_bytes,
            free_bytes=self.total_bytes,
            num_cores=16,
            capability=self.capability,
            bf16=True,
            fp16=True,
        )


DEVICES = {
    "a100-80": Accelerator("A100 80GB", int(79.15 * GIB), 2.039e12, 312e12, 312e12, (8, 0)),
    "h100": Accelerator("H100 SXM", int(79.65 * GIB), 3.35e12, 989e12, 1979e12, pcie_bytes_s=_PCIE_5),
    "h200": Accelerator("H200 SXM", int(139.8 * GIB), 4.8e12, 989e12, 1979e12, pcie_bytes_s=_PCIE_5),
    "b200": Accelerator("B200", int(178.4 * GIB), 8.0e12, 2250e12, 4500e12, (10, 0), pcie_bytes_s=_PCIE_5),
    "a100-40": Accelerator("A100 40GB", int(39.39 * GIB), 1.555e12, 312e12, 312e12, (8, 0)),
    "a10g": Accelerator("A10G", int(22.06 * GIB), 0.600e12, 70e12, 140e12, (8, 6)),
    "l4": Accelerator("L4", int(22.03 * GIB), 0.300e12, 121e12, 242e12, (8, 9)),
    "l40s": Accelerator("L40S", int(44.42 * GIB), 0.864e12, 362e12, 733e12, (8, 9)),
    "mi300x": Accelerator(
        *("MI300X", int(191.7 * GIB), 5.3e12, 1307e12, 2615e12), pcie_bytes_s=_PCIE_5, served=False
    ),
    "trainium2": Accelerator(
        *("Trainium2", int(95.0 * GIB), 2.9e12, 667e12, 1299e12), per_node=16, served=False
    ),
}
INSTANCES: dict[str, tuple[str, int]] = {
    # AWS
    **{f"g5.{size}": ("a10g", count) for size, count in (("xlarge", 1), ("12xlarge", 4), ("48xlarge", 8))},
    **{f"g6.{size}": ("l4", count) for size, count in (("xlarge", 1), ("12xlarge", 4), ("48xlarge", 8))},
    **{f"g6e.{size}": ("l40s", count) for size, count in (("xlarge", 1), ("12xlarge", 4), ("48xlarge", 8))},
    "p4d.24xlarge": ("a100-40", 8),
    "p4de.24xlarge": ("a100-80", 8),
    "p5.4xlarge": ("h100", 1),
    "p5.48xlarge": ("h100", 8),
    "p5e.48xlarge": ("h200", 8),
    "p5en.48xlarge": ("h200", 8),
    "p6-b200.48xlarge": ("b200", 8),
    "trn2.48xlarge": ("trainium2", 16),
    # Google Cloud
    **{f"a2-highgpu-{count}g": ("a100-40", count) for count in (1, 2, 4, 8)},
    **{f"a2-ultragpu-{count}g": ("a100-80", count) for count in (1, 2, 4, 8)},
    **{f"a3-highgpu-{count}g": ("h100", count) for count in (1, 2, 4, 8)},
    "a3-megagpu-8g": ("h100", 8),
    "a3-ultragpu-8g": ("h200", 8),
    "a4-highgpu-8g": ("b200", 8),
    **{f"g2-standard-{cores}": ("l4", count) for cores, count in ((12, 1), (24, 2), (48, 4), (96, 8))},
    # Azure
    "standard_nc24ads_a100_v4": ("a100-80", 1),
    "standard_nd96amsr_a100_v4": ("a100-80", 8),
    "standard_nd96isr_h100_v5": ("h100", 8),
    "standard_nd96isr_h200_v5": ("h200", 8),
}
"""Cloud instances by name: their kind of GPU in `DEVICES`, and the number of GPUs."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", re.IGNORECASE)


def device(name: str) -> Accelerator:
    """Return a device by its name or by the name of a cloud instance. A number is a device with that
    memory in GiB and the rates of an H100."""
    kind, per_node = INSTANCES.get(name.lower(), ("", 0))
    if kind:
        return DEVICES[kind]._replace(per_node=per_node)
    known_device = DEVICES.get(name.lower())
    if known_device is not None:
        return known_device
    size = _SIZE.fullmatch(name)
    if size is None or float(size[1]) <= 0:
        known = ", ".join(DEVICES)
        close = nearest(name.lower(), [*DEVICES, *INSTANCES])
        raise ConfigError(
            f"--gpu {name!r} is unknown: use {known}, a cloud instance, or the "
            f"GiB of its memory, such as --gpu 24{close}"
        )
    return DEVICES["h100"]._replace(label=f"{size[1]} GiB", total_bytes=int(float(size[1]) * GIB))


def count_of_instance(name: str) -> int | None:
    """Return the number of GPUs of a cloud instance; None for other names."""
    return INSTANCES[name.lower()][1] if name.lower() in INSTANCES else None
