"""Properties of the machine. `system.platform.detect()` reads them; `resolve()` uses them."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Machine:
    """The device that an engine runs on, and its CPU cores."""

    device: str
    """`cpu` or `cuda`."""
    name: str
    """Product name of the device."""
    num_devices: int
    total_bytes: int
    """Bytes of memory of one device; for `cpu`, of the memory that this process may use (cgroup limits
    respected)."""
    free_bytes: int
    num_cores: int
    """CPU cores available to this process (affinity and cgroup quota respected)."""
    capability: tuple[int, int] = (0, 0)
    """CUDA compute capability; (0, 0) on a CPU."""
    bf16: bool = False
    """Whether bfloat16 arithmetic is native; without it bf16 checkpoints run as float32."""
    fp16: bool = False
    """Whether float16 arithmetic is native and fast."""
