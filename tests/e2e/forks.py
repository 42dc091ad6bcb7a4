"""The process that `motley` commands of tests are forked from: it has imported all that they need."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from motley.cli.main import main
from motley.daemon.machine.importing import imports_that_stay

ROOT = Path(__file__).parents[2]
COMMAND = "FORKED_COMMAND"
"""The environment variable with a command: the module that is run, and its arguments, in JSON."""
MODULES = ("motley.cli.main", "tests.e2e.node")
FORKS, NO_WORKER = "motley-forks", "motley-child"
"""The names of the process that a node's workers are forked from, and of one that is forked there and is no worker."""


def run_command() -> int:
    """Do what the environment says; gives the exit status."""
    module, *arguments = json.loads(os.environ.pop(COMMAND))
    os.chdir(ROOT)
    sys.argv = ["motley", *arguments]
    if module == "tests.e2e.node":
        measure_less()
        fork_beforehand()
    try:
        main()
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    with imports_that_stay():
        import numpy.ma
        import numpy.random  # noqa: F401
        import typer.main

        import motley.cli.app
        import motley.orchestrator.app
        import motley.plugins.onnxruntime.engine
        import motley.plugins.reference.engine
        from motley.daemon.worker import fork_server  # which there is on Linux alone
        from tests.e2e.beforehand import fork_beforehand
        from tests.e2e.command_tree import keep_command_tree
        from tests.e2e.node import measure_less
    keep_command_tree()
    typer.main.get_command(motley.cli.app.app)
    fork_server.main(run_command)
    fork_server.end_process()
