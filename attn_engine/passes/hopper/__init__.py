"""What the passes towards the async level share: the form of a forward kernel, slices, rows, carries."""
