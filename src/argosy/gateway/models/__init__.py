"""The models that are served, and the pools that answer for them, as the settings have them now."""

from argosy.gateway.models.models import Models
from argosy.gateway.models.pools import Behind, read_models
from argosy.gateway.models.served import Served

__all__ = ["Behind", "Models", "Served", "read_models"]
