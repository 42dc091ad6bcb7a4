"""Measurements of Motley, and the models and meshes that they are taken on."""
