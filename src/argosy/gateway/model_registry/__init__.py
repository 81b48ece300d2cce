"""The models that are served, and the pools that answer for them, as the settings have them now."""

from argosy.gateway.model_registry.model_entries import Behind, read_models
from argosy.gateway.model_registry.model_router import Models
from argosy.gateway.model_registry.registry import Served

__all__ = ["Behind", "Models", "Served", "read_models"]
