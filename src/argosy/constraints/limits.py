"""Limits of constraints. They bound time, memory and recursion of compilation.

llguidance compiles recursively and without a limit on rules and references: a chain of 3,000 rules or of 5,000
references overflows the stack of the process. Therefore nesting is limited before a grammar reaches the library.
"""

from __future__ import annotations

from llguidance import LLParserLimits

MAX_SCHEMA_BYTES = 65_536
"""Size of one JSON schema."""
MAX_GRAMMAR_BYTES = 65_536
"""Size of one grammar, regular expression or list of choices from a request."""
MAX_GRAMMAR_TEXT_BYTES = 512 << 10
"""Size of the whole grammar of a request, with all its tools. The engine has the same limit."""
MAX_SCHEMA_DEPTH = 48
"""Nesting of subschemas within one schema."""
MAX_COMPILED_DEPTH = 100
"""Nesting of subschemas with references followed. The library overflows the stack beyond about 1,000."""
MAX_PROPERTIES = 1_000
"""Properties of all subschemas together."""
MAX_SUBSCHEMAS = 5_000
MAX_ENUM_VALUES = 5_000
"""Values of all enumerations together."""
MAX_PATTERNS = 200
"""Distinct regular expressions of one schema."""
MAX_ONE_OF = 100
"""Alternatives of one `oneOf`, which are compared with one another."""
MAX_COUNT = 1_000_000
"""Largest length, number of items or number of properties that a grammar counts to."""
MAX_EXACT_INTEGER = 2**53
"""Largest integer that the library handles exactly. It crashes on the smallest 64-bit integer."""
MAX_EXACT_EXPONENT = 22
"""Largest power of ten, up and down, that the library multiplies with exactly."""
MAX_MULTIPLE = 10_000
"""Largest divisor, without its decimal point, that `multipleOf` compiles to."""
MAX_REPETITION = 1_000
"""Product of nested counted repetitions in a regular expression. States grow with it, in the worst case faster."""
MAX_RULES = 500
"""Rules of one grammar from a request."""

PARSER_LIMITS = LLParserLimits(initial_lexer_fuel=300_000, verbose_errors=False)
"""Limits for grammars that are checked without a tokenizer. The engine has limits of its own, for its masks too.

The fuel bounds the first mask of `((a{100}){100}){100}` to 0.3 s and 50 MB (1.6 s and 165 MB with the library's
default). Errors do not contain the text of the request.
"""
