"""Structural tags (free text with formats in it: the tool calls of model families) as Lark grammars for llguidance.

The lexer takes the longest lexeme and never goes back. So neighbouring texts are one lexeme, and what ends at a text
that it could go on over, ends where that text first comes. A marker that is a token of its own is written as such.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from kvrelay.errors import InvalidRequest
from kvrelay.grammar.lark import LarkPart, LarkWriter, Parts
from kvrelay.grammar.limits import in_tag, nodes
from kvrelay.grammar.schema import JSON_OPTIONS, Json, check_and_rewrite, loads, refuse
from kvrelay.grammar.tag_xml import XML_FORMS, xml_parts

MOST_WHITESPACE = 64
MOST_TAGS = 512
MOST_FORMATS = 2_000
MOST_FORMAT_DEPTH = 32
MOST_TIMES = 256  # of a repeat

KEYS: Mapping[str, tuple[set[str], set[str]]] = {  # by type: what must be there, what may be
    "const_string": ({"value"}, set()),
    "json_schema": ({"json_schema"}, {"style", "max_whitespace_cnt", "any_order", "excludes"}),
    "regex": ({"pattern"}, set()),
    "any_text": (set(), {"excludes", "max_tokens", "max_chars"}),
    "sequence": ({"elements"}, set()),
    "or": ({"elements"}, set()),
    "optional": ({"content"}, set()),
    "star": ({"content"}, set()),
    "plus": ({"content"}, set()),
    "repeat": ({"content", "min", "max"}, set()),
    "token": ({"token"}, set()),
    "tag": ({"begin", "content", "end"}, set()),
    "triggered_tags": ({"triggers", "tags"}, {"at_least_one", "stop_after_first", "excludes"}),
    "tags_with_separator": ({"tags", "separator"}, {"at_least_one", "stop_after_first"}),
}
_REPEATED = ("tag", "const_string", "token")
_NO_CHOICE = {"any_order", "max_tokens", "max_chars"}  # known keys that are only supported unset

Ends = tuple[Parts, ...]  # what follows a format, one of them
LAST: Ends = ((),)  # nothing does


@dataclass(frozen=True, slots=True)
class TagGrammar:
    """A structural tag's grammar, and its JSON schemas with the beginnings of their tags, for errors."""

    lark: str
    schemas: tuple[tuple[str, str], ...]
    is_ambiguous: bool  # perhaps: an output may be read in many ways


def lark_of_tag(text: str, tokens: Mapping[str, int], special_ids: Collection[int]) -> TagGrammar:
    """The grammar of a structural tag in JSON. Raises InvalidRequest, naming what is not supported.

    tokens: texts that are single tokens, and no text to the lexer. Those that are not special and that the tag does
    not name may still stand in free text.
    """
    tag = loads(text, "the structural tag")
    if not isinstance(tag, dict) or tag.get("type") != "structural_tag" or "format" not in tag:
        refuse("a structural tag has the type structural_tag and a format")
    strings = "\n".join(one for one in nodes(tag) if isinstance(one, str))
    others = [token_id for one, token_id in tokens.items() if token_id not in special_ids and one not in strings]
    writer = TagWriter(tokens, others)
    writer.define("start", writer.body(tag["format"], LAST, "format"))
    return TagGrammar("\n".join(writer.lines), tuple(writer.schemas), writer.is_ambiguous)


