"""HTTP server of a native replica.

A `ReplicaServer` listens, starts the engine and drains on SIGTERM. The `ReplicaApp` routes each request to a handler.
`GenerationHandlers` validate chats and completions, start a `Generation` in the engine and build the response. Whole
responses come from `responses`, and streams from an `EventWriter`, to which a `ResumeMetadataWriter` adds what a
gateway needs for failover. The `ReplicaState` holds the lifecycle, the running requests and the load report. KV cache
changes are streamed by `stream_kv_events`. `ReplicaPoolingHandlers` run the `PoolingEndpoint`s of models that embed,
score or classify.
"""
