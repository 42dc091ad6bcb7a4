"""The grammar of arguments that a model writes one by one, each valid by its schema."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from motley.daemon.sampling.constraint import JSON_OPTIONS, ConstraintError
from motley.daemon.text.calls.formats import Parameters
from motley.daemon.text.calls.values import (
    constants_of,
    in_order,
    is_text,
    list_of,
    mapping_of,
    spelt,
    spelt_name,
    types_of,
)

_NOTES = {"$schema", "$id", "$comment", "title", "description", "default", "examples", "$defs", "definitions"}
"""Keys of a schema that bind nothing by themselves."""
_OF_TYPE = {
    "boolean": {"type"},
    "null": {"type"},
    "string": {"type", "pattern", "minLength", "maxLength"},
    "array": {"type", "items", "minItems", "maxItems"},
    "object": {"type", "properties", "required", "additionalProperties"},
}
"""Keys that models can be kept to which write each value in their own way."""
_FREE_NAME = "/[A-Za-z_0-9.-]+/"
_LIMITS = (("minLength", "maxLength"), ("minItems", "maxItems"))
"""Keys of a schema that say how few and how many there may be."""
_ROOT = "#/$defs/parameters"
"""Where the schema of all arguments is found from within a part of it that stands by itself."""
_ANY = r"(.|\n)*"


class ParameterRules:
    """Rules of the arguments of one tool.

    Attributes:
        rules: in Lark's notation, as llguidance has it.

    Args:
        form: how the model writes them.
        literal: writes a text, in which marks may be special tokens.
        prefix: what all names of rules begin with.
        tool: its name, for what is told of it.
        schema: of the arguments.
    """

    def __init__(
        self, form: Parameters, literal: Callable[[str], str], prefix: str, tool: str, schema: Mapping[str, Any]
    ) -> None:
        self.rules: list[str] = []
        self._form, self._literal, self._prefix, self._tool, self._schema = form, literal, prefix, tool, schema
        self._root = {"type": "object"} | {key: each for key, each in schema.items() if key not in ("$id", "$schema")}
        """The schema as what refers to it finds it."""
        self._joint = literal(form.joint)
        self._nested = form.quote not in ("", '"')
        """Whether texts, and values within lists and objects, are no JSON either."""
        ends = re.escape(form.quote or form.after.strip()).replace("/", r"\/")
        self._text = f"/{_ANY}/ & ~/{_ANY}{ends}{_ANY}/"
        self._referred: dict[str, str] = {}
        """The rules of what schemas refer to."""
        self._names: dict[str, str] = {}
        """Names of rules by what they are."""

    def bound(self) -> str:
        """Arguments that are valid by their schema.

        Raises:
            ConstraintError: the model cannot be kept to it.
        """
        properties, required = self._properties(self._schema), self._schema.get("required") or []
        self._check(properties, required)
        members, after = [], self._literal(self._form.after)
        try:
            for key, kind in properties.items():
                before = self._literal(self._form.before.replace("{key}", self._name(key)))
                members.append((self._rule(f"{before} {self._value(key, kind)} {after}"), key in required))
        except RecursionError as error:
            raise ConstraintError(f"{self._tool!r} has parameters whose schemas are nested too deep") from error
        return self._sequence(members)

    def free(self) -> str:
        """Any arguments."""
        begin, _, end = self._form.before.partition("{key}")
        if not self._form.quote:
            name, value = r'/[^<>"\n]+/', self._terminal(self._text)
        else:
            name, value = _FREE_NAME, self._any()
        parts = [self._literal(begin), name, self._literal(end), value, self._literal(self._form.after)]
        return self._several(self._rule(" ".join(parts)))

    def _properties(self, kind: Mapping[str, Any]) -> Mapping[str, Any]:
        """The properties of an object, in the order in which the model writes them."""
        return in_order(mapping_of(kind.get("properties")), self._form)

    def _check(self, properties: Mapping[str, Any], required: object) -> None:
        """
        Raises:
            ConstraintError: arguments that the model writes each by itself cannot be kept to this schema.
        """
        what = [repr(key) for key in self._schema if key not in _NOTES | _OF_TYPE["object"]]
        if self._schema.get("type", "object") != "object":
            what.append(f"type {self._schema['type']!r}")
        if not _are_properties(required, properties):
            what.append("'required' that is no property")
        if what:
            raise ConstraintError(
                f"{self._tool!r} has parameters with {', '.join(what)}, which is not supported for this model, as it"
                " writes each parameter by itself; supported are objects with properties"
            )

    def _name(self, key: str) -> str:
        """A name as the model writes it.

        Raises:
            ConstraintError: it cannot.
        """
        in_python = self._form.quote and not self._nested
        if in_python and (not key.isidentifier() or keyword.iskeyword(key)):
            raise ConstraintError(
                f"{self._tool!r} has a parameter {key!r}, which is no name in the Python of this model"
            )
        return spelt_name(key, self._form)

    def _value(self, key: str, schema: Any) -> str:
        """A value as the model writes it, or, where its schema is not simple, in JSON, which is read as well."""
        kind = mapping_of(schema)
        for limits in _LIMITS:
            self._limits(key, kind, *limits)
        if constants := constants_of(kind):
            return self._one_of(constants)
        if not self._form.quote:
            return self._terminal(self._text, *self._bounds(key, kind)) if is_text(kind) else self._json(kind)
        if "$ref" in kind and not kind.keys() - _NOTES - {"$ref"}:
            return self._referred_value(key, kind)
        for several in ("anyOf", "oneOf"):
            ways = list_of(kind.get(several))
            if ways and not kind.keys() - _NOTES - {several} and (several == "anyOf" or _are_apart(ways)):
                return f"({' | '.join(self._value(key, each) for each in ways)})"
        if not (types := types_of(kind)):
            return self._json(kind) if kind.keys() - _NOTES else self._any()
        return f"({' | '.join(self._of_type(key, each, {**kind, 'type': each}) for each in sorted(types))})"

    def _of_type(self, key: str, type_: str, kind: Mapping[str, Any]) -> str:
        known = not kind.keys() - _NOTES - _OF_TYPE.get(type_, set())
        properties, required = self._properties(kind), kind.get("required", [])
        match type_:
            case "boolean" if known:
                return self._one_of([True, False])
            case "null" if known:
                return self._one_of([None])
            case "string" if known and self._nested:
                return self._quoted(self._terminal(self._text, *self._bounds(key, kind)))
            case "array" if known and self._nested:
                items = self._rule(self._value(key, kind.get("items")))
                return f'"[" {self._several(items, *self._limits(key, kind, "minItems", "maxItems"))} "]"'
            case "object" if known and self._nested and not properties and not required:
                others = kind.get("additionalProperties")
                return '"{}"' if others is False else self._object(self._value(key, others))
            case "object" if known and self._nested and _are_properties(required, properties):
                members = []
                for name, each in properties.items():
                    member = f"{self._literal(self._name(name) + ':')} {self._value(name, each)}"
                    members.append((self._rule(member), name in required))
                return f'"{{" {self._sequence(members)} "}}"'
        return self._json(kind)

    def _referred_value(self, key: str, kind: Mapping[str, Any]) -> str:
        ref = str(kind["$ref"])
        root, *steps = ref.split("/")
        found: Any = self._root
        for step in steps:
            found = mapping_of(found).get(step)
        if root != "#" or not isinstance(found, Mapping):
            return self._json(kind)
        if ref not in self._referred:
            self._referred[ref] = f"{self._prefix}_ref_{len(self._referred)}"
            self.rules.append(f"{self._referred[ref]}: {self._value(key, found)}")
        return self._referred[ref]

    def _any(self) -> str:
        """Any value."""
        words = self._one_of([True, False, None])
        if not self._nested:
            return f"({words} | {self._json({})})"
        name = f"{self._prefix}_any"
        if "" not in self._referred:
            self._referred[""] = name
            text = self._quoted(self._terminal(self._text))
            ways = [words, self._json({"type": "number"}), text, f'"[" {self._several(name)} "]"', self._object(name)]
            self.rules.append(f"{name}: {' | '.join(ways)}")
        return name

    def _object(self, value: str) -> str:
        """An object with any names."""
        member = self._rule(f'{_FREE_NAME} ":" {value}')
        return f'"{{" {self._several(member)} "}}"'

    def _sequence(self, members: Sequence[tuple[str, bool]]) -> str:
        """Members in their order, of which some must be there."""
        if not self._joint:
            return " ".join(f"{member}{'' if required else '?'}" for member, required in members)
        first = more = '""'
        for member, required in reversed(members):
            without, no_more = ("", "") if required else (f" | {first}", f" | {more}")
            first, more = (
                self._rule(f"{member} {more}{without}"),
                self._rule(f"{self._joint} {member} {more}{no_more}"),
            )
        return first

    def _several(self, member: str, least: int = 0, most: int | None = None) -> str:
        """As many members as there may be."""
        if most == 0:
            return ""
        others = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f"({member} ({self._joint} {member}){others}){'' if least else '?'}"

    def _one_of(self, constants: Sequence[Any]) -> str:
        return f"({' | '.join(self._literal(spelt(each, self._form)) or json.dumps('') for each in constants)})"

    def _quoted(self, text: str) -> str:
        quote = self._literal(self._form.quote)
        return f"{quote} {text} {quote}"

    def _json(self, kind: Any) -> str:
        """A value in JSON, which is valid by a part of the schema."""
        whole = mapping_of(_from_within(kind))
        if whole != kind:
            whole = {**whole, "$defs": {"parameters": _from_within(self._root)}}
        return self._rule(f"%json {json.dumps({**whole, 'x-guidance': JSON_OPTIONS})}")

    def _limits(self, key: str, kind: Mapping[str, Any], least: str, most: str) -> tuple[int, int | None]:
        """How few and how many of something a schema allows.

        Args:
            least, most: what the schema calls these.

        Raises:
            ConstraintError: they are no limits.
        """
        fewest, largest = kind.get(least, 0), kind.get(most)
        for name, limit in ((least, fewest), (most, largest)):
            if name in kind and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
                raise ConstraintError(
                    f"{self._tool!r} has a parameter {key!r} with {name!r} that is no whole number from 0 on"
                )
        if largest is not None and fewest > largest:
            raise ConstraintError(f"{self._tool!r} has a parameter {key!r} with {least!r} over its {most!r}")
        return fewest, largest

    def _bounds(self, key: str, kind: Mapping[str, Any]) -> list[str]:
        """What a text must be besides by its schema, as terminals.

        Raises:
            ConstraintError: the schema has more than is supported of texts.
        """
        if "format" in kind:
            raise ConstraintError(
                f"{self._tool!r} has a parameter {key!r} with 'format', which is not supported for this model; use a"
                " pattern"
            )
        bounds = []
        if isinstance(pattern := kind.get("pattern"), str):
            begun, ended = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
            inner = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern[begun : len(pattern) - ended])
            bounds.append(f"/{'' if begun else _ANY}({inner}){'' if ended else _ANY}/")
        least, most = self._limits(key, kind, "minLength", "maxLength")
        if least or most is not None:
            bounds.append(rf"/(.|\n){{{least},{'' if most is None else most}}}/")
        return bounds

    def _rule(self, body: str) -> str:
        return self._named(f"{self._prefix}_{len(self.rules)}", body)

    def _terminal(self, *parts: str) -> str:
        return self._named(f"{self._prefix}_{len(self.rules)}".upper(), " & ".join(parts))

    def _named(self, name: str, body: str) -> str:
        """The name of a rule, which may be there already."""
        if body not in self._names:
            self._names[body] = name
            self.rules.append(f"{name}: {body}")
        return self._names[body]


def _are_properties(required: object, properties: Mapping[str, Any]) -> bool:
    return isinstance(required, list) and all(isinstance(key, str) and key in properties for key in required)


def _are_apart(schemas: Sequence[Any]) -> bool:
    """Whether no value is valid by two of these schemas, as far as their types tell."""
    types = [type_ for schema in schemas for type_ in types_of(schema)]
    return all(map(types_of, schemas)) and len(types) == len(set(types)) and not {"integer", "number"} <= set(types)


def _from_within(schema: Any) -> Any:
    """A part of a schema in which what is referred to is found where `_ROOT` says, not in the part itself."""
    if isinstance(schema, list):
        return [_from_within(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    found = {key: _from_within(each) for key, each in schema.items()}
    ref = found.get("$ref")
    if isinstance(ref, str) and (ref == "#" or ref.startswith("#/")):
        found["$ref"] = _ROOT + ref[1:]
    return found
