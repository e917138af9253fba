"""The vision variant of the shipped model: its pictures, its questions and its training."""
