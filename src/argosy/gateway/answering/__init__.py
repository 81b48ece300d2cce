"""From a request to its answer: queued, tried until a replica answers, and passed on as it comes."""

from argosy.gateway.answering.dispatch import RETRY_AFTER_S, unavailable
from argosy.gateway.answering.fast_path import FastPath, load_fast_path
from argosy.gateway.answering.serving import Serving

__all__ = ["RETRY_AFTER_S", "FastPath", "Serving", "load_fast_path", "unavailable"]
