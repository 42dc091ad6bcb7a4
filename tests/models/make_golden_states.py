"""Makes ``golden_states.npz``: what transformers computes before the head, for some of the golden cases.

Run with torch and transformers installed: ``python -m tests.models.make_golden_states``. Under the name of each case it
has f32[T, D]: hidden states of all of the case's tokens, behind the model's last norm, if it has one.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.models.cases import golden_case

FILE = Path(__file__).parent / "golden_states.npz"
CASES = (
    "gemma3-softcaps",
    "granite",
    "gpt-oss-mxfp4",
    "llama-mqa",
    "qwen3-biases-some-windows",
    "qwen3-next",
    "qwen4-exp",
)
"""With an offset of the norm's gain, a scale behind it, experts, a tied head, windows, recurrent states, no norm."""


def main() -> None:
    torch.set_num_threads(1)
    states = {}
    for name in CASES:
        case = golden_case(name)
        model = AutoModelForCausalLM.from_pretrained(
            case.folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        with torch.inference_mode():
            told = model(torch.tensor([case.tokens]), output_hidden_states=True)
        states[name] = told.hidden_states[-1][0].to(torch.float32).numpy()
    np.savez_compressed(FILE, **states)


if __name__ == "__main__":
    main()
