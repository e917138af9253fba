"""The TensorRT side of an export: the graph as builders like it, and the plan they make of it."""
