"""Benchmarks of the engine, the gateway and the kernels. Each prints JSON lines, and `record` saves them as data.

The module `engine` compares Argosy with other engines on the workloads of `workloads`. Every engine of `peers` runs in
its own process. The module `gateway` compares the gateway with other `proxies`, with the load generator of `wire`. The
modules `chaos`, `fairness` and `tiers` measure behaviour under faults and contention. The other modules time single
parts of the engine.
"""
