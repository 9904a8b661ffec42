"""How types, layouts and scalar ops are spelled in Gluon."""

from attn_engine.backends.triton.gluon_types import BACKEND_NAME, dtype, layout_text, shared_layout, signature

__all__ = ["BACKEND_NAME", "dtype", "layout_text", "shared_layout", "signature"]
