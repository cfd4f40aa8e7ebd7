"""Devices by name: memory and peak rates, as stated by their vendors."""

import re
from typing import NamedTuple

from quire.config.machine import Machine
from quire.errors import ConfigError, nearest

_GIB = 1 << 30


class Accelerator(NamedTuple):
    """One accelerator. Rates are peaks of dense arithmetic."""

    label: str
    total_bytes: int
    """Memory reported by the driver, which is less than advertised."""
    bytes_s: float
    """Memory bandwidth."""
    flops: float
    """In bfloat16."""
    narrow_flops: float
    """In fp8 or int8; equal to bfloat16 if unsupported."""
    link_bytes_s: float
    """Bandwidth to other devices in the same machine, one way."""
    capability: tuple[int, int] = (9, 0)
    per_node: int = 8

    def machine(self, count: int) -> Machine:
        """Return the machine that `resolve()` would detect there."""
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
    "a100-80": Accelerator("A100 80GB", int(79.15 * _GIB), 2.039e12, 312e12, 312e12, 300e9, (8, 0)),
    "h100": Accelerator("H100 SXM", int(79.65 * _GIB), 3.35e12, 989e12, 1979e12, 450e9),
    "h200": Accelerator("H200 SXM", int(139.8 * _GIB), 4.8e12, 989e12, 1979e12, 450e9),
    "b200": Accelerator("B200", int(178.4 * _GIB), 8.0e12, 2250e12, 4500e12, 900e9, (10, 0)),
    "l4": Accelerator("L4", int(22.03 * _GIB), 0.300e12, 121e12, 242e12, 32e9, (8, 9)),
    "l40s": Accelerator("L40S", int(44.42 * _GIB), 0.864e12, 362e12, 733e12, 32e9, (8, 9)),
    "mi300x": Accelerator("MI300X", int(191.7 * _GIB), 5.3e12, 1307e12, 2615e12, 448e9),
    "trainium2": Accelerator("Trainium2", int(95.0 * _GIB), 2.9e12, 667e12, 1299e12, 512e9, per_node=16),
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)?", re.IGNORECASE)


def device(name: str) -> Accelerator:
    """Return a device by name or by its GiB; the latter has the rates of an H100."""
    known_device = DEVICES.get(name.lower())
    if known_device is not None:
        return known_device
    size = _SIZE.fullmatch(name)
    if size is None or float(size[1]) <= 0:
        known = ", ".join(DEVICES)
        raise ConfigError(f"--gpu {name!r} is unknown: use {known} or its GiB{nearest(name, DEVICES)}")
    return DEVICES["h100"]._replace(label=f"{size[1]} GiB", total_bytes=int(float(size[1]) * _GIB))
