"""`EngineArgs`: every engine argument as a field, for programs that build an engine from such an object."""

from dataclasses import field, make_dataclass
from typing import Any

from quire.config.sections import options
from quire.config.vllm_names import other_names


def _changed_args(self: Any) -> dict[str, Any]:
    """Return the arguments that differ from the defaults: the first argument of `resolve()`."""
    known = options()
    values = {name: getattr(self, name) for name in self.__dataclass_fields__}
    return {
        name: value
        for name, value in values.items()
        if value is not None and (name not in known or value != known[name].default)
    }


def _add_cli_args(parser: Any) -> Any:
    """Add a flag for every engine argument; return the parser."""
    from quire.config.cli import add_engine_flags

    add_engine_flags(parser)
    return parser


def _from_cli_args(cls: Any, args: Any) -> Any:
    """Build the arguments from a parsed command line."""
    from quire.config.cli import engine_args_from

    return cls(**engine_args_from(args))


def _args_fields() -> list[tuple[str, Any, Any]]:
    listed: list[tuple[str, Any, Any]] = []
    for option in options().values():
        make = option.default.copy if option.kind is dict else None
        listed.append(
            (option.name, Any, field(default_factory=make) if make else field(default=option.default))
        )
    return listed + [(name, Any, field(default=None)) for name in sorted(other_names())]


EngineArgs: Any = make_dataclass(
    "EngineArgs",
    _args_fields(),
    kw_only=True,
    repr=False,
    namespace={
        "given": _changed_args,
        "add_cli_args": staticmethod(_add_cli_args),
        "from_cli_args": classmethod(_from_cli_args),
    },
)
EngineArgs.__module__ = __name__
EngineArgs.__doc__ = "Every engine argument by name, all optional; `given()` holds those that were changed."
