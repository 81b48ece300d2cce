"""Settings of the gateways that a fleet's controller starts."""

from __future__ import annotations

import msgspec

from argosy.deployment.declaration.config import FleetConfig
from argosy.deployment.settings.gateway_config import GatewayConfig, ModelConfig

_GATEWAY_FIELDS = GatewayConfig.__struct_fields__
_MODEL_FIELDS = ModelConfig.__struct_fields__


def build_gateway_config(config: FleetConfig, ordinal: int = 0) -> GatewayConfig:
    """Build the settings of one of the controller's gateways, without what only the controller needs.

    Args:
        config: The fleet's declaration.
        ordinal: Number of the gateway. Each listens on a port of its own.
    """
    settings = {name: getattr(config, name) for name in _GATEWAY_FIELDS}
    models = [
        ModelConfig(**{name: getattr(model, name) for name in _MODEL_FIELDS})
        for model in config.models
    ]
    port = config.port + ordinal if config.port else 0
    return msgspec.structs.replace(GatewayConfig(**settings), models=models, port=port)
