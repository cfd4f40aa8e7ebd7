"""Prometheus metrics with vLLM's names."""