@dataclass
class TagWriter(LarkWriter):
    """Writes the rules of one structural tag."""

    is_ambiguous: bool = False  # perhaps
    _num_formats: int = 0
    _num_open: int = 0  # tags around that may end anywhere

    # ---- formats

    def body(self, given: Json, ends: Ends, place: str, before: Parts = ()) -> Parts:
        """A format with `before` before it, and one of `ends` behind it."""
        kind = self._checked(given, place)
        parts: Parts | None = None
        if kind == "const_string":
            parts = self.literal(_string(given, "value", place))
        elif kind == "regex":
            parts = (self.regex(_string(given, "pattern", place)),)
        elif kind == "token":
            parts = (LarkPart("rule", f"<[{self._token(given['token'], place)}]>"),)
        if parts is not None:
            return self._ended((*before, *parts), ends)
        found: Parts = getattr(self, f"_{kind}")(given, ends, place, before)
        return found

    def _ended(self, parts: Parts, ends: Ends) -> Parts:
        if len(ends) == 1:
            return (*parts, *ends[0])
        run = next((at for at in range(len(parts), 0, -1) if parts[at - 1].kind == "rule"), 0)
        return (*parts[:run], self.rule([(*parts[run:], *end) for end in ends]))  # a text is one lexeme with its end

    def _checked(self, given: Json, place: str) -> str:
        """The type of a format; its keys are known."""
        self._num_formats += 1
        if self._num_formats > MOST_FORMATS or place.count("/") > MOST_FORMAT_DEPTH:
            refuse(f"the structural tag is too large: {MOST_FORMATS} formats, {MOST_FORMAT_DEPTH} in each other")
        kind = given.setdefault("type", _kind_of(given)) if isinstance(given, dict) else None
        if not isinstance(kind, str) or kind not in KEYS:
            refuse(f"the format {str(kind)[:100]} is not supported in a structural tag (at {place})")
        needed, known = KEYS[kind]
        if missing := needed - given.keys():
            refuse(f"{kind} needs {min(missing)} (at {place})")
        wrong = [
            key
            for key, value in given.items()
            if key not in needed | known | {"type"} or (key in _NO_CHOICE and value is not None and value is not False)
        ]
        if wrong:
            refuse(f"{wrong[0][:100]} is not supported in the format {kind} (at {place})")
        return kind

    def _token(self, given: Json, place: str) -> int:
        if isinstance(given, str) and given in self.tokens:
            return self.tokens[given]
        if type(given) is int and given in self.tokens.values():
            return given
        return refuse(f"{str(given)[:100]} is no special token of this model that may be written (at {place})")

    def _any_text(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        return self._ended((*before, *self.free(_strings(given, "excludes", place))), ends)

    def _json_schema(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        schema, style, most = given["json_schema"], given.get("style", "json"), given.get("max_whitespace_cnt")
        schema = {} if schema is True else {"not": {}} if schema is False else schema
        if not isinstance(schema, dict):
            refuse(f"json_schema must be an object or a boolean (at {place})")
        if given.get("excludes"):
            refuse(f"excludes is not supported in the format json_schema (at {place})")
        check_and_rewrite(schema)
        options = JSON_OPTIONS
        if most is not None:
            if type(most) is not int or not 0 <= most <= MOST_WHITESPACE:
                refuse(f"max_whitespace_cnt is a whole number of at most {MOST_WHITESPACE} (at {place})")
            only = {"whitespace_pattern": rf"[ \t\r\n]{{1,{most}}}"} if most else {"whitespace_flexible": False}
            options = {key: value for key, value in options.items() if key != "whitespace_pattern"} | only
        if style == "json":
            return self._ended((*before, self.json(schema, options)), ends)
        if not isinstance(style, str) or style not in XML_FORMS:
            refuse(f"the style {str(style)[:100]} is not supported in a structural tag (at {place})")
        return self._ended((*before, *xml_parts(self, schema, XML_FORMS[style], options)), ends)

    def _sequence(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        elements = _list(given, "elements", place)
        parts = before
        for index, one in enumerate(elements[:-1]):
            here = f"{place}/elements/{index}"
            parts = self.body(one, LAST, here, parts)
            if _may_go_on(one) and not _begins_with_text(elements[index + 1]):
                refuse(f"{one['type']} must stand before a text, or be the last in a tag (at {here})")
        return self.body(elements[-1], ends, f"{place}/elements/{len(elements) - 1}", parts)

    def _or(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        elements = enumerate(_list(given, "elements", place))
        return (self.rule([self.body(one, ends, f"{place}/elements/{at}", before) for at, one in elements]),)

    def _times(self, given: Json, place: str, times: str) -> Parts:
        one = given["content"]
        self.is_ambiguous = True
        if not isinstance(one, dict) or one.get("type") not in _REPEATED or not _begins_with_text(one):
            refuse(f"{given['type']} is only supported of a tag or a text (at {place})")
        return (LarkPart("rule", f"{self.rule([self.body(one, LAST, f'{place}/content')]).text}{times}"),)

    def _optional(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        return self._ended((*before, *self._times(given, place, "?")), ends)

    def _star(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        return self._ended((*before, *self._times(given, place, "*")), ends)

    def _plus(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        return self._ended((*before, *self._times(given, place, "+")), ends)

    def _repeat(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        least, most = given["min"], given["max"]
        if not (type(least) is type(most) is int and 0 <= least <= most <= MOST_TIMES and most):
            refuse(f"repeat has a min and a max of at most {MOST_TIMES} (at {place})")
        return self._ended((*before, *self._times(given, place, f"{{{least},{most}}}")), ends)

    # ---- tags

    def _begin_of(self, tag: Json, place: str) -> Parts:
        if isinstance(tag["begin"], dict):
            return self.body(tag["begin"], LAST, f"{place}/begin")
        return self.literal(_string(tag, "begin", place))

    def _tag(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        return (*before, *self._begin_of(given, place), *self._rest(given, ends, place))

    def _rest(self, tag: Json, ends: Ends, place: str) -> Parts:
        """A tag's content and end."""
        outer, self.begin = self.begin, str(tag["begin"])
        is_open = not all(tag["end"]) if isinstance(tag["end"], list) else not tag["end"]
        self._num_open += is_open
        given = tag["end"] if isinstance(tag["end"], list) else [tag["end"]]
        own: list[Parts] = []
        for end in given:
            if not isinstance(end, str | dict):
                refuse(f"end must be a text, several, or a token (at {place})")
            own.append(self.body(end, LAST, f"{place}/end") if isinstance(end, dict) else self.literal(end))
        if not own:
            refuse(f"end must be a text, several, or a token (at {place})")
        following = tuple((*end, *later) for end in own for later in ends)
        try:
            return self.body(tag["content"], following, f"{place}/content")
        except InvalidRequest as error:
            if (where := in_tag(self.begin)) and "in the tag" not in error.message:
                refuse(error.message + where)
            raise
        finally:
            self.begin = outer
            self._num_open -= is_open

    def _tags(self, given: Json, place: str) -> list[tuple[Json, str]]:
        tags = [(tag, f"{place}/tags/{index}") for index, tag in enumerate(_list(given, "tags", place))]
        if len(tags) > MOST_TAGS:
            refuse(f"at most {MOST_TAGS} tags are supported (at {place})")
        for tag, here in tags:
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                refuse(f"a tag is expected (at {here})")
            tag["type"] = "tag"
            self._checked(tag, here)
        return tags

    def _tags_with_separator(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        separator = self.literal(_string(given, "separator", place))
        if not given.get("stop_after_first"):
            self.is_ambiguous |= self._num_open > 0 or not separator
        firsts, others = [], []
        for tag, here in self._tags(given, place):
            begin, rest = self._begin_of(tag, here), self.rule([self._rest(tag, LAST, here)])
            firsts.append((*before, *begin, rest))
            others.append((*separator, *begin, rest))
        parts: Parts = (self.rule(firsts),)
        if not given.get("stop_after_first"):
            parts = (*parts, self.star(self.rule(others).text))
        if given.get("at_least_one"):
            return self._ended(parts, ends)
        return (self.rule([self._ended(parts, ends), self._ended(before, ends)]),)

    def _triggered_tags(self, given: Json, ends: Ends, place: str, before: Parts) -> Parts:
        triggers = _strings(given, "triggers", place)
        self.is_ambiguous |= self._num_open > 0
        if not triggers or not all(triggers):
            refuse(f"triggers must be texts (at {place})")
        text = self.free([*triggers, *_strings(given, "excludes", place)])
        firsts: list[Parts] = []
        groups: dict[Parts, list[Parts]] = {}
        for tag, here in self._tags(given, place):
            begin = _string(tag, "begin", here)
            size = max((len(one) for one in triggers if begin.startswith(one)), default=0)
            if not size:
                refuse(f"begin must start with one of the triggers (at {here})")
            rest = self.rule([self._rest(tag, LAST, here)])
            head, left = self._cut(begin, size)
            groups.setdefault(head, []).append((*left, rest))
            firsts.append((*before, *self.literal(begin), rest))
        call = self.rule([(*text, *head, self.rule(rests)) for head, rests in groups.items()])
        tail = self._ended(text, ends)
        if given.get("at_least_one"):
            more = () if given.get("stop_after_first") else (self.star(call.text), *tail)
            return (self.rule(firsts), *more) if more else self._ended((self.rule(firsts),), ends)
        if given.get("stop_after_first"):
            return (*before, self.rule([self._ended((call,), ends), tail]))
        return (*before, self.star(call.text), *tail)

    def _cut(self, begin: str, size: int) -> tuple[Parts, Parts]:
        """The beginning up to `size` characters, or the end of the token that they end in; and what is left of it."""
        head: list[LarkPart] = []
        left: list[LarkPart] = []
        at = 0
        for piece in self.pieces(begin):
            inside = len(piece) if piece in self.tokens else max(0, size - at)
            (head if at < size else left).append(self.part(piece[:inside] if at < size else piece))
            if at < size and piece[inside:]:
                left.append(self.part(piece[inside:]))
            at += len(piece)
        return tuple(head), tuple(left)


def _kind_of(given: Json) -> str | None:
    """The type of a format that does not say it."""
    kinds = ("json_schema", "tag", "regex", "const_string")
    return next((kind for kind in kinds if KEYS[kind][0] <= given.keys()), None)


def _may_go_on(given: Json) -> bool:
    """Whether a format's last lexeme could take what comes behind it, too."""
    kind = given["type"]
    if kind == "triggered_tags":
        return not (given.get("at_least_one") and given.get("stop_after_first"))
    if kind in ("sequence", "or"):
        return any(map(_may_go_on, given["elements"] if kind == "or" else given["elements"][-1:]))
    return kind in ("any_text", "regex")


def _begins_with_text(given: Json) -> bool:
    if not isinstance(given, dict):
        return False
    if isinstance(given.get("elements"), list):
        some = given["elements"] if given.get("type") == "or" else given["elements"][:1]
        return bool(some) and all(map(_begins_with_text, some))
    if given.get("type") == "tags_with_separator" and isinstance(given.get("tags"), list):
        return bool(given.get("at_least_one")) and all(
            isinstance(one, dict) and one.get("begin") for one in given["tags"]
        )
    return bool(given.get("value" if given.get("type") == "const_string" else "begin") or given.get("type") == "token")


def _string(given: Json, key: str, place: str) -> str:
    value = given[key]
    return value if isinstance(value, str) else refuse(f"{key} must be a text (at {place})")


def _strings(given: Json, key: str, place: str) -> list[str]:
    value = given.get(key) or []
    if not isinstance(value, list) or not all(isinstance(one, str) and one for one in value):
        refuse(f"{key} must be a list of texts (at {place})")
    return value


def _list(given: Json, key: str, place: str) -> list[Json]:
    value = given[key]
    if not isinstance(value, list) or not value:
        refuse(f"{key} must be a list, and not empty (at {place})")
    return value
