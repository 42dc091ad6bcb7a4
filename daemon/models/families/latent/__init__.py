"""Families of models with latent attention, whose caches hold one small vector for all heads."""
