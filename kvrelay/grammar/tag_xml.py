"""Arguments of calls as XML elements, in the order of the schema's properties: a string is raw text, any other JSON.

An element's name and its closing text are the family's; what a raw text cannot say is refused by name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvrelay.grammar.lark import LarkWriter
from kvrelay.grammar.limits import nodes
from kvrelay.grammar.schema import Json, refuse, resolved


@dataclass(frozen=True, slots=True)
class XmlForm:
    """A parameter: `open` with its name (and whether it is text), its value, `close`, which ends in `mark`."""

    open: str
    close: str
    mark: str
    separator: str = "\n"


XML_FORMS: Mapping[str, XmlForm] = {
    "qwen_xml": XmlForm("<parameter={name}>\n", "\n</parameter>", "</parameter>"),
    "glm_xml": XmlForm("<arg_key>{name}</arg_key>\n<arg_value>", "</arg_value>", "</arg_value>"),
    "minimax_xml": XmlForm('<parameter name="{name}">', "</parameter>", "</parameter>"),
    "deepseek_xml": XmlForm(
        '<｜DSML｜parameter name="{name}" string="{is_text}">', "</｜DSML｜parameter>", "</｜DSML｜parameter>"
    ),
}
NAME = "[A-Za-z_][A-Za-z0-9_.-]{0,63}"  # of a parameter that no schema names
ANNOTATIONS = {
    *("$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated", "description", "discriminator"),
    *("example", "examples", "readOnly", "title", "writeOnly", "strict"),
}
_DEFINITIONS = ("#/$defs/", "#/definitions/")
_WORDS = (("null", "null"), ("boolean", "true"), ("boolean", "false"))
_FIRST = {"object": r"\{", "array": r"\[", "integer": "0-9-", "number": "0-9-", "boolean": "", "null": ""}


def xml_parts(writer: LarkWriter, root: dict[str, Json], form: XmlForm, options: Mapping[str, Any]) -> Any:
    """The parts of arguments that fit an object's schema. Raises InvalidRequest."""
    return _Xml(writer, root, form, options).arguments()


@dataclass(frozen=True, slots=True)
class _Forms:
    """How a value may be written. texts: exactly; lengths: of any text, None: of none; schemas: as JSON."""

    texts: tuple[str, ...] = ()
    lengths: str | None = None
    schemas: tuple[dict[str, Json], ...] = ()


