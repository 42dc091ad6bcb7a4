"""The reference of all commands, in Markdown: `python -m motley.cli.reference docs/commands.md`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HEAD = """# Commands

Made of what `--help` says, by `make docs`. `VALUE...` may be given several times. Where a command prints data, `--json`
prints it for programs. Without `--url`, a command finds the mesh of this machine: that which it runs, or has joined.
"""


def reference() -> str:
    """All commands with their arguments and options, as `docs/commands.md` has them."""
    import typer

    from motley.cli.app import app

    return HEAD + "\n" + "\n".join(_sections("motley", typer.main.get_command(app)))


# Commands are `Any`: newer versions of Typer bring a copy of Click, older ones used Click; both have what is read.
def _sections(name: str, command: Any) -> Iterator[str]:
    """A section of each command below `command`; groups first say what they are about."""
    for word, each in command.commands.items():
        whole = f"{name} {word}"
        if hasattr(each, "commands"):
            yield f"## {whole}\n\n{_prose(each.help)}\n"
            yield from (section.replace("## ", "### ", 1) for section in _sections(whole, each))
        else:
            yield _section(whole, each)


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
    usage = " ".join([name, *(_argument(each) for each in arguments), *(["[OPTIONS]"] if options else [])])
    rows = [f"| `{_argument(each)}` | {_cell(each)} |" for each in arguments]
    rows += [f"| {_option(each)} | {_cell(each)} |" for each in options]
    table = "\n".join(["| | |", "|---|---|", *rows, ""]) if rows else ""
    example = re.sub(r"\x08|Examples?: *", "", command.epilog or "")
    lines = "\n".join(line.strip() for line in re.split(r"   +|\n", example) if line.strip())
    shown = f"```console\n{lines}\n```\n" if lines else ""
    return "\n".join(filter(None, [f"## {name}\n", f"`{usage}`: {_prose(command.help)}\n", shown, table]))


def _argument(argument: Any) -> str:
    name = (argument.metavar or argument.name.upper().strip("_")).removeprefix("[").removesuffix("]")
    name += "..." if argument.nargs == -1 else ""
    return name if argument.required else f"[{name}]"


def _option(option: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    if option.is_flag:
        return names
    value = (option.metavar or "VALUE").replace("|", "\\|")
    return f"{names} `{value}{'...' if option.multiple else ''}`"


def _cell(parameter: Any) -> str:
    """What a parameter is for, and what it is without being given."""
    told = _prose(getattr(parameter, "help", "")).replace("|", "\\|")
    default = parameter.default
    if isinstance(parameter.show_default, str):
        told += f" Default: {parameter.show_default}."
    elif isinstance(default, (str, int, float)) and not isinstance(default, bool) and str(default):
        told += f" Default: `{default}`."
    return told + (f" Or `{parameter.envvar}` in the environment." if getattr(parameter, "envvar", "") else "")


def _prose(text: str | None) -> str:
    """Help, as one paragraph, that Markdown shows as it is."""
    return " ".join((text or "").split()).replace("\\[", "[").replace("<", "&lt;")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(reference(), "utf-8", newline="\n")
