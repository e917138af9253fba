"""Weights that lie outside of an engine, which so serves every model of its shape."""
