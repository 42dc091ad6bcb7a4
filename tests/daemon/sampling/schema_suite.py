"""How much of JSON Schema constraints keep: ``python -m tests.daemon.sampling.schema_suite FOLDER``.

The folder is of the official suite (https://github.com/json-schema-org/JSON-Schema-Test-Suite), such as
``tests/draft2020-12``; the sdist of `jsonschema` has it under ``json``. For each keyword it tells

- of how many schemas constraints are refused (by name, with 400), and of how many they are kept;
- of what is kept, how many of the suite's valid documents may come, and how many invalid ones may not;
- how many of some answers, drawn at random from what may come, are valid by `jsonschema`.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from motley.daemon.sampling.constraint import Constraint, ConstraintError
from motley.daemon.text.tokenizer import Tokenizer
from motley.protocol import mesh_pb2 as pb
from tests.e2e.processes import BUNDLED

TOKENIZER = Tokenizer.load(Path(BUNDLED))
DRAWN = 3
"""Answers to each schema."""
LONGEST = 400
"""Tokens; answers that are not whole by then do not count."""


def constraint_of(schema: object) -> Constraint | str:
    """The constraint of a schema, or why there is none."""
    try:
        return Constraint(pb.Constraint(json_schema=json.dumps(schema)), TOKENIZER.words)
    except ConstraintError as error:
        return str(error)


def may_come(schema: object, document: object) -> bool:
    """Whether a document may come as a whole, written without whitespace."""
    constraint = constraint_of(schema)
    assert isinstance(constraint, Constraint)
    tokens = TOKENIZER.encode(json.dumps(document, separators=(",", ":"), ensure_ascii=False))
    for at, token in enumerate(tokens):
        mask = constraint.masks(tokens[:at], [])[0]
        if constraint.trouble or not mask[token // 32] >> token % 32 & 1:
            return False
    mask = constraint.masks(tokens, [])[0]
    return constraint.ends(tokens) or any(mask[end // 32] >> end % 32 & 1 for end in TOKENIZER.stop_tokens)


def drawn(schema: object, seed: int) -> str | None:
    """An answer at random; None: it is not whole after `LONGEST` tokens."""
    constraint = constraint_of(schema)
    assert isinstance(constraint, Constraint)
    draw, tokens = np.random.default_rng(seed), list[int]()
    while not constraint.ends(tokens):
        if len(tokens) == LONGEST:
            return None
        bits = np.unpackbits(constraint.masks(tokens, [])[0].view(np.uint8), bitorder="little")
        token = int(draw.choice(np.flatnonzero(bits[: TOKENIZER.vocabulary])))
        assert not constraint.trouble, constraint.trouble
        if token in TOKENIZER.stop_tokens:
            break
        tokens.append(token)
    return TOKENIZER.decode(tokens)


def is_valid(schema: Any, text: str) -> bool:
    """Whether an answer is JSON that is valid by its schema."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def examine(folder: Path) -> Counter[str]:
    """Count all of it over the suite's files, and print the counts of each."""
    total = Counter[str]()
    for file in sorted(folder.glob("*.json")):
        found, whys = Counter[str](), Counter[str]()
        for group in json.loads(file.read_text("utf-8")):
            schema = group["schema"]
            if isinstance(why := constraint_of(schema), str):
                found["refused"] += 1
                whys[why[:90]] += 1
                continue
            found["kept"] += 1
            for test in group["tests"]:
                kind = "valid" if test["valid"] else "invalid"
                found[kind] += 1
                if may_come(schema, test["data"]) == test["valid"]:
                    found[f"{kind} right"] += 1
                else:
                    print(f"    {file.stem}: {group['description']}: {test['description']} ({kind})")
            for seed in range(DRAWN):
                if (text := drawn(schema, seed)) is not None:
                    found["drawn"] += 1
                    if is_valid(schema, text):
                        found["drawn right"] += 1
                    else:
                        print(f"    {file.stem}: {group['description']}: drawn {text[:80]!r}")
        print(file.stem, dict(found), dict(whys.most_common(2)), flush=True)
        total += found
    return total


if __name__ == "__main__":
    print(dict(examine(Path(sys.argv[1]))))
