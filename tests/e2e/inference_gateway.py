"""What the Gateway API inference extension and llm-d's endpoint picker expect, as JSON schemas."""

from typing import Any

_PORT = {
    "type": "object",
    "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}},
    "required": ["number"],
    "additionalProperties": False,
}
_LABELS = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {
        "type": "string",
        "maxLength": 63,
        "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
    },
}
_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
_FAILURE = {"enum": ["FailOpen", "FailClose"]}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    """Return the schema of an object without further properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


POOL = _object(
    "apiVersion kind metadata spec",
    apiVersion={"const": "inference.networking.k8s.io/v1"},
    kind={"const": "InferencePool"},
    metadata={"type": "object", "required": ["name"]},
    spec=_object(
        "selector targetPorts endpointPickerRef",
        selector=_object("matchLabels", matchLabels=_LABELS),
        targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8, "uniqueItems": True},
        endpointPickerRef=_object(
            "name port",  # a Service needs its port
            group={"const": ""},
            kind={"const": "Service"},
            name=_NAME,
            port=_PORT,
            failureMode=_FAILURE,
        ),
    ),
)
"""An InferencePool of the released version v1."""

_REFERENCE = _object("pluginRef", pluginRef=_NAME, weight={"type": "number", "exclusiveMinimum": 0})
PICKER = _object(
    "apiVersion kind plugins schedulingProfiles dataLayer",
    apiVersion={"const": "llm-d.ai/v1alpha1"},
    kind={"const": "EndpointPickerConfig"},
    plugins={
        "type": "array",
        "items": _object("type", type=_NAME, name=_NAME, parameters={"type": "object"}),
    },
    schedulingProfiles={
        "type": "array",
        "minItems": 1,
        "items": _object("name plugins", name=_NAME, plugins={"type": "array", "items": _REFERENCE}),
    },
    dataLayer=_object(
        "sources",
        sources={
            "type": "array",
            "items": _object(
                "pluginRef extractors", pluginRef=_NAME, extractors={"type": "array", "items": _REFERENCE}
            ),
        },
    ),
)
"""The configuration of an endpoint picker."""

VALUES = _object(
    "router",
    router=_object(
        "epp modelServers inferencePool",
        epp=_object(
            "pluginsConfigFile pluginsCustomConfig",
            replicas={"type": "integer", "minimum": 1},
            pluginsConfigFile=_NAME,
            pluginsCustomConfig={"type": "object", "additionalProperties": {"type": "string"}},
        ),
        inferencePool=_object("failureMode", failureMode=_FAILURE),
        modelServers=_object(
            "type targetPorts matchLabels",
            type={"enum": ["vllm", "sglang", "trtllm-serve"]},
            protocol={"enum": ["http", "grpc"]},
            targetPorts={"type": "array", "items": _PORT, "minItems": 1, "maxItems": 8},
            matchLabels=_LABELS,
        ),
    ),
)
"""The values of llm-d's router chart that the example sets."""
