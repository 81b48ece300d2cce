"""Environment of processes that compute. Quick to import."""

COMPUTE_ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}
"""Default environment variables of processes that compute with torch, set before torch is imported.

OpenMP threads that wait for each other spin for about ten microseconds and then sleep
(docs/decisions/0004-short-spin.md)."""
