"""The engines that are measured, a module for each; it runs in that engine's own environment and process."""
