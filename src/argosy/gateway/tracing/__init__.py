"""Export of traces by OTLP, built from the trace of a request when it ends."""

from argosy.gateway.tracing.span_exporter import SpanExporter

__all__ = ["SpanExporter"]
