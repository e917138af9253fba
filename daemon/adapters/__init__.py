"""The adapters of the state directory: what an owner adds and removes, and what is served."""
