"""A rank worker behind an emulated network: ``python -m motley.bench.rank_over_link LINK``.

`LINK` is what `motley.bench.emulator.LinkSpec.parse` reads; everything else is as in `motley.daemon.rank`.
"""

from __future__ import annotations

import sys

from motley.bench.emulator import LinkSpec, Nic, sleep_exactly
from motley.daemon import rank

if __name__ == "__main__":
    link = LinkSpec.parse(sys.argv[1])
    sleep_exactly()
    sys.exit(rank.main(lambda number: Nic(link, seed=number).wrap))
