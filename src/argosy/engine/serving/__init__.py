"""Serving stack of one native replica, from the HTTP socket to the engine core process.

The `api_server` package accepts HTTP requests. The `preprocessing` package validates each body and turns it into
`EngineRequest`s, with the tokenizer and the chat template of `text`. The `engine_core` package runs the scheduler and
the model in a separate process, and restarts that process after a crash. Both processes exchange the messages of
`core_messages` over ZeroMQ. Deltas from the core are converted to text and sent to the client as JSON or as server-sent
events.
"""
