"""Argosy: a self-hosted LLM serving fleet."""
