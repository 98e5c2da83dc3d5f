"""Random JSON schemas for bench.serving.schemas: most make sense, some contradict themselves, some are not schemas."""

import random
from typing import Any

WORDS = ("id", "name", "tags", "größe", 'a "b"', "x-y", "0", "")
FORMATS = ("date", "date-time", "time", "uuid", "email", "ipv4", "ipv6", "hostname", "uri", "duration", "regex", "wat")
PATTERNS = ("^[a-z]{2,5}$", "[0-9]+", "^(a|b)*$", "^\\d{3}-\\w+$", "é+", "^$", "(", "^(?=a)a$", "\\bword\\b", ".{300}")
VALUES: tuple[Any, ...] = (None, True, 0, -1, 2.5, "", "text", "ü🙂\n", [], [1, "a"], {}, {"a": None})


class RandomSchemas:
    """One schema for each seed. `depth`: of subschemas."""

    def __init__(self, seed: int, depth: int = 3) -> None:
        self._random, self._depth = random.Random(seed), depth

    def schema(self) -> Any:
        """A schema with definitions that it may refer to; one in ten has a value or a keyword that is out of place."""
        root = self._any(self._depth)
        if not isinstance(root, dict):
            return root
        root["$defs"] = {name: self._any(1) for name in ("one", "two")} | {"self": self._maybe_null({"$ref": "#"})}
        if self._random.random() < 0.1:
            key = self._random.choice([*root, "not", "if", "contains", "uniqueItems", "minProperties", "pattern"])
            root[key] = self._random.choice(
                [*VALUES, self._any(1), {"$ref": "#/nowhere"}, {"$ref": "http://localhost/x"}]
            )
        return root

    def _maybe_null(self, schema: Any) -> Any:
        return {"anyOf": [schema, {"type": "null"}]}

    def _any(self, depth: int) -> Any:
        pick = self._random.random()
        if pick < 0.02:
            return self._random.choice([True, {}, False])
        if pick < 0.12:
            return {"enum": self._random.sample(VALUES, self._random.randint(1, 5))}
        if pick < 0.17:
            return {"const": self._random.choice(VALUES)}
        if pick < 0.25 and depth < self._depth:
            return {"$ref": "#/$defs/" + self._random.choice(("one", "two", "self"))}
        if depth and pick < 0.40:
            several = [self._any(depth - 1) for _ in range(self._random.randint(1, 3))]
            return {self._random.choice(("anyOf", "anyOf", "oneOf", "allOf")): several}
        kinds = ("string", "integer", "number", "boolean", "null") + (("object", "array") * 3 if depth else ())
        kind = self._random.choice(kinds)
        schema: dict[str, Any] = {"type": kind if self._random.random() < 0.95 else [kind, "null"]}
        return schema | getattr(self, f"_{kind}", dict)(*([depth - 1] if kind in ("object", "array") else []))

    def _bounds(self, least: str, most: str, size: int) -> dict[str, Any]:
        low = self._random.randint(0, size)
        bounds = {least: low, most: low + self._random.randint(-1 if self._random.random() < 0.05 else 0, size)}
        return {key: value for key, value in bounds.items() if self._random.random() < 0.6}

    def _string(self) -> dict[str, Any]:
        pick = self._random.random()
        if pick < 0.2:
            return {"format": self._random.choice(FORMATS)}
        if pick < 0.4:
            return {"pattern": self._random.choice(PATTERNS)}
        return self._bounds("minLength", "maxLength", 20)

    def _integer(self) -> dict[str, Any]:
        low = self._random.choice(("minimum", "exclusiveMinimum"))
        bounds = self._bounds(low, self._random.choice(("maximum", "exclusiveMaximum")), 1000)
        return bounds | ({"multipleOf": self._random.choice((1, 5, 0.5, 0))} if self._random.random() < 0.1 else {})

    _number = _integer

    def _array(self, depth: int) -> dict[str, Any]:
        schema = {"items": self._any(depth)} | self._bounds("minItems", "maxItems", 3)
        if self._random.random() < 0.2:
            schema["prefixItems"] = [self._any(depth) for _ in range(self._random.randint(1, 2))]
        return schema

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._random.sample(WORDS, self._random.randint(0, 4))
        schema: dict[str, Any] = {"properties": {name: self._any(depth) for name in names}}
        schema["required"] = [name for name in names if self._random.random() < 0.6]
        if self._random.random() < 0.8:
            schema["additionalProperties"] = self._random.choice((False, False, self._any(depth)))
        if self._random.random() < 0.1:
            schema["patternProperties"] = {"^p_": self._any(depth)}
        if self._random.random() < 0.05:
            schema |= self._bounds("minProperties", "maxProperties", 3)
        return schema
