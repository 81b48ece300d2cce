"""Adapters (LoRA) of a decoder: they are read and checked, packed for the device, and applied to rows of a batch.

`read_adapter` reads a folder in PEFT's format. Fields and tensors that it does not honour are refused by name.
`build_adapter` combines the tensors with the model's matrices. `AdapterTable` keeps an executor's adapters in slots.
"""

from __future__ import annotations

from argosy.engine.execution.adapters.adapter_builder import build_adapter
from argosy.engine.execution.adapters.adapter_table import AdapterTable
from argosy.engine.execution.adapters.peft_config import PeftConfig, parse_peft_config
from argosy.engine.execution.adapters.peft_reader import StoredAdapter, read_adapter
