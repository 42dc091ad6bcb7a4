"""`motley` in a process that may have only so many files open as the environment variable FILES says."""

from __future__ import annotations

import os
import resource

from motley.cli.main import main

if __name__ == "__main__":
    most = int(os.environ["FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    main()
