"""Pooling requests: embeddings of texts, scores of pairs of texts, and probabilities of labels.

The `PoolingProcessor` validates and tokenizes the inputs of a call. It returns a `PoolingJob`, whose requests run on an
`EngineClient` beside any others, and which computes a `PoolingResult` from their vectors. No part needs torch.
"""

from argosy.engine.pooling import PoolingInfo, PoolingTask
from argosy.engine.serving.pooling.pooling_job import PoolingJob, PoolingResult, read_vector
from argosy.engine.serving.pooling.pooling_processor import PoolingProcessor
