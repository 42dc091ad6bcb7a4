"""Runs a rank worker that does not ask twice because this machine is busy, so that calls can be counted:
``python -m tests.bench.measurements.speed.patient_rank MODULE ...``.
"""

from __future__ import annotations

import runpy
import sys

from motley.daemon.experts import asked_host

asked_host.PATIENCE_S = 3.0
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__")
