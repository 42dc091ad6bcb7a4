"""Adds the docstrings of fields to a JSON schema, which tells clients what the API takes.

pydantic's own ``use_attribute_docstrings`` reads sources whenever a schema is imported, a tenth of a second of a
processor in all.
"""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any


def add_docstrings(schema: dict[str, Any], described: type[Any]) -> None:
    """Describe the properties of a class's JSON schema by the docstrings of its fields: as ``json_schema_extra``."""
    told: dict[str, str] = {}
    for each in described.__mro__:
        if each.__module__.startswith("motley."):
            told = {**_of_module(each.__module__).get(each.__name__, {}), **told}
    aliases = {field.alias: name for name, field in getattr(described, "model_fields", {}).items()}
    for called, value in schema.get("properties", {}).items():
        if (name := aliases.get(called, called)) in told:
            value.setdefault("description", told[name])


@cache
def _of_module(name: str) -> Mapping[str, Mapping[str, str]]:
    """The docstrings of fields by class."""
    body = ast.parse(inspect.getsource(sys.modules[name])).body
    return {
        node.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in zip(node.body, node.body[1:], strict=False)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        }
        for node in body
        if isinstance(node, ast.ClassDef)
    }
