"""`AutoModelForCausalLM` of transformers 5.24, told of the text models that it knows beside images only."""

from __future__ import annotations

from transformers import (
    AutoModelForCausalLM,
    CohereCompassConfig,
    CohereCompassForConditionalGeneration,
    Glm5NextConfig,
    Glm5NextForConditionalGeneration,
    HYV4VLConfig,
    HYV4VLForConditionalGeneration,
    Mistral4Config,
    Mistral4ForCausalLM,
    MuseGlimmerConfig,
    MuseGlimmerForConditionalGeneration,
    Step3p7Config,
    Step3p7ForConditionalGeneration,
)

AutoModelForCausalLM.register(CohereCompassConfig, CohereCompassForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Glm5NextConfig, Glm5NextForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(HYV4VLConfig, HYV4VLForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
AutoModelForCausalLM.register(MuseGlimmerConfig, MuseGlimmerForConditionalGeneration, exist_ok=True)
AutoModelForCausalLM.register(Step3p7Config, Step3p7ForConditionalGeneration, exist_ok=True)

__all__ = ["AutoModelForCausalLM"]
