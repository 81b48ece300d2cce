"""Constraints of generated output: from request fields to grammars, without a tokenizer and without torch.

The gateway and the replica share this package, so both refuse the same schemas.
"""
