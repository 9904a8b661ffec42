"""A compiler for attention that its users define: one definition, every kernel, every gradient.

Public names load on first use, so that tools on IR text start without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attn_engine import errors as errors
    from attn_engine import flex as flex
    from attn_engine import library as library
    from attn_engine import masks as masks
    from attn_engine.errors import AttnEngineError as AttnEngineError
    from attn_engine.flex import flex_attention as flex_attention
    from attn_engine.frontend.custom_io import CustomIO as CustomIO
    from attn_engine.frontend.custom_io import MetaTensor as MetaTensor
    from attn_engine.frontend.custom_io import meta_tensor as meta_tensor
    from attn_engine.frontend.masks import create_block_mask as create_block_mask
    from attn_engine.frontend.online_func import OnlineFunc as OnlineFunc
    from attn_engine.frontend.online_func import SymbolScalar as SymbolScalar
    from attn_engine.frontend.online_func import Var as Var
    from attn_engine.library import and_masks as and_masks
    from attn_engine.library import or_masks as or_masks
    from attn_engine.library import relu as relu
    from attn_engine.library import retention as retention
    from attn_engine.library import sigmoid as sigmoid
    from attn_engine.library import softmax as softmax
    from attn_engine.runtime.attention import Attention as Attention
    from attn_engine.runtime.attention import attention as attention
    from attn_engine.runtime.attention import compile as compile
    from attn_engine.runtime.engine import AttentionEngine as AttentionEngine
    from attn_engine.runtime.inspect import View as View
    from attn_engine.runtime.recurrence import recurrence as recurrence
    from attn_engine.runtime.recurrence import recurrence_step as recurrence_step
    from attn_engine.runtime.recurrence_engine import LinearAttentionEngine as LinearAttentionEngine
    from attn_engine.runtime.recurrence_inspect import RecurrenceView as RecurrenceView
    from attn_engine.runtime.recurrence_inspect import recurrence_ir as recurrence_ir
    from attn_engine.runtime.recurrence_inspect import recurrence_source as recurrence_source

_HOME = {
    "AttnEngineError": "errors",
    "flex_attention": "flex",
    "CustomIO": "frontend.custom_io",
    "MetaTensor": "frontend.custom_io",
    "meta_tensor": "frontend.custom_io",
    "create_block_mask": "frontend.masks",
    "OnlineFunc": "frontend.online_func",
    "SymbolScalar": "frontend.online_func",
    "Var": "frontend.online_func",
    "and_masks": "library",
    "or_masks": "library",
    "relu": "library",
    "retention": "library",
    "sigmoid": "library",
    "softmax": "library",
    "Attention": "runtime.attention",
    "attention": "runtime.attention",
    "compile": "runtime.attention",
    "AttentionEngine": "runtime.engine",
    "View": "runtime.inspect",
    "RecurrenceView": "runtime.recurrence_inspect",
    "recurrence_ir": "runtime.recurrence_inspect",
    "recurrence_source": "runtime.recurrence_inspect",
    "recurrence": "runtime.recurrence",
    "recurrence_step": "runtime.recurrence",
    "LinearAttentionEngine": "runtime.recurrence_engine",
}

__all__ = [*_HOME, "errors", "flex", "library", "masks"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in ("errors", "flex", "library", "masks"):
        return import_module(f"attn_engine.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'attn_engine' has no attribute '{name}'")
    return getattr(import_module(f"attn_engine.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
