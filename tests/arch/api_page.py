"""Generate docs/api.md from the routes and their models: `python tests/arch/api_page.py > docs/api.md`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from fake_engine import FakeEngine
from fastapi.routing import APIRoute
from pydantic import BaseModel

from quire.config.env import Env
from quire.server.app import Application
from quire.server.settings import make_settings

PROSE = Path(__file__).with_name("api_page.md")
"""Handwritten head of the page."""


def routes() -> list[APIRoute]:
    """Return every possible route, as the application has them in developer mode."""
    settings = make_settings(
        {"enable_tokenizer_info_endpoint": True},
        env=Env.read({"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
    )
    result = Application(FakeEngine("Hi"), settings).routes.routes
    return [route for route in result if isinstance(route, APIRoute) and route.include_in_schema]


def page() -> str:
    bodies, replies = bodies_of(routes()), replies_of(routes())
    return "\n".join(
        [
            PROSE.read_text(encoding="utf-8"),
            "## Routes\n",
            *_route_table(),
            "\n## What is sent\n",
            *_models(bodies),
            "## What comes back\n",
            *_models([model for model in replies if model not in bodies]),
        ]
    )


def bodies_of(all_routes: list[APIRoute]) -> list[type[BaseModel]]:
    return _with_parts(
        model
        for route in all_routes
        if route.body_field is not None
        for model in _models_in(route.body_field.field_info.annotation)
    )


def replies_of(all_routes: list[APIRoute]) -> list[type[BaseModel]]:
    return _with_parts(
        model
        for route in all_routes
        for reply in route.responses.values()
        for model in _models_in(reply.get("model"))
    )


def _models_in(kind: Any) -> Iterator[type[BaseModel]]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for part in get_args(kind):
        yield from _models_in(part)


def _with_parts(models: Iterator[type[BaseModel]]) -> list[type[BaseModel]]:
    """Return the models with the models of their fields and their base classes, each once."""
    results: dict[type[BaseModel], None] = {}
    waiting = list(models)
    while waiting:
        model = waiting.pop(0)
        if model not in results:
            results[model] = None
            waiting += _bases(model)
            waiting += [
                part for field in model.model_fields.values() for part in _models_in(field.annotation)
            ]
    return list(results)


def _bases(model: type[BaseModel]) -> list[type[BaseModel]]:
    return [
        base
        for base in model.__bases__
        if issubclass(base, BaseModel) and base is not BaseModel and base.model_fields
    ]


def _route_table() -> Iterator[str]:
    yield "| route | what it does | sent | comes back | errors |"
    yield "|---|---|---|---|---|"
    for route in sorted(routes(), key=lambda route: route.path):
        body = route.body_field and route.body_field.field_info.annotation
        reply = route.responses.get(200, {}).get("model")
        errors = sorted(int(code) for code in route.responses if int(code) >= 400)
        cells = [
            f"{', '.join(sorted(route.methods))} `{route.path}`",
            " ".join((route.description or "").split()),
            ", ".join(map(_link, _models_in(body))),
            ", ".join(map(_link, _models_in(reply))),
            ", ".join(map(str, errors)),
        ]
        yield f"| {' | '.join(cell or '-' for cell in cells)} |"


def _link(model: type[BaseModel]) -> str:
    return f"[{model.__name__}](#{model.__name__.lower()})"


def _models(models: list[type[BaseModel]]) -> Iterator[str]:
    for model in sorted(models, key=lambda model: model.__name__):
        yield f"### {model.__name__}\n"
        says = " ".join((model.__doc__ or "").split())
        bases = ", ".join(map(_link, _bases(model)))
        yield says + (f" It has every field of {bases}." if bases else "") + "\n"
        inherited = {name for base in _bases(model) for name in base.model_fields}
        properties = model.model_json_schema(by_alias=True).get("properties", {})
        local = {
            name: field
            for name, field in model.model_fields.items()
            if name not in inherited or str(field) != str(_inherited(model, name))
        }
        if local:
            yield "| field | type | default | |"
            yield "|---|---|---|---|"
            for name, field in local.items():
                shown = field.alias or name
                yield _field_line(shown, properties.get(shown, {}), field.is_required())
            yield ""


def _inherited(model: type[BaseModel], name: str) -> Any:
    return next(base.model_fields[name] for base in _bases(model) if name in base.model_fields)


def _field_line(name: str, schema: dict[str, Any], required: bool) -> str:
    default = "required" if required else f"`{json.dumps(schema.get('default'))}`"
    text = " ".join(str(schema.get("description", "")).split()).replace("|", "\\|")
    return f"| `{name}` | {_kind(schema)}{_bounds(schema)} | {default} | {text} |"


def _kind(schema: dict[str, Any]) -> str:
    for joined in ("anyOf", "oneOf"):
        if joined in schema:
            kinds = dict.fromkeys(_kind(item) for item in schema[joined] if item.get("type") != "null")
            return " or ".join(kinds)
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return "any JSON" if name == "JsonValue" else f"[{name}](#{name.lower()})"
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{item}`" for item in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any JSON"))


def _bounds(schema: dict[str, Any]) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None and high is None:
        return ""
    return f", {'' if low is None else low}..{'' if high is None else high}"


if __name__ == "__main__":
    print(page(), end="")
