"""Engines. Found through the entry-point group ``motley.engines``, see `motley.plugins.engine`."""

import os

# ONNX Runtime collects usage events for Microsoft from its import on; nobody who runs a model at home asked for that.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
