"""Data-parallel topology: the engine cores on this machine, and the cores that its API servers use."""

from dataclasses import dataclass

from quire.config.sections import ParallelSection
from quire.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Topology:
    """Data-parallel ranks of the engine cores on this machine (`local`), and of those that its API servers
    use."""

    size: int
    local: range
    served: range
    """Ranks that API server processes of this machine connect to; empty for a headless machine."""
    num_api: int

    @property
    def remote(self) -> list[int]:
        """Return the ranks of `served` that run on other machines."""
        return [rank for rank in self.served if rank not in self.local]


def local_ranks(parallel: ParallelSection) -> range:
    """Return the data-parallel ranks of the engine cores on this machine."""
    size, start, count = (
        parallel.data_parallel_size,
        parallel.data_parallel_start_rank,
        parallel.data_parallel_size_local,
    )
    if parallel.data_parallel_hybrid_lb and parallel.data_parallel_external_lb:
        raise ConfigError("data_parallel_hybrid_lb and data_parallel_external_lb exclude each other")
    if parallel.data_parallel_external_lb and parallel.data_parallel_rank is None and size > 1:
        raise ConfigError("data_parallel_external_lb needs data_parallel_rank: which of the copies this is")
    if parallel.data_parallel_rank is not None:
        if count not in (None, 1):
            raise ConfigError(
                f"data_parallel_size_local={count} contradicts data_parallel_rank, which means one copy:"
                " leave one of them out"
            )
        start, count = parallel.data_parallel_rank, 1
    if parallel.data_parallel_hybrid_lb and count is None:
        raise ConfigError(
            "data_parallel_hybrid_lb needs data_parallel_size_local: the copies on this machine"
        )
    count = size - start if count is None else count
    if start >= size:
        raise ConfigError(f"data-parallel rank {start} is out of range: data_parallel_size is {size}")
    if start + count > size:
        raise ConfigError(
            f"data_parallel_size_local={count} from rank {start} on goes beyond data_parallel_size={size}"
        )
    return range(start, start + count)


def lay_out(parallel: ParallelSection, *, headless: bool, api_server_count: int | None) -> Topology:
    """Return the ranks that this server runs and uses. With a fixed rank, hybrid load balancing or a start
    rank above 0, its API processes use only the local ranks. Otherwise they use all ranks; a headless server
    has no API processes."""
    size, local = parallel.data_parallel_size, local_ranks(parallel)
    if headless:
        if api_server_count:
            raise ConfigError(f"api_server_count={api_server_count}: a headless server has no API processes")
        if size == 1 or len(local) in (0, size):
            raise ConfigError(
                f"headless: {len(local)} of {size} data-parallel ranks are here; a headless server needs some"
                " but not all, and the head at data_parallel_address"
            )
        return Topology(size, local, range(0), 0)
    alone = parallel.data_parallel_rank is not None or parallel.data_parallel_hybrid_lb or local.start > 0
    served = local if alone else range(size)
    if not served:
        raise ConfigError("data_parallel_size_local=0: there is no engine core for this server to connect to")
    if api_server_count == 0:
        raise ConfigError("api_server_count=0 is for headless servers: give --headless, or at least 1")
    return Topology(size, local, served, api_server_count or len(served))
