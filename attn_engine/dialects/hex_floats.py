"""Dense constants with infinities and NaN survive printing.

xDSL 0.74 prints such an element by its bits (`dense<0xff800000> : tensor<4xf32>`, as MLIR does) but
reads the literal back as an integer, 4286578688.0. Importing this module makes it read the bits.
"""

from __future__ import annotations

from typing import Any

from xdsl.dialects.builtin import AnyFloat
from xdsl.parser.attribute_parser import AttrParser

_Element: Any = AttrParser._TensorLiteralElement  # type: ignore[reportPrivateUsage]
_read = _Element.to_type


def _read_bits(element: Any, parser: AttrParser, type: Any) -> Any:
    if isinstance(type, AnyFloat) and element.span.text[:2] in ("0x", "0X"):
        (value,) = type.iter_unpack(int(element.value).to_bytes(type.compile_time_size, "little"))
        return value
    return _read(element, parser, type)


_Element.to_type = _read_bits
