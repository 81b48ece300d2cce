"""From a request to its answer: queued, tried until a replica answers, and passed on as it comes."""

from argosy.gateway.proxy.dispatcher import RETRY_AFTER_S, no_replica_error
from argosy.gateway.proxy.fast_path import FastPath, load_fast_path
from argosy.gateway.proxy.handlers import CompletionHandlers

__all__ = ["RETRY_AFTER_S", "CompletionHandlers", "FastPath", "load_fast_path", "no_replica_error"]
