"""TensorRT plans behind the `Engine` protocol."""
