"""The models that are served, and the pools that answer for them, as the settings have them now."""

from argosy.gateway.model_registry.model_entries import ModelEntries, build_model_entries
from argosy.gateway.model_registry.model_router import ModelRouter
from argosy.gateway.model_registry.registry import ModelRegistry

__all__ = ["ModelEntries", "ModelRegistry", "ModelRouter", "build_model_entries"]
