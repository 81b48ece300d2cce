"""Executors of step plans, with the state of running sequences.

An executor keeps running sequences in a `PersistentBatch`. For each `StepPlan` it moves KV blocks, gathers a `Batch`
and runs the model. Then the `Sampler` samples tokens, or the `Pooler` reduces hidden states to vectors.
"""
