"""The connections of an API process: one to each of its engine cores, or one to a fleet."""

from collections.abc import Callable, Mapping
from pathlib import Path

from quire.frontend.core_client import CoreLink
from quire.frontend.engine_facts import EngineFacts
from quire.frontend.engine_link import EngineLink
from quire.frontend.fleet_link import Fleet, FleetLink, FleetOwner
from quire.frontend.fleet_routes import FleetRoutes
from quire.frontend.inputs import InputProcessor
from quire.frontend.outputs import OutputProcessor


def open_links(
    owner: FleetOwner,
    facts: EngineFacts,
    inputs: InputProcessor,
    addresses: Mapping[int, str | Path],
    token: str,
    fleet: Fleet | None,
    routing: str,
    stream_interval: int,
    clock: Callable[[], float],
) -> list[EngineLink]:
    """Return unopened connections to the engine cores at `addresses` (by rank), or a single connection to the
    `fleet` if there is one."""

    def processor() -> OutputProcessor:
        return OutputProcessor(
            inputs.tokenizer, stream_interval=stream_interval, tokenizer_of=inputs.tokenizer_of
        )

    if fleet is not None:
        routes = FleetRoutes(block_size=facts.block_size, max_num_seqs=facts.max_num_seqs, policy=routing)
        return [FleetLink(fleet, routes, outputs=processor(), owner=owner, clock=clock)]
    return [
        CoreLink(
            place,
            rank,
            address,
            name="the engine" if len(addresses) == 1 else f"engine {rank}",
            outputs=processor(),
            token=token,
            owner=owner,
            clock=clock,
        )
        for place, (rank, address) in enumerate(addresses.items())
    ]
