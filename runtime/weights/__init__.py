"""Weights outside of an engine, which serves every model of its shape."""
