"""Metrics of KV cache offloading, and of KV cache transfers between engines, with vLLM's names."""

from collections.abc import Callable

from quire.data.stats import TierStats

_SIZES = [1e6, 5e6, 1e7, 2e7, 4e7, 6e7, 8e7, 1e8, 1.5e8, 2e8]
_TRANSFER_S = [0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 5.0]
_TRANSFER_BYTES = [float(1 << power) for power in range(18, 35, 2)]
_LOOKUP_S = [1e-5, 5e-5, 1e-4, 5e-4, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0]
GAUGES = {
    "kv_offload_cpu_cache_usage_perc": "Share of the host tier that copies read or write now, 0 to 1.",
    "kv_offload_cpu_cache_read_usage_perc": "Share of the host tier that copies to the device read now.",
    "kv_offload_cpu_cache_write_usage_perc": "Share of the host tier that copies from the device fill now.",
}
COUNTERS = {
    "kv_offload_store_bytes": "Bytes of KV cache blocks copied to host memory or disk.",
    "kv_offload_store_time": "Seconds of copies from the device to host memory.",
    "kv_offload_load_bytes": "Bytes of KV cache blocks copied from host memory or disk.",
    "kv_offload_load_time": "Seconds of copies from host memory or disk; several may run at once.",
    "kv_offload_allocation_failure": "KV cache blocks that were not stored because no slot was free.",
    "external_prefix_cache_queries": "Prompt tokens looked up in host memory, on disk and in other engines.",
    "external_prefix_cache_hits": "Prompt tokens found in host memory, on disk or in another engine.",
    "nixl_num_failed_transfers": "Requests whose prefix could not be loaded from another engine.",
    "nixl_num_failed_notifications": "Prefixes that another engine could not be told to release.",
    "nixl_num_kv_expired_reqs": "Prefixes that were kept for another engine and not read in time.",
}
_DIRECTIONS = ("CPU_to_GPU", "GPU_to_CPU")
LABELLED = {
    "kv_offload_tiering_read_bytes": ("Bytes of KV cache blocks read from a tier.", "tier", ("1:fs",)),
    "kv_offload_tiering_read_time": ("Seconds of reading from a tier.", "tier", ("1:fs",)),
    "kv_offload_tiering_write_bytes": ("Bytes of KV cache blocks written to a tier.", "tier", ("1:fs",)),
    "kv_offload_tiering_write_time": ("Seconds of writing to a tier.", "tier", ("1:fs",)),
    "kv_offload_tiering_promotion_job_failures": (
        "KV cache blocks of a tier that were missing or damaged.",
        "tier",
        ("1:fs",),
    ),
    "kv_offload_tiering_cascade_job_failures": (
        "KV cache blocks that were not written to a tier: too many were waiting, or it failed.",
        "tier",
        ("1:fs",),
    ),
    "kv_offload_tiering_chunk_queries": (
        "KV cache blocks of prompts looked up in a tier.",
        "tier",
        ("1:fs",),
    ),
    "kv_offload_tiering_chunk_hits": ("KV cache blocks of prompts read from a tier.", "tier", ("1:fs",)),
    "kv_offload_total_bytes": ("Older name of the bytes stored and loaded.", "transfer_type", _DIRECTIONS),
    "kv_offload_total_time": ("Older name of the seconds of both.", "transfer_type", _DIRECTIONS),
}
HISTOGRAMS: dict[str, tuple[str, list[float]]] = {
    "kv_offload_lookup_sync_delay_seconds": ("Seconds of a lookup in the tiers.", _LOOKUP_S),
    "kv_offload_store_size": ("Bytes of a copy to host memory or disk.", _SIZES),
    "kv_offload_load_size": ("Bytes of a copy from host memory or disk.", _SIZES),
    "nixl_xfer_time_seconds": ("Seconds of a copy from another engine.", _TRANSFER_S),
    "nixl_bytes_transferred": ("Bytes of a copy from another engine.", _TRANSFER_BYTES),
    "nixl_num_descriptors": (
        "Blocks and checkpoints of states of a copy from another engine.",
        [10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10000.0, 20000.0],
    ),
}


def observe(
    stats: TierStats,
    add: Callable[[str, float], None],
    record: Callable[[tuple[str, ...], list[float]], None],
    set_gauge: Callable[[str, float], None],
) -> None:
    """Export the statistics of KV offloading and transfers. `add(name, value)` increases a counter,
    `record(names, values)` adds observations to each of the named histograms, and `set_gauge(name, value)`
    sets a gauge."""
    stored, loaded = sum(stats.store_sizes), sum(stats.load_sizes)
    for direction, copied, seconds in (
        ("GPU_to_CPU", stored, stats.store_s),
        ("CPU_to_GPU", loaded, stats.load_s),
    ):
        add(f"kv_offload_total_bytes:{direction}", copied)
        add(f"kv_offload_total_time:{direction}", seconds)
    set_gauge("kv_offload_cpu_cache_usage_perc", stats.host_read_share + stats.host_write_share)
    set_gauge("kv_offload_cpu_cache_read_usage_perc", stats.host_read_share)
    set_gauge("kv_offload_cpu_cache_write_usage_perc", stats.host_write_share)
    record(("kv_offload_lookup_sync_delay_seconds",), stats.lookup_s)
    add("kv_offload_tiering_cascade_job_failures:1:fs", stats.num_lost_writes)
    add("kv_offload_tiering_chunk_queries:1:fs", stats.disk_queries)
    add("kv_offload_tiering_chunk_hits:1:fs", stats.disk_hits)
    add("kv_offload_store_bytes", stored)
    add("kv_offload_store_time", stats.store_s)
    add("kv_offload_load_bytes", loaded)
    add("kv_offload_load_time", stats.load_s)
    add("kv_offload_allocation_failure", stats.num_failed_stores)
    add("kv_offload_tiering_read_bytes:1:fs", stats.disk_bytes)
    add("kv_offload_tiering_read_time:1:fs", stats.disk_read_s)
    add("kv_offload_tiering_write_bytes:1:fs", stats.disk_written_bytes)
    add("kv_offload_tiering_write_time:1:fs", stats.disk_write_s)
    add("kv_offload_tiering_promotion_job_failures:1:fs", stats.num_failed_loads)
    add("external_prefix_cache_queries", stats.num_queries)
    add("external_prefix_cache_hits", stats.num_hits)
    add("nixl_num_failed_transfers", stats.num_failed_transfers)
    add("nixl_num_failed_notifications", stats.num_failed_releases)
    add("nixl_num_kv_expired_reqs", stats.num_expired_offers)
    record(("nixl_xfer_time_seconds",), stats.transfer_s)
    record(("nixl_bytes_transferred",), [float(size) for size in stats.transfer_bytes])
    record(("nixl_num_descriptors",), [float(count) for count in stats.transfer_entries])
    record(("kv_offload_store_size",), [float(size) for size in stats.store_sizes])
    record(("kv_offload_load_size",), [float(size) for size in stats.load_sizes])
