"""Four-bit floats (E2M1), of which MXFP4 and NVFP4 are made: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6.

Twice these are whole numbers, so int8 codes with half a block's scale hold every value without loss.
"""

from __future__ import annotations

import numpy as np

from motley.daemon.weights.quantise import ZERO_POINT
from motley.daemon.weights.spec import Encoding

LEVELS = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the value of every nibble."""
CODES = (LEVELS + ZERO_POINT[Encoding.INT8]).astype(np.uint8)
"""The int8 code of every nibble."""
