"""Parts of JSON schemas, as far as positions in texts need them (`json_states.py`)."""

import json
from collections.abc import Mapping
from typing import Any

_MAX_REFERENCES = 32
"""Most references that lead to one another."""
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "$comment", "$defs", "definitions", "$schema", "$id")
)


class SchemaNode:
    """A part of the schema."""

    def __init__(self, kind: str = "any") -> None:
        self.kind = kind
        """`object`, `array`, `string`, `any` (no restriction), or `other`: known by its bytes alone."""
        self.children: dict[str, SchemaNode] = {}
        self.others: SchemaNode | None = None
        """SchemaNode of the other properties of an object, or of the items of an array; None: see `child`."""
        self.min, self.max = 0, None
        """Limits of the length of a string in characters, or of an array in items."""
        self.min_bytes = 1
        """Least bytes of a value."""

    @property
    def is_counted(self) -> bool:
        return self.min > 0 or self.max is not None

    def property(self, key: bytes) -> tuple[str | None, "SchemaNode"]:
        """Return the name, and the node of the value, of a property. None: the name is not in the schema."""
        try:
            name = json.loads(key)
        except ValueError:  # cut characters
            name = None
        child = self.children.get(name)
        return (None, self.others or ANY) if child is None else (name, child)


ANY = SchemaNode()


class SchemaReader:
    """Reads the parts of a schema that can be followed; all others are known by their bytes."""

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
        elif kind == "array" and keywords <= {"type", "items", "minItems", "maxItems"}:
            node.kind, node.others = "array", self.read(schema.get("items", True))
            node.min, node.max = int(schema.get("minItems", 0)), schema.get("maxItems")
            node.min_bytes = 2 + node.min * node.others.min_bytes
        elif kind == "string" and keywords <= {"type", "minLength", "maxLength"}:
            node.kind = "string"
            node.min, node.max = int(schema.get("minLength", 0)), schema.get("maxLength")
            node.min_bytes = 2 + node.min
        return node

    def _follow(self, reference: str, num_references: int) -> SchemaNode:
        """Return the node of a reference. The node exists before it is read, as it may contain itself."""
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
        node.children = {name: self.read(value) for name, value in properties.items()}
        required = [name for name in schema.get("required", ()) if name in node.children]
        node.min_bytes = 2 + sum(len(name) + 4 + node.children[name].min_bytes for name in required)
        if not properties and node.others is ANY:
            node.kind = "any" if not schema.get("required") else "object"
