"""Rendering of chat templates in other processes, within bounds of time, memory and output.

A `TemplateRenderer` keeps a pool of `render_process`es. This package imports little, so that they start quickly.
"""
