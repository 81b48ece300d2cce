"""Layers of the decoder: attention in its forms, mixtures of experts, and the modules that they are built from."""
