"""``python -m motley.plugins.nccl``: print the path of the library, for programs that want to be told."""

import sys

from .codes import NcclError
from .library import library

if __name__ == "__main__":
    try:
        print(library())
    except NcclError as error:
        sys.exit(str(error))
