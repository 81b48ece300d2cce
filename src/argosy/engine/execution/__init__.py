"""Executor, which loads a model, computes step plans on a device, and samples tokens.

`executor_loader` resolves the checkpoint, reads its config.json into a `ModelArchitecture`, and loads its weights into
a `Decoder`. All hardware differences are behind `Device`, which creates linear layers, norms and paged attention for
the CPU (native kernels or torch) or a GPU. The `TorchExecutor` keeps running sequences in a `PersistentBatch`. For each
`StepPlan` it moves KV blocks, gathers a `Batch`, runs the decoder, and samples with the `Sampler`. The result for a
token depends only on its own sequence, bit for bit, whatever else is in the batch.
"""
