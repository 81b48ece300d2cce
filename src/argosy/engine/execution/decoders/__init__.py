"""Decoders: Argosy's own (`decoder`), and any causal model that transformers implements.

`generic_builder` builds a model with transformers and traces its forward pass, `generic_loader` replaces its modules by
those of the device and loads the weights, and `generic_decoder` runs it.
"""
