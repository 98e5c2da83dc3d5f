"""Writes a Lark grammar for llguidance, rule by rule."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_META = frozenset("\\.+*?()|[]{}^$#&-~/")
_CONTROL = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\0": r"\x00"}
_IN_PATTERN = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}


@dataclass(frozen=True, slots=True)
class LarkPart:
    """A piece of a rule. Of `literal` texts and `regex`es in a row one lexeme is made; a `rule` stands for itself."""

    kind: str  # literal, regex, rule
    text: str


Parts = tuple[LarkPart, ...]


def quoted(text: str) -> str:
    """A string of Lark."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def pattern(source: str) -> str:
    """A regular expression of Lark."""
    text = re.sub(r"\\.|[/\n]", lambda found: _IN_PATTERN.get(found[0], found[0]), source, flags=re.S)
    return f"/{text}/" if text else '""'


def escaped(text: str) -> str:
    """A regular expression of exactly this text."""
    return "".join(f"\\{one}" if one in _META else _CONTROL.get(one, one) for one in text)


@dataclass
class LarkWriter:
    """The rules so far. tokens: texts that are single tokens; text_ids: those of them that free text may have."""

    tokens: Mapping[str, int]
    text_ids: Sequence[int]
    lines: list[str] = field(default_factory=list)
    schemas: list[tuple[str, str]] = field(default_factory=list)  # with the beginnings of their tags
    begin: str = ""  # of the innermost tag
    _names: dict[str, str] = field(default_factory=dict)  # of definitions that can be used again

    def define(self, name: str, parts: Sequence[LarkPart] | str) -> None:
        self.lines.append(f"{name}: {parts if isinstance(parts, str) else self.written(parts)}")

    def named(self, definition: str, kind: str = "r", options: str = "") -> str:
        """The name of a rule or (kind T) a lexeme with this definition."""
        key = kind + options + definition
        if key not in self._names:
            self._names[key] = f"{kind}{len(self._names)}"
            self.lines.append(f"{self._names[key]}{options}: {definition}")
        return self._names[key]

    def rule(self, alternatives: Sequence[Sequence[LarkPart]]) -> LarkPart:
        return LarkPart("rule", self.named(" | ".join(dict.fromkeys(self.written(one) for one in alternatives))))

    def written(self, parts: Sequence[LarkPart]) -> str:
        """Parts in a row, each run of texts as one lexeme."""
        found: list[str] = []
        run: list[LarkPart] = []
        for part in [*parts, LarkPart("rule", "")]:
            if part.kind != "rule":
                run.append(part)
                continue
            found += [self._lexeme(run), part.text]
            run = []
        return " ".join(filter(None, found)) or '""'

    def _lexeme(self, run: Sequence[LarkPart]) -> str:
        if all(part.kind == "literal" for part in run):
            text = "".join(part.text for part in run)
            return quoted(text) if text else ""
        one = " ".join(quoted(part.text) if part.kind == "literal" else part.text for part in run if part.text)
        if run[-1].kind == "literal":  # the first time that it comes
            return self.named(one, options="[lazy]")
        return self.named(one, "T") if len(run) > 1 else one

    def pieces(self, text: str) -> list[str]:
        """A text cut where the tokenizer has tokens."""
        if not self.tokens:
            return [text] if text else []
        names = "|".join(map(re.escape, sorted(self.tokens, key=len, reverse=True)))
        return [piece for piece in re.split(f"({names})", text) if piece]

    def part(self, piece: str) -> LarkPart:
        token_id = self.tokens.get(piece)
        return LarkPart("literal", piece) if token_id is None else LarkPart("rule", f"<[{token_id}]>")

    def literal(self, text: str) -> Parts:
        """A text, with tokens where the tokenizer has them."""
        return tuple(map(self.part, self.pieces(text)))

    def free(self, excludes: Sequence[str]) -> Parts:
        """Any text without these in it, with the tokens that are text as any other."""
        lexeme = self.without(excludes)
        if not self.text_ids:
            return (lexeme,)
        return (LarkPart("rule", f"({lexeme.text} <[{','.join(map(str, self.text_ids))}]>)*"), lexeme)

    def without(self, excludes: Sequence[str]) -> LarkPart:
        """A lexeme of any text without these in it."""
        without = "|".join(dict.fromkeys(map(escaped, excludes)))
        text = "/(?s:.*)/" + (f" & ~{pattern(f'(?s:.*)(?:{without})(?s:.*)')}" if without else "")
        return LarkPart("regex", self.named(text, "T"))

    def raw(self, mark: str, lengths: str, not_first: str) -> LarkPart:
        """Text without `mark`, of a length {least,most}, that does not begin (whitespace aside) with these."""
        text = self.without([mark]).text + (f" & /(?s:.{lengths})/" if lengths else "")
        if not_first:
            text += rf" & ~/[ \t\r\n]*[{not_first}](?s:.*)/"
        return LarkPart("regex", self.named(text, "T"))

    def regex(self, source: str) -> LarkPart:
        return LarkPart("regex", self.named(pattern(source), "T"))

    @staticmethod
    def star(name: str) -> LarkPart:
        return LarkPart("rule", f"{name}*")

    def json(self, schema: Mapping[str, Any], options: Mapping[str, Any]) -> LarkPart:
        text = json.dumps({**schema, "x-guidance": dict(options)})
        self.schemas.append((self.begin, text))
        return LarkPart("rule", self.named(f"%json {text}"))
