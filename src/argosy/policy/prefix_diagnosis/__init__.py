"""Diagnosis of prompts that miss the prefix cache: which tokens were lost, why, and what a fix would save.

A `PromptOutline` keeps the structure of a prompt as hashes, without its text. `diagnose_prompt` compares the outline of
a served prompt with those of earlier ones, and puts each of its tokens in one class. `PromptMemory` keeps the earlier
ones within bounds.
"""

from argosy.policy.prefix_diagnosis.diagnosis import (
    PlacementCause,
    PrefixDiagnosis,
    PromptCause,
    ServedPrompt,
    diagnose_prompt,
)
from argosy.policy.prefix_diagnosis.outline import (
    PromptOutline,
    PromptSegment,
    SegmentKind,
    outline_prompt,
)
from argosy.policy.prefix_diagnosis.prompt_memory import PromptMemory

__all__ = [
    "PlacementCause",
    "PrefixDiagnosis",
    "PromptCause",
    "PromptMemory",
    "PromptOutline",
    "PromptSegment",
    "SegmentKind",
    "ServedPrompt",
    "diagnose_prompt",
    "outline_prompt",
]
