"""docs/api.md says what the routes say, and the OpenAPI document leaves nothing out."""

from pathlib import Path

import pytest
from api_page import page, routes
from fastapi.routing import APIRoute

WITHOUT_A_MODEL = {
    "/health",
    "/ping",
    "/metrics",
    "/server_info",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
"""An empty body, text, or what there happens to be."""


def test_the_page_of_the_api_is_what_the_routes_make() -> None:
    """A field that was added, and nobody can read that it was."""
    written = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
    assert written == page(), "run: python tests/arch/api_page.py > docs/api.md"


@pytest.mark.parametrize("route", routes(), ids=lambda route: f"{sorted(route.methods)[0]} {route.path}")
def test_every_route_is_described(route: APIRoute) -> None:
    answers = {int(code): reply for code, reply in route.responses.items()}
    assert 200 in answers
    if route.path not in WITHOUT_A_MODEL and answers[200].get("content") != {}:
        assert answers[200].get("model") is not None
    if route.body_field is not None:
        assert 400 in answers
    errors = [reply for code, reply in answers.items() if code >= 400]
    models = {reply["model"].__name__ for reply in errors if "model" in reply}
    schemas = [reply["content"]["application/json"]["schema"] for reply in errors if "model" not in reply]
    assert len(models) == bool(errors), "one says how errors look"
    assert all(schema == {"$ref": f"#/components/schemas/{name}"} for schema in schemas for name in models)
