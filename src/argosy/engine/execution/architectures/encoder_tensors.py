"""Names under which a checkpoint stores the parameters of an encoder."""

from __future__ import annotations

from argosy.engine.execution.architectures.encoder import EncoderArchitecture
from argosy.engine.execution.architectures.encoder_families import ENCODER_FAMILIES


def encoder_tensor_names(
    architecture: EncoderArchitecture, parameter: str
) -> tuple[tuple[str, ...], ...]:
    """Return the alternatives in which a checkpoint may store a parameter of the encoder, most common first."""
    family = ENCODER_FAMILIES[architecture.family]
    module, _, kind = parameter.rpartition(".")
    if module.startswith("head."):
        return (tuple(f"{name}.{kind}" for name in family.head_names[module]),)
    layer = ""
    if module.startswith("layers."):
        _, layer, module = module.split(".", 2)
    names = [name.replace("{i}", layer) for name in family.tensor_names[module]]
    kinds = [kind]
    if names[0].endswith("LayerNorm"):  # in checkpoints that were converted from TensorFlow
        kinds.append({"weight": "gamma", "bias": "beta"}[kind])
    return tuple(
        tuple(f"{prefix}{name}.{each}" for name in names)
        for each in kinds
        for prefix in (family.prefix, "")
    )
