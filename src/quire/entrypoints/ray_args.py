"""The arguments of the Ray Serve application: flags of `quire serve`, and settings of the fleet
(replicas)."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec

from quire.config.cli import FlagParser, engine_args_from
from quire.entrypoints.serve import add_flags
from quire.errors import ConfigError
from quire.server.settings import server_flags

_REPLACEMENTS = {
    **dict.fromkeys(("host", "port", "uds"), "set http_options of Ray Serve"),
    **dict.fromkeys(
        ("api_server_count", "shutdown_timeout"), "ingress_replicas and drain_s are the fleet's settings"
    ),
    **dict.fromkeys(
        ("data_parallel_size", "data_parallel_backend", "data_parallel_external_lb", "nnodes", "headless"),
        "min_replicas and max_replicas set the number of engines",
    ),
    "models_config": "give the list `models` with the flags of each model",
}
"""Flags of `quire serve` that Ray Serve replaces, and what to do instead."""


class FleetSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the replicas of a model (its fleet), in addition to the flags of `quire serve`."""

    min_replicas: int = 1
    max_replicas: int = 0
    """Largest number of replicas; 0: as many as `min_replicas`, without autoscaling."""
    num_cpus: float = 1.0
    """Number of CPUs that Ray reserves for the process of a replica."""
    ingress_replicas: int = 1
    ingress_num_cpus: float = 1.0
    drain_s: float = 600.0
    """Seconds that running requests have to finish when a replica is replaced or removed."""
    scaling_interval_s: float = 5.0
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 300.0
    request_router: str = "quire.entrypoints.ray_fleet:PrefixRouter"
    """Import path of the Ray Serve request router, the class that chooses a replica for each request."""

    @property
    def max_size(self) -> int:
        return self.max_replicas or self.min_replicas


@dataclass(frozen=True, slots=True)
class FleetModel:
    """A model of the application: the arguments of its engines and of the server, and its fleet."""

    engine: Mapping[str, Any]
    server: Mapping[str, Any]
    fleet: FleetSettings
    prefill: "FleetModel | None" = None
    """The fleet that computes prompts for this one; None: this fleet computes them itself."""

    @property
    def num_ranks(self) -> int:
        sizes = ("tensor_parallel_size", "pipeline_parallel_size")
        return int(self.engine.get(sizes[0], 1)) * int(self.engine.get(sizes[1], 1))

    @property
    def is_on_cpu(self) -> bool:
        return bool(self.engine.get("device") == "cpu")

    @property
    def shares_prefixes(self) -> bool:
        return bool(self.engine.get("kv_transfer_config"))

    @property
    def uses_ray_ranks(self) -> bool:
        """Whether each rank is a Ray actor in the placement group of its replica, possibly on another
        machine. Otherwise the ranks are processes beside the engine core."""
        return self.num_ranks > 1 and self.engine.get("distributed_executor_backend") == "ray"


class _Parser(FlagParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_args(args: Mapping[str, Any]) -> list[FleetModel]:
    """Return the models of the application. Other arguments are defaults for the entries of `models`."""
    shared = {str(name).replace("-", "_"): value for name, value in args.items()}
    entries = shared.pop("models", [{}])
    if not isinstance(entries, list) or not entries or not all(isinstance(e, Mapping) for e in entries):
        raise ConfigError("models must be a list of flags, such as [{model: NAME}, {model: NAME}]")
    parser = _Parser(prog="build")
    add_flags(parser)
    models = []
    for entry in entries:
        flags = {str(name).replace("-", "_"): value for name, value in entry.items()}
        models.append(_read_model({**shared, **flags}, parser))
    return models


def _read_model(values: dict[str, Any], parser: FlagParser) -> FleetModel:
    prefill = values.pop("prefill", None)
    if prefill is None:
        return _read_fleet(values, parser)
    if not isinstance(prefill, Mapping):
        raise ConfigError(f"prefill={prefill!r} must be the flags of the replicas that compute prompts")
    flags = {str(name).replace("-", "_"): value for name, value in prefill.items()}
    given = values.get("kv_transfer_config") or {}
    roles = [
        {"kv_transfer_config": {"kv_connector": "NixlConnector", **given, "kv_role": role}}
        for role in ("kv_consumer", "kv_producer")
    ]
    model = _read_fleet({**values, **roles[0]}, parser)
    return replace(model, prefill=_read_fleet({**values, **flags, **roles[1]}, parser))


def _read_fleet(values: dict[str, Any], parser: FlagParser) -> FleetModel:
    """Return a model and the settings of one fleet from its flags."""
    names = {field.name for field in msgspec.structs.fields(FleetSettings)}
    settings = {name: values.pop(name) for name in names & values.keys()}
    try:
        fleet = msgspec.convert(settings, FleetSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"fleet settings: {error}") from None
    for name in values.keys() & _REPLACEMENTS:
        raise ConfigError(f"{name} has no effect in Ray Serve: {_REPLACEMENTS[name]}")
    _check(fleet)
    namespace = argparse.Namespace()
    parser.apply({name: _as_bool(value) for name, value in values.items()}, "args", namespace)
    engine = engine_args_from(namespace)
    model = FleetModel(engine, server_flags(namespace), fleet)
    if model.num_ranks > 1:  # possibly on several machines; `mp` keeps them on one
        engine.setdefault("distributed_executor_backend", "ray")
    return model


def _as_bool(value: Any) -> Any:
    """Convert the text of a switch, as `serve run` passes it."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _check(fleet: FleetSettings) -> None:
    if fleet.min_replicas < 1:
        raise ConfigError(f"min_replicas={fleet.min_replicas} must be at least 1: ingresses need an engine")
    if fleet.max_size < fleet.min_replicas:
        raise ConfigError(
            f"max_replicas={fleet.max_replicas} is less than min_replicas={fleet.min_replicas}: raise it, or "
            "leave it out"
        )
    if fleet.ingress_replicas < 1:
        raise ConfigError(f"ingress_replicas={fleet.ingress_replicas} must be at least 1")
