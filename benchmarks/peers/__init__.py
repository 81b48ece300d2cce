"""Adapters of the measured engines, one module per engine. Each runs in that engine's environment and process."""
