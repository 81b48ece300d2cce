"""Executor, which loads a model, computes step plans on a device, and samples tokens.

The packages are layers, each of which imports only those before it. Packages `config` and `checkpoint_formats` read
files, and `architectures` describes models. Package `kernels` computes on a `Device`. The models are in `layers`,
`decoders` and `encoders`. Package `executor` runs step plans, `drafting` guesses tokens that a step then verifies, and
`loading` makes an executor of a checkpoint. The result for a token depends only on its own sequence, bit for bit,
whatever else is in the batch.
"""
