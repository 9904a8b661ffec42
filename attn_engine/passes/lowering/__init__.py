"""From tensors to blocks: the parts of `convert-attn-to-tile`."""
