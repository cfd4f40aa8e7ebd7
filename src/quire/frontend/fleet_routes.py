"""Routing of requests to the replicas of a fleet, which are known by name and come and go."""

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.data.request import Request
from quire.data.stats import StepStats
from quire.frontend.cached_prefixes import PrefixChanges
from quire.frontend.in_flight import affinity, prefix_tokens
from quire.frontend.router import NO_PREFIX, Prefix, Router


@dataclass(slots=True, eq=False)
class Route:
    """Properties of a request by which its replica is chosen. A pickled route keeps only the LoRA adapter."""

    request_id: str = ""
    prefix: Prefix = NO_PREFIX
    session: str | None = None
    num_sequences: int = 1
    adapter: str = ""
    """Name of the request's LoRA adapter; empty: none."""
    replica: str = ""
    """The only replica that can handle the request; empty: any."""
    routes: "FleetRoutes | None" = field(default=None, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        return Route, ("", NO_PREFIX, None, 1, self.adapter)


class FleetRoutes:
    """Ranks the replicas for a request: first the replica of its session, then the replica with the longest
    known prefix of its prompt, then by load. Methods may be called from several threads."""

    def __init__(self, *, block_size: int, max_num_seqs: int, policy: str = "affinity") -> None:
        """Create the routing state without replicas. `max_num_seqs` is that of one replica; `policy` is a
        routing policy of `Router`."""
        self.block_size = block_size
        self._router = Router(0, block_size=block_size, max_num_seqs=max_num_seqs, policy=policy)
        self._places: dict[str, int] = {}
        """Index of each replica among the router's cores, by name."""
        self._free: list[int] = []
        """Indices of replicas that are gone, for new replicas."""
        self._adapters: dict[str, Collection[str]] = {}
        self._reported: dict[str, Mapping[str, float]] = {}
        """Last report of each replica over the control plane."""
        self._lock = threading.Lock()

    def route(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        extra: str | None = None,
        session: str | None = None,
        num_sequences: int = 1,
        adapter: str = "",
    ) -> Route:
        """Return the route of a request, for `rank` and `assign`. `extra` is what a cached prefix depends on
        besides the tokens: the LoRA adapter and the cache salt."""
        with self._lock:
            prefix = self._router.prefix_of(token_ids, extra)
        return Route(request_id, prefix, session, num_sequences, adapter, routes=self)

    def route_of(self, requests: Sequence[Request]) -> Route:
        """Return the route of the sequences of one prompt."""
        first = requests[0]
        return self.route(
            first.id,
            prefix_tokens(first),
            num_sequences=len(requests),
            adapter="" if first.lora is None else first.lora.lora_name,
            **affinity(first),
        )

    def update(self, replicas: Mapping[str, tuple[Collection[str], Mapping[str, float]]]) -> None:
        """Set the running replicas with their loaded adapters and their last report (see `update_load`). A
        replica that is gone is removed with its requests and its prefixes."""
        with self._lock:
            for name in self._places.keys() - replicas.keys():
                self._lose(name)
            for name, (adapters, report) in replicas.items():
                place = self._place_of(name)
                self._adapters[name] = adapters
                if report and self._reported.get(name) is not report:
                    self._reported[name] = report
                    # Outputs of requests of this process contain newer numbers than reports.
                    if not self._router.cores[place].num_local:
                        self._router.update_load(place, **report)

    def rank(self, route: Route, among: Iterable[str]) -> list[str]:
        """Return the names of the replicas in `among`, the best replica for the request first; an empty list
        if the only replica that can handle the request is not in `among`."""
        with self._lock:
            by_place = {self._place_of(name): name for name in among}
            if route.replica:
                return [route.replica] if route.replica in by_place.values() else []
            places, cores = list(by_place), self._router.cores
            holders = [p for p in places if route.adapter in self._adapters.get(by_place[p], ())]
            eligible = set(self._router.not_much_busier(places)).intersection(holders)
            best = self._router.choose(
                route.prefix, among=[p for p in places if p in eligible] or places, session=route.session
            )
            return [by_place[p] for p in sorted(places, key=lambda p: (p != best, cores[p].load))]

    def num_cached(self, route: Route) -> int:
        """Return the number of tokens of the prompt that the best replica for the request has cached, as far
        as it is known."""
        with self._lock:
            numbers = {name: self._router.num_cached(at, route.prefix) for name, at in self._places.items()}
        if not any(numbers.values()):
            return 0  # `rank` would take turns among equal replicas
        return numbers[self.rank(route, numbers)[0]]

    def assign(self, route: Route, replica: str) -> None:
        """Count a request at its replica until `end`."""
        with self._lock:
            self._router.end(route.request_id)
            self._router.assign(
                route.request_id,
                self._place_of(replica),
                route.prefix,
                session=route.session,
                num_sequences=route.num_sequences,
            )

    def end(self, request_id: str) -> None:
        with self._lock:
            self._router.end(request_id)

    def update_load(self, replica: str, **load: float) -> None:
        """Set the load that a replica has reported, which includes the requests of all ingress processes.
        `load` has the arguments of `Router.update_load`."""
        with self._lock:
            if replica in self._places:
                self._router.update_load(self._places[replica], **load)

    @property
    def replicas(self) -> list[str]:
        """Return the names of the known replicas."""
        with self._lock:
            return [*self._places]

    def total_load(self, weight_version: str) -> StepStats:
        """Return the load of all replicas together, as statistics of one engine core."""
        with self._lock:
            reports = [report for report in self._reported.values() if report]
        running, waiting, usage = (
            sum(report[name] for report in reports) for name in ("num_running", "num_waiting", "kv_usage")
        )
        mean = usage / max(len(reports), 1)
        return StepStats(int(running), int(waiting), kv_usage=mean, weight_version=weight_version)

    def note_cached(self, replica: str, changes: PrefixChanges) -> None:
        """Record prefixes that have entered and left the cache of a replica."""
        with self._lock:
            if replica in self._places:
                place = self._places[replica]
                self._router.note_cached(place, changes.stored_keys, changes.removed_keys)

    def lose(self, replica: str) -> None:
        """Forget the requests and the prefixes of a replica that died."""
        with self._lock:
            if replica in self._places:
                self._lose(replica)

    def forget_prefixes(self) -> None:
        with self._lock:
            self._router.forget_prefixes()

    # ---- with the lock held

    def _place_of(self, replica: str) -> int:
        if replica not in self._places:
            self._places[replica] = self._free.pop() if self._free else self._router.add_core()
        return self._places[replica]

    def _lose(self, replica: str) -> None:
        place = self._places.pop(replica)
        self._router.lose(place)
        self._free.append(place)
        self._adapters.pop(replica, None)
        self._reported.pop(replica, None)
