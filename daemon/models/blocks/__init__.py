"""Parts that families of models are written with: attention, MLPs, experts, recurrent layers."""
