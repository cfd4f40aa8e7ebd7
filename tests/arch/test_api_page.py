"""Tests that docs/api.md matches the routes, and that the OpenAPI document is complete."""

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
"""Routes with an empty body, text, or a variable answer."""


def test_api_page_is_current() -> None:
    """Catches a new field that is not documented."""
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
    assert len(models) == bool(errors), "all errors of a route have one model"
    assert all(schema == {"$ref": f"#/components/schemas/{name}"} for schema in schemas for name in models)
