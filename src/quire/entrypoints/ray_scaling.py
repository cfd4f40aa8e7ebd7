"""Autoscaling policy of a fleet: waiting requests and KV cache usage decide on the number of replicas."""

from collections.abc import Mapping
from math import ceil
from typing import Any

TARGET_USE = 0.8
"""Share of its KV cache, and of its max_num_seqs, that a replica uses in a fleet of the right size."""


def replicas_for(
    *, current: int, running: float, waiting: float, kv_usage: float, max_num_seqs: float
) -> int:
    """Return the number of replicas for a load. `running` and `waiting` requests and `kv_usage` are sums over
    the `current` replicas, of which each runs `max_num_seqs` requests at most.

    Waiting requests mean that the replicas cannot run more than they do now, whatever limits them.
    """
    needed = max(kv_usage / TARGET_USE, running / (TARGET_USE * max_num_seqs))
    if waiting:
        needed = max(needed, current * (running + waiting) / max(running, 1.0))
    return max(ceil(needed - 1e-9), 1)


def scale(context: Any) -> tuple[int, dict[str, Any]]:
    """Return the wanted number of replicas, computed from the last load report of each replica, and an empty
    state. `context` is that of Ray Serve's autoscaling policies."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    replicas = metrics.get("max_num_seqs", {})
    if not replicas:  # no replica has reported yet
        return context.target_num_replicas, {}

    def total(name: str) -> float:
        return sum(metrics.get(name, {}).values())

    count = replicas_for(
        current=len(replicas),
        running=total("num_running"),
        waiting=total("num_waiting"),
        kv_usage=total("kv_usage"),
        max_num_seqs=max(replicas.values()),
    )
    return count, {}
