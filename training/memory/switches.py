"""Which of the ways to spare memory a training uses, as the command line names them."""

from __future__ import annotations

from motley.training.errors import TrainingError

INT4, LAYERS, NEAR, LABELS = SWITCHES = ("int4", "layers", "near", "labels")
"""Base weights in int4, head and embedding in int8, dequantised on the fly; one layer in memory at a time, the weights
and inputs of the others on disk, computed again on the way back; a softmax over tokens near to those that are learnt;
logits only where there are labels."""
TIGHT = "tight"
"""All of `SWITCHES`."""


def parse_switches(text: str) -> tuple[str, ...]:
    """Read ``tight``, or some of `SWITCHES` with commas between them; in their order.

    Raises:
        TrainingError: one is called otherwise.
    """
    names = {name.strip() for name in text.split(",") if name.strip()}
    if names == {TIGHT}:
        return SWITCHES
    if unknown := names - set(SWITCHES):
        raise TrainingError(
            f"memory: {', '.join(sorted(unknown))} is not known; there are {TIGHT}, or some of {', '.join(SWITCHES)}"
        )
    return tuple(name for name in SWITCHES if name in names)
