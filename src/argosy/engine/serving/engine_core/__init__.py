"""The engine core process and the client that supervises it.

An `EngineClient` in the replica server starts the core process through a `CoreHandle` and sends it requests. The
process (`core_process`) runs an `EngineCore`, which schedules and executes steps and reports deltas and statistics. A
`HeartbeatMonitor` detects a core that hangs, and the client then kills and restarts it. Requests in flight are kept by
`InFlightRequests` and continue on the next core after their last token. The `KvCacheView` tracks the blocks of the
core's prefix cache for the KV event stream.
"""
