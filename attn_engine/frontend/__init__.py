"""From a user's functions to the attn dialect: tracing, definitions and their keys, checks of arguments."""

from attn_engine.frontend.build import Traced, build, rebind
from attn_engine.frontend.custom_io import CustomIO, MetaTensor, meta_tensor
from attn_engine.frontend.definition import Definition
from attn_engine.frontend.identity import definition_key
from attn_engine.frontend.masks import create_block_mask
from attn_engine.frontend.online_func import OnlineFunc, SymbolScalar, Var

__all__ = [
    "CustomIO",
    "Definition",
    "MetaTensor",
    "OnlineFunc",
    "SymbolScalar",
    "Traced",
    "Var",
    "build",
    "create_block_mask",
    "definition_key",
    "meta_tensor",
    "rebind",
]
