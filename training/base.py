"""A Hugging Face causal language model, frozen, with the adapters that are trained; and its tokenizer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from motley.training.errors import TrainingError, import_extra
from motley.training.lines import Render

if TYPE_CHECKING:
    from torch import nn

_CONTEXTS = ("max_position_embeddings", "n_positions", "context_length", "seq_length", "max_seq_len")
"""What configs call the number of tokens that their models read."""

_READ_BY_KERNELS = ("out_proj", "conv1d")
_WITH_KERNELS = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h")
"""Types of models, and their linear modules whose matrices kernels read themselves: adapters there would do nothing."""


def read_config(folder: Path) -> Any:
    """A model's config, as transformers has it.

    Raises:
        TrainingError: the extra is missing, or the folder holds no model that transformers knows.
    """
    import_extra("transformers")
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise TrainingError(f"{folder}: no model that transformers knows: {error}") from error


def load_base(folder: Path, *, half: bool = False) -> nn.Module:
    """Load a causal language model in float32, or in float16.

    Raises:
        TrainingError: the extra is missing, the folder holds no model, or one without a causal head.
    """
    import_extra("torch", "transformers", "peft")
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    config, dtype = read_config(folder), torch.float16 if half else torch.float32
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise TrainingError(f"{folder}: a model of type {config.model_type!r} has no causal language head")
    try:
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise TrainingError(f"{folder}: the model cannot be loaded: {error}") from error
    if missing := sorted(told["missing_keys"]):
        raise TrainingError(
            f"{folder}: the checkpoint lacks {', '.join(missing[:4])}: a model without a causal head, or incomplete"
        )
    _check_causal(model, folder)
    loaded: nn.Module = model
    return loaded


def _check_causal(model: Any, folder: Path) -> None:
    """See that a later token does not change what is said of an earlier one."""
    import torch

    with torch.no_grad():
        first, second = (model(torch.tensor([[1, 2, last]]), use_cache=False).logits[0, :2] for last in (1, 2))
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-4):
        raise TrainingError(f"{folder}: not a causal language model: its tokens see those after them")


def context_of(config: Any) -> int | None:
    """How many tokens a model reads at most; None: its config does not say."""
    values = [getattr(config, name, None) for name in _CONTEXTS]
    return next((value for value in values if isinstance(value, int)), None)


def with_adapters(model: nn.Module, rank: int, alpha: float, dropout: float, targets: Sequence[str]) -> nn.Module:
    """Freeze a model and give it LoRA's matrices, which alone are trained.

    Args:
        targets: names of the modules that get them, or of tensors that hold all experts of a layer, each of which gets
            its own; empty: every linear module but the head.

    Raises:
        TrainingError: none of them is called so, or experts are to have dropout.
    """
    from peft import LoraConfig, TaskType, get_peft_model
    from transformers.pytorch_utils import Conv1D

    fused = {name.rpartition(".")[2] for name, weight in model.named_parameters() if weight.dim() == 3}
    experts = [target for target in targets if target in fused]
    left_alone = [] if targets else _left_alone(model)
    config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=[target for target in targets if target not in fused] if targets else "all-linear",
        target_parameters=experts or None,
        exclude_modules=left_alone or None,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of peft, and what transformers tells it
            # Peft's own patterns for experts, where those get no adapters.
            warnings.filterwarnings("ignore", "The following (rank|alpha)_pattern", RuntimeWarning)
            adapted: nn.Module = get_peft_model(model, config)
    except ValueError as error:
        raise TrainingError(f"adapters cannot be made: {error}") from error
    return adapted


def _left_alone(model: Any) -> list[str]:
    """The linear modules, by the last part of their names, that no adapter can stand beside: what is no plain product
    (a router that returns more than that), and what kernels read themselves."""
    from torch import nn

    own_ways = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and type(module).forward is not nn.Linear.forward
    }
    kernels = _READ_BY_KERNELS if getattr(model.config, "model_type", "") in _WITH_KERNELS else ()
    return sorted(own_ways.union(kernels))


def save_adapter(model: nn.Module, folder: Path) -> None:
    """Write the adapters in PEFT's format."""
    model.save_pretrained(str(folder), save_embedding_layers=False)


class HubTokenizer:
    """A model's tokenizer and chat template, as `motley.training.examples.Encoder` and `Render`.

    Attributes:
        end: the token that ends a text; None: there is none.
        render: writes chats.
    """

    def __init__(self, folder: Path, template: Path | None) -> None:
        """
        Args:
            template: a file with a chat template to use instead of the model's.

        Raises:
            TrainingError: there is no tokenizer, or none that tells where its tokens are in a text.
        """
        import_extra("transformers")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            if template is not None:
                self._tokenizer.chat_template = template.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise TrainingError(f"{folder}: the tokenizer cannot be loaded: {error}") from error
        if not self._tokenizer.is_fast:
            raise TrainingError(f"{folder}: its tokenizer does not tell where tokens are in a text (no tokenizer.json)")
        self.end: int | None = self._tokenizer.eos_token_id
        self.render: Render = self._render

    def encode(self, text: str, whole: bool) -> tuple[list[int], list[tuple[int, int]]]:
        """See `Encoder.encode`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a text is longer than the model reads, which we see to
            told = self._tokenizer(text, add_special_tokens=not whole, return_offsets_mapping=True, verbose=False)
        return told["input_ids"], told["offset_mapping"]

    def _render(self, messages: Sequence[Mapping[str, Any]], opens: bool) -> str:
        if self._tokenizer.chat_template is None:
            raise TrainingError("a chat, but the model has no chat template: give one (--template)")
        try:
            text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opens)
        except Exception as error:  # the template is foreign code: it can raise anything
            raise TrainingError(f"the chat template refuses these messages: {error}") from error
        return text
