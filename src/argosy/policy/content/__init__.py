"""Filters of texts and JSON documents for personal data, secrets, and words that an operator forbids.

A `Matcher` is compiled from rules: a `Detector`, one of `DETECTORS` or an operator's, and the `Action` for its matches.
A `TextFilter` or a `JsonFilter` is the state of one text that arrives in chunks. Its output does not depend on how the
text is divided.
"""

from argosy.policy.content.detectors import (
    DETECTORS,
    MARKUP_DETECTORS,
    Action,
    Detector,
    create_custom_detector,
    create_word_detector,
)
from argosy.policy.content.json_filter import JsonFilter
from argosy.policy.content.pattern_prefixes import BoundedPattern, PatternError
from argosy.policy.content.text_filter import Matcher, Rule, TextFilter
