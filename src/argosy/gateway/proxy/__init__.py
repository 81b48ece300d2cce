"""From a request to its answer: queued, tried until a replica answers, and passed on as it comes."""

from argosy.gateway.proxy.dispatcher import RETRY_AFTER_S, unavailable
from argosy.gateway.proxy.fast_path import FastPath, load_fast_path
from argosy.gateway.proxy.handlers import Serving

__all__ = ["RETRY_AFTER_S", "FastPath", "Serving", "load_fast_path", "unavailable"]
