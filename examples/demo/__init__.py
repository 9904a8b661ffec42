"""The whole road in two minutes: an attention in Python, its IR at each stage, and a language model trained with it."""
