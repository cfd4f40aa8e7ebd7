"""LatencyTarget: the times in which a request should get its tokens."""

import msgspec


class LatencyTarget(msgspec.Struct, frozen=True):
    """Targets of a request in seconds; 0 stands for none."""

    ttft_s: float = 0.0
    """Target of the time to the first token."""
    itl_s: float = 0.0
    """Target of the time between two tokens of the output."""

    @classmethod
    def of(cls, ttft_ms: float | None, itl_ms: float | None) -> "LatencyTarget":
        """Return the targets from settings in milliseconds, of which each may be None."""
        return cls((ttft_ms or 0.0) / 1e3, (itl_ms or 0.0) / 1e3)

    def __bool__(self) -> bool:
        return bool(self.ttft_s or self.itl_s)

    def relaxed(self, ttft_ms: float | None, itl_ms: float | None) -> "LatencyTarget":
        """Return the targets, extended to those of a client (milliseconds) where they are longer. Shorter
        ones have no effect, since they would delay other requests."""
        return LatencyTarget(_later(self.ttft_s, ttft_ms), _later(self.itl_s, itl_ms))


NO_TARGET = LatencyTarget()


def _later(seconds: float, milliseconds: float | None) -> float:
    return max(seconds, (milliseconds or 0.0) / 1e3) if seconds else 0.0
