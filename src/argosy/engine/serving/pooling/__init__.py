"""Pooling requests: embeddings of texts, scores of pairs of texts, and probabilities of labels.

The `PoolingProcessor` validates and tokenizes inputs and turns the vectors of the core into results. The
`PoolingService` runs its requests on an `EngineClient`, beside any others. Both need no torch.
"""

from argosy.engine.pooling import PoolingInfo, PoolingTask
from argosy.engine.serving.pooling.pooling_processor import PoolingProcessor
from argosy.engine.serving.pooling.pooling_service import PoolingService
from argosy.engine.serving.pooling.results import Classes, Embeddings, Scores

__all__ = [
    "Classes",
    "Embeddings",
    "PoolingInfo",
    "PoolingProcessor",
    "PoolingService",
    "PoolingTask",
    "Scores",
]
