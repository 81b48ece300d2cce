"""Constrained sampling: compiles grammars for a tokenizer, and computes which tokens each sequence may sample next.

`build_grammar_tokenizer` converts a tokenizer for llguidance. The `GrammarCompiler` compiles grammar texts in threads
and caches the results. A `TokenConstraint` follows one sequence through its reasoning block and its grammar.
`RowMasks` keeps the constraints of the rows of a batch, and fills their masks while the model computes. The package
imports neither torch nor asyncio.
"""

from argosy.engine.grammar.compiler import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarTokenizer,
    build_grammar_tokenizer,
)
from argosy.engine.grammar.row_masks import MaskBatch, PendingMasks, RowMasks
from argosy.engine.grammar.token_constraint import (
    DEAD_END_CODE,
    TokenConstraint,
    end_token_ids,
    is_constrained,
)
