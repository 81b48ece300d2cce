"""Validation and preprocessing of request bodies.

The `RequestProcessor` turns a body into a `ResponseSpec`, with the `EngineRequest` of each choice, or raises an
`ApiError` (400) that names the parameter. Its rules are in `argosy.protocol` and `sampling_params`, which derives each
choice's sampling parameters. Chat messages are normalised by `chat_messages` for the chat template. The
`PromptTokenizer` turns prompts into token ids at a cost bounded by the model's context. Everything here runs before the
request reaches the engine core, so later stages need no validation.
"""
