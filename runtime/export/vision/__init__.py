"""The vision tower of a model: from a checkpoint into the folder `visual`."""
