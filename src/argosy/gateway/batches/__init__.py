"""Batches: requests without a waiting client, answered in the slots that online requests leave free.

`build_batch_routes` has the APIs, which keep batches and their lines in the store. The `BatchDispatcher` of each
gateway claims lines, runs them as requests without a client, and writes their results. `BatchUpkeep` ends batches and
releases the claims of gateways that have stopped.
"""

from argosy.gateway.batches.batch_line import BATCH_PATHS
from argosy.gateway.batches.batch_routes import build_batch_routes
from argosy.gateway.batches.batch_upkeep import BatchUpkeep
from argosy.gateway.batches.dispatcher import BatchDispatcher
