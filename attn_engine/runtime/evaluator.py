"""The interpreter of scalar code, as checks in the frontend take it."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakSet

import torch
from torch import Tensor
from xdsl.ir import Block

from attn_engine.frontend.definition import Definition
from attn_engine.frontend.online_check import check_online_func
from attn_engine.frontend.online_func import OnlineFunc
from attn_engine.interpreters.attn_common import RowReducer
from attn_engine.interpreters.scalar import oracle_dtypes, run_region

_CHECKED: WeakSet[OnlineFunc] = WeakSet()


def evaluate(block: Block, arguments: Sequence[Tensor], shape: tuple[int, int]) -> list[Tensor]:
    """The results of a region for elements of that shape, all of them visible."""
    reducer = RowReducer(torch.ones(shape, dtype=torch.bool), torch.float64)
    return run_region(block, arguments, oracle_dtypes(), reducer.handlers())


def check_definition(definition: Definition) -> None:
    """What can be checked by numbers before a definition is compiled; each OnlineFunc once."""
    row = definition.row
    row = row.written or row if isinstance(row, OnlineFunc) else row
    if isinstance(row, OnlineFunc) and row not in _CHECKED:
        check_online_func(row, evaluate)
        _CHECKED.add(row)
