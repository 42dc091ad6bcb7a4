"""Makes the golden files: small adapters of golden models, as PEFT writes them, with what PEFT computes with them.

Run with torch, transformers and peft installed: ``python -m tests.adapters.make_golden``. A case is an adapter's folder
with ``expected.npz``: the ``logits`` f32[T, V] of the tokens of the model's case.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import torch

from tests.adapters.peft_models import SETTINGS, make_adapter, peft_logits
from tests.models.cases import golden_case

GOLDEN = Path(__file__).parent / "golden"
KINDS = (torch.float32, torch.bfloat16, torch.float16)
CASES = {
    "gemma3-softcaps": "pattern",
    "gpt-oss": "attention",
    "llama-mha": "uneven",
    "olmo2": "attention",
    "phi3": "fused",
    "qwen2": "all",
    "qwen3-biases-some-windows": "some layers",
}
"""The settings of the adapter of each model's case."""


def main() -> None:
    for number, (name, settings) in enumerate(CASES.items()):
        case, folder = golden_case(name), GOLDEN / name
        shutil.rmtree(folder, ignore_errors=True)
        make_adapter(case.folder, folder, SETTINGS[settings], number, KINDS[number % len(KINDS)])
        (folder / "README.md").unlink(missing_ok=True)
        config = folder / "adapter_config.json"
        keys = json.loads(config.read_text()) | {"base_model_name_or_path": name}  # no path of whoever made it
        config.write_text(json.dumps(keys, indent=1, sort_keys=True) + "\n")
        logits = peft_logits(case.folder, folder, case.tokens)
        np.savez_compressed(folder / "expected.npz", logits=logits)
        print(json.dumps({"case": name, "largest_logit": float(np.abs(logits).max())}))


if __name__ == "__main__":
    main()
