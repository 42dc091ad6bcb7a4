"""Engines compute a rank's graph: a package for each, and in files what they share, beginning with `engine`.

Engines are found through the entry-point group ``motley.engines``; those of others can be installed beside these.
"""

import os

# ONNX Runtime collects usage events for Microsoft from its import on; nobody who runs a model at home asked for that.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
