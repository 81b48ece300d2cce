"""Parsing of model output into reasoning, content and tool calls, and the formats of model families."""
