"""Diagnosis of prompts that miss the prefix cache: which tokens were lost, why, and what a fix would save.

A `PromptOutline` keeps the structure of a prompt as hashes, without its text. Earlier prompts are kept in a bounded
`PromptMemory`. The function `diagnose_prompt` compares a served prompt with earlier ones, and puts each of its tokens
in one class. A `PrefixTally` sums up the diagnoses of a project and model.
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
    mask_values,
    outline_prompt,
)
from argosy.policy.prefix_diagnosis.prompt_memory import PromptMemory
from argosy.policy.prefix_diagnosis.tally import PrefixFinding, PrefixReport, PrefixTally
