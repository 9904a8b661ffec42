"""The whole ``tile`` dialect: the value level of `tile` and the levels below it, under one name."""

from __future__ import annotations

from xdsl.ir import Dialect

from attn_engine.dialects import tile
from attn_engine.dialects.tile_async import ASYNC_ATTRIBUTES, ASYNC_OPS
from attn_engine.dialects.tile_block import BLOCK_OPS
from attn_engine.dialects.tile_buffer import BUFFER_ATTRIBUTES, BUFFER_OPS
from attn_engine.dialects.tile_flag import FLAG_OPS

Tile = Dialect(
    "tile",
    [*tile.Tile.operations, *BLOCK_OPS, *FLAG_OPS, *BUFFER_OPS, *ASYNC_OPS],
    [*tile.Tile.attributes, *BUFFER_ATTRIBUTES, *ASYNC_ATTRIBUTES],
)
