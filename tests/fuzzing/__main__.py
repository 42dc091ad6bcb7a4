"""``python -m tests.fuzzing TARGET CORPUS [OPTION]...``: fuzzes a parser; options are libFuzzer's."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["motley"]):
    from tests.fuzzing.targets import TARGETS

if __name__ == "__main__":
    name, *options = sys.argv[1:]
    atheris.Setup([sys.argv[0], *options], TARGETS[name])
    atheris.Fuzz()
