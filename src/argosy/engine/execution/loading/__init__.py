"""Loader of models: from the name of a model to an executor that has proven itself.

`executor_loader` finds the checkpoint, chooses implementation (`model_selection`) and formats, estimates the memory
(`memory`), loads the weights (`weight_loader`) and runs the `self_test`. `arithmetic` names all that decides
the bytes of outputs.
"""
