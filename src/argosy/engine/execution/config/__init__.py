"""Readers of a checkpoint's JSON files: config.json, generation_config.json, and those of sentence-transformers."""
