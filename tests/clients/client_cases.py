"""Requests that every client sends."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

MODEL = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France? Answer in one word."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]

WEATHER: Any = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Paris", "Rome"]},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
"""Schema with few values, so that a small model finishes."""
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER, "strict": True}}
]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}


class Place(BaseModel):
    """City, and whether the user has visited it."""

    model_config = ConfigDict(extra="forbid")  # a small model would keep adding properties

    city: Literal["Paris", "Rome"]
    visited: bool
