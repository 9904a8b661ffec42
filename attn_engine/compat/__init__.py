"""Functions with the names and signatures of other libraries, so that a model switches by an import."""
