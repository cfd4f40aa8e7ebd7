"""Nodes of JSON schemas: as much of a schema as is needed to describe positions in texts
(`json_states.py`)."""

import json
from collections.abc import Mapping
from typing import Any

_MAX_REFERENCES = 32
"""Maximum number of consecutive references: a `$ref` to a schema that is itself a `$ref`, and so on."""
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "$defs", "definitions", "$schema", "$id")
)


class SchemaNode:
    """A part of a schema that describes one value."""

    def __init__(self, kind: str = "any") -> None:
        self.kind = kind
        """`object`, `array`, `string`, `any` (no restriction), or `other`: positions in such a value are
        described by all of its bytes."""
        self.children: dict[bytes, SchemaNode] = {}
        """Nodes of the properties that the schema names, by key as it is written in the text, with quotes."""
        self.max_key_bytes = 0
        """Number of bytes of the longest key in `children`."""
        self.others: SchemaNode | None = None
        """Node of an object's properties that are not in `children`, or of the items of an array; None: there
        are none."""
        self.min, self.max = 0, None
        """Limits of the length of a string in characters, or of an array in items."""
        self.min_bytes = 1
        """Minimum number of bytes of a valid value."""

    @property
    def is_counted(self) -> bool:
        return self.min > 0 or self.max is not None

    def property(self, key: bytes) -> tuple[bytes | None, "SchemaNode"]:
        """Return the key, and the node of the value, of a property. None: the key is not in the schema. Any
        other spelling of its name (`"\\u0061"` of `"a"`) is a different property for llguidance."""
        child = self.children.get(key)
        return (None, self.others or ANY) if child is None else (key, child)


ANY = SchemaNode()


class SchemaReader:
    """Reads a schema as nodes. Values whose keywords are not supported here get the kind `other`."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._by_reference: dict[str, SchemaNode] = {}

    def read(self, schema: Any, num_references: int = 0) -> SchemaNode:
        node = SchemaNode("other")
        if schema is True or schema == {}:
            return ANY
        if not isinstance(schema, dict):
            return node
        keywords = schema.keys() - _ANNOTATIONS
        if "$id" in schema and schema is not self._root:  # it has references of its own
            return node
        if keywords == {"$ref"} and isinstance(schema["$ref"], str) and num_references < _MAX_REFERENCES:
            return self._follow(schema["$ref"], num_references + 1)
        kind = schema.get("type")
        if kind == "object" and keywords <= {"type", "properties", "required", "additionalProperties"}:
            self._read_object(node, schema)
        elif (
            kind == "array"
            and keywords <= {"type", "items", "minItems", "maxItems"}
            and not isinstance(schema.get("items"), list)  # before draft 2020-12: a schema for each item
        ):
            node.kind, node.others = "array", self.read(schema.get("items", True))
            node.min, node.max = int(schema.get("minItems", 0)), schema.get("maxItems")
            node.min_bytes = 2 + node.min * node.others.min_bytes
        elif kind == "string" and keywords <= {"type", "minLength", "maxLength"}:
            node.kind = "string"
            node.min, node.max = int(schema.get("minLength", 0)), schema.get("maxLength")
            node.min_bytes = 2 + node.min
        return node

    def _follow(self, reference: str, num_references: int) -> SchemaNode:
        """Return the node of a reference. It is stored before its schema is read, since the schema may refer
        to itself."""
        known = self._by_reference.get(reference)
        if known is not None:
            return known
        target = self._target(reference)
        if target is None:
            return SchemaNode("other")
        node = self._by_reference[reference] = SchemaNode("other")
        read = self.read(target, num_references)
        if read is ANY or "$ref" in target:
            self._by_reference[reference] = read
            return read
        vars(node).update(vars(read))
        return node

    def _target(self, reference: str) -> Mapping[str, Any] | None:
        """Return the schema of a reference within the document; None for anchors and other references."""
        if reference != "#" and not reference.startswith("#/") or "%" in reference or "~" in reference:
            return None
        target: Any = self._root
        for part in reference.split("/")[1:]:
            target = target.get(part) if isinstance(target, dict) else None
            if not isinstance(target, dict) or "$id" in target or "id" in target:
                return None
        return target  # type: ignore[no-any-return]

    def _read_object(self, node: SchemaNode, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties", {})
        node.kind = "object"
        others = schema.get("additionalProperties", True)
        node.others = None if others is False else self.read(others)
        node.children = {_spelled(name): self.read(value) for name, value in properties.items()}
        required = {_spelled(name) for name in schema.get("required", ())}
        for key in required:  # one of the other properties, but only this one meets the requirement
            node.children.setdefault(key, node.others or ANY)
        node.max_key_bytes = max(map(len, node.children), default=0)
        node.min_bytes = 1 + sum(len(key) + 2 + node.children[key].min_bytes for key in required)
        if not node.children and node.others is ANY:
            node.kind = "any"


def _spelled(name: str) -> bytes:
    return json.dumps(name, ensure_ascii=False).encode()