@dataclass(frozen=True, slots=True)
class _Xml:
    writer: LarkWriter
    root: dict[str, Json]
    form: XmlForm
    options: Mapping[str, Any]

    def arguments(self) -> Any:
        known = {"type", "properties", "required", "additionalProperties"} | ANNOTATIONS
        for key in sorted(self.root.keys() - known):
            _refuse(key, "/")
        properties, required = self.root.get("properties") or {}, self.root.get("required") or []
        if self.root.get("type", "object") != "object" or not isinstance(properties, dict):
            refuse("arguments in an XML form are an object")
        if not isinstance(required, list) or set(map(str, required)) - properties.keys():
            _refuse("required of what properties does not name", "/")
        if not properties:
            return self._others(self.root.get("additionalProperties", True))
        return self._in_order(properties, frozenset(required))

    def _in_order(self, properties: dict[str, Json], required: frozenset[str]) -> Any:
        writer, separator = self.writer, self.writer.literal(self.form.separator)
        first: list[Any] = [()]  # alternatives while nothing is written, from the last property on
        behind: Any = ()  # what may follow a parameter
        for name, schema in reversed(properties.items()):
            each = self._parameter(name, schema)
            first = [(*one, *behind) for one in each] + ([] if name in required else first)
            more = [(*separator, *one, *behind) for one in each]
            behind = (writer.rule(more if name in required else [*more, behind]),)
        return (writer.rule(first),)

    def _others(self, schema: Json) -> Any:
        """Parameters of any names."""
        if schema is False:
            return ()
        writer, separator = self.writer, self.writer.literal(self.form.separator)
        each = self._parameter(None, {} if schema is True else schema)
        more = writer.rule([(*separator, *one) for one in each]).text
        return (writer.rule([*((*one, writer.star(more)) for one in each), ()]),)

    def _parameter(self, name: str | None, schema: Json) -> list[Any]:
        place = f"/properties/{name or ''}"[:200]
        if name is not None and (not name or name != name.strip() or set(name) & set('<>"\n')):
            refuse(f"the name of a parameter is not supported in the XML form of this model's calls (at {place})")
        forms = self._forms(schema, place)
        close, mark = self.writer.literal(self.form.close), self.form.mark
        for text in forms.texts:
            if text != text.strip() or mark in text:
                refuse(f"a text with {mark} or outer whitespace is not supported in this XML form (at {place})")
        found = []
        is_bare = all(schema.keys() <= {"type"} | ANNOTATIONS for schema in forms.schemas)
        if forms.lengths is not None:
            kinds = "" if is_bare else "".join(dict.fromkeys(_FIRST[one] for one in _FIRST if self._has(one, forms)))
            raw = self.writer.raw(mark, forms.lengths, kinds)
            found.append((*self._open(name, is_text=True), raw, *close))
        else:
            found += [(*self._open(name, is_text=True), *self.writer.literal(text), *close) for text in forms.texts]
        if forms.lengths is not None and is_bare and "is_text" not in self.form.open:  # in this form they are texts
            words = [word for kind, word in _WORDS if forms.lengths and self._has(kind, forms)]
            return found + [(*self._open(name, is_text=False), *self.writer.literal(word), *close) for word in words]
        if forms.schemas:
            defined: dict[str, Json] = {key: self.root[key] for key in ("$defs", "definitions") if key in self.root}
            for one in forms.schemas:
                json = self.writer.json({**one, **defined}, self.options)
                found.append((*self._open(name, is_text=False), json, *close))
        return found

    def _open(self, name: str | None, *, is_text: bool) -> Any:
        values = {"is_text": "true" if is_text else "false"}
        if name is not None:
            return self.writer.literal(self.form.open.format(name=name, **values))
        before, after = self.form.open.split("{name}")
        return (*self.writer.literal(before), self.writer.regex(NAME), *self.writer.literal(after.format(**values)))

    @staticmethod
    def _has(kind: str, forms: _Forms) -> bool:
        types = [schema.get("type") for schema in forms.schemas]
        return any(kind == one or (isinstance(one, list) and kind in one) for one in types)

    def _forms(self, schema: Json, place: str, depth: int = 0) -> _Forms:
        if schema is True or (isinstance(schema, dict) and not schema.keys() - ANNOTATIONS):
            return _Forms(lengths="", schemas=({},))
        if not isinstance(schema, dict) or depth > 8:
            _refuse("a schema of this kind", place)
        for one in nodes(schema):
            if isinstance(one, dict) and not str(one.get("$ref", "#/$defs/")).startswith(
                ("#/$defs/", "#/definitions/")
            ):
                _refuse(f"$ref {str(one['$ref'])[:100]}", place)
        if "$ref" in schema:
            target = resolved(self.root, schema)
            return self._forms(target, place, depth + 1) if target else _refuse("keys beside $ref", place)
        given = schema.keys() - ANNOTATIONS
        if "anyOf" in given:
            if given - {"anyOf"} or not isinstance(schema["anyOf"], list):
                _refuse(f"{min(given - {'anyOf'}, default='this')} beside anyOf", place)
            each = [self._forms(one, place, depth + 1) for one in schema["anyOf"]]
            lengths = {one.lengths for one in each if one.lengths is not None}
            if len(lengths) > 1:
                _refuse("anyOf of texts of several lengths", place)
            texts = tuple(text for one in each for text in one.texts)
            return _Forms(texts, lengths.pop() if lengths else None, tuple(s for one in each for s in one.schemas))
        types = schema.get("type")
        kinds = [types] if isinstance(types, str) else types if isinstance(types, list) else []
        if given & {"const", "enum"}:
            if given - {"const", "enum", "type"} or given >= {"const", "enum"}:
                _refuse(f"{max(given - {'type'})} beside other keys", place)
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(values, list):
                _refuse("enum of no list", place)
            texts = tuple(one for one in values if isinstance(one, str)) if not kinds or "string" in kinds else ()
            others = [one for one in values if not isinstance(one, str)]
            typed = {"type": types} if kinds else {}
            return _Forms(texts, schemas=({"enum": others, **typed},) if others else ())
        if not kinds:
            _refuse(f"{min(given)} without a type", place)
        if "string" not in kinds:
            return _Forms(schemas=(schema,))
        for key in sorted(given & {"pattern", "format", "allOf", "oneOf", "not", "if"}):
            _refuse(key, place)
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if not (type(least) is int and least >= 0 and (most == "" or type(most) is int)):
            _refuse("minLength or maxLength of this kind", place)
        length = f"{{{least},{most}}}" if given & {"minLength", "maxLength"} else ""
        left = [kind for kind in kinds if kind != "string"]
        other = {key: value for key, value in schema.items() if key not in ("minLength", "maxLength")}
        return _Forms(lengths=length, schemas=tuple({**other, "type": kind} for kind in left))


def _refuse(key: str, place: str) -> Any:
    return refuse(f"{key} is not supported in the XML form of this model's calls (at {place})")
