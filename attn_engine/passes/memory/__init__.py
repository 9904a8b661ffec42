"""From values to buffers: where tensors are held, how ops write them in place, what loops carry."""
