"""Benchmarks measure what they say, on small models."""
