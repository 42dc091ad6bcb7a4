"""What the system starts for the service: the `motley` command of its settings, `-m motley.cli.service.run HOME`.

HOME is the folder of ``MOTLEY_HOME`` when the service was made: the system may start it without that variable. Services
that an earlier Motley has made have none.
"""

from __future__ import annotations

import contextlib
import os
import sys

from motley.cli.errors import CliError
from motley.cli.reaching.home import home
from motley.cli.service.settings import load, log_file


def main() -> None:
    """Run the command until the system ends it."""
    if len(sys.argv) > 1 and sys.argv[1] != str(home().absolute()):
        os.environ["MOTLEY_HOME"] = sys.argv[1]  # not where it is the usual one: shares have another then
    if sys.platform == "win32":  # where a task has no terminal, and nobody keeps what it says
        log = log_file()
        log.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(OSError):  # there is none, or somebody has it open: then this goes on behind it
            os.replace(log, log.with_suffix(".old.log"))
        sys.stdout = sys.stderr = log.open("a", encoding="utf-8", buffering=1)
    try:
        settings = load()
    except CliError as error:
        sys.exit(f"motley: {error}")
    if settings.token:
        os.environ["MOTLEY_TOKEN"] = settings.token
    sys.argv = ["motley", *settings.arguments]
    from motley.cli.main import main as motley

    motley()


if __name__ == "__main__":
    main()
