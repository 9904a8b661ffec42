"""Ready attentions as IR text, and random inputs, hard ones among them.

`attention_module(row="softmax", score_mod="alibi", mask="causal")` gives a parsed module with
`func.func @attention`; `captures_for` makes the captured tensors that it wants, in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from attn_engine.universe import make_context

SCORE = "%s: f32, %b: i64, %h: i64, %qi: i64, %kv: i64"
INDEX = "%b: i64, %h: i64, %qi: i64, %kv: i64"


@dataclass(frozen=True)
class Part:
    """One scalar region without its signature, and the captures that it reads, with their types."""

    body: str
    captures: tuple[tuple[str, str], ...] = ()
    outputs: int = 0


ROWS = {
    "softmax": Part(
        """
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    attn.yield %p : f32"""
    ),
    "softmax_lse": Part(
        """
    %m = attn.row_reduce max %s
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l = attn.row_reduce sum %e
    %p = arith.divf %e, %l : f32
    %ll = math.log %l : f32
    %lse = arith.addf %m, %ll : f32
    attn.yield %p, %lse : f32, f32""",
        outputs=1,
    ),
    "sigmoid": Part(
        """
    %one = arith.constant 1.0 : f32
    %n = arith.negf %s : f32
    %e = math.exp %n : f32
    %d = arith.addf %one, %e : f32
    %p = arith.divf %one, %d : f32
    attn.yield %p : f32"""
    ),
    "relu": Part(
        """
    %zero = arith.constant 0.0 : f32
    %on = arith.cmpf ogt, %s, %zero : f32
    %p = arith.select %on, %s, %zero : f32
    attn.yield %p : f32"""
    ),
    # Retention: scores over max(1, the sum of their absolute values).
    "retention": Part(
        """
    %one = arith.constant 1.0 : f32
    %a = math.absf %s : f32
    %r = attn.row_reduce sum %a
    %n = arith.maximumf %r, %one : f32
    %p = arith.divf %s, %n : f32
    attn.yield %p : f32"""
    ),
    # Cosine of the row: scores over their Euclidean norm.
    "cosine": Part(
        """
    %tiny = arith.constant 1.0e-6 : f32
    %a = arith.mulf %s, %s : f32
    %r = attn.row_reduce sum %a
    %t = arith.addf %r, %tiny : f32
    %n = math.sqrt %t : f32
    %p = arith.divf %s, %n : f32
    attn.yield %p : f32"""
    ),
    # The mean of the visible values, whatever the scores.
    "mean": Part(
        """
    %one = arith.constant 1.0 : f32
    %n = attn.row_reduce count %s
    %p = arith.divf %one, %n : f32
    attn.yield %p : f32"""
    ),
    "softmax_sink": Part(
        """
    %sink = attn.load %sinks_[%h] : tensor<?xf32> -> f32
    %m0 = attn.row_reduce max %s
    %m = arith.maximumf %m0, %sink : f32
    %x = arith.subf %s, %m : f32
    %e = math.exp %x : f32
    %l0 = attn.row_reduce sum %e
    %y = arith.subf %sink, %m : f32
    %es = math.exp %y : f32
    %l = arith.addf %l0, %es : f32
    %p = arith.divf %e, %l : f32
    attn.yield %p : f32""",
        (("sinks", "tensor<?xf32>"),),
    ),
}

SCORE_MODS = {
    None: None,
    "alibi": Part(
        """
    %w = attn.load %slopes_[%h] : tensor<?xf32> -> f32
    %d = arith.subi %kv, %qi : i64
    %df = arith.sitofp %d : i64 to f32
    %t = arith.mulf %w, %df : f32
    %r = arith.addf %s, %t : f32
    attn.yield %r : f32""",
        (("slopes", "tensor<?xf32>"),),
    ),
    "softcap": Part(
        """
    %cap = arith.constant 2.0 : f32
    %a = arith.divf %s, %cap : f32
    %t = math.tanh %a : f32
    %r = arith.mulf %t, %cap : f32
    attn.yield %r : f32"""
    ),
    "bias": Part(
        """
    %w = attn.load %bias_[%h, %qi, %kv] : tensor<?x?x?xf32> -> f32
    %r = arith.addf %s, %w : f32
    attn.yield %r : f32""",
        (("bias", "tensor<?x?x?xf32>"),),
    ),
    "temperature": Part(
        """
    %t = attn.load %temp_[] : tensor<f32> -> f32
    %r = arith.mulf %s, %t : f32
    attn.yield %r : f32""",
        (("temp", "tensor<f32>"),),
    ),
}

MASKS = {
    None: None,
    "causal": Part(
        """
    %c = arith.cmpi sge, %qi, %kv : i64
    attn.yield %c : i1"""
    ),
    "window": Part(
        """
    %w = arith.constant 4 : i64
    %c = arith.cmpi sge, %qi, %kv : i64
    %d = arith.subi %qi, %kv : i64
    %n = arith.cmpi slt, %d, %w : i64
    %r = arith.andi %c, %n : i1
    attn.yield %r : i1"""
    ),
    # Every third query sees no key.
    "holes": Part(
        """
    %three = arith.constant 3 : i64
    %one = arith.constant 1 : i64
    %t = arith.remsi %qi, %three : i64
    %r = arith.cmpi ne, %t, %one : i64
    attn.yield %r : i1"""
    ),
    "lengths": Part(
        """
    %n = attn.load %lens_[%b] : tensor<?xi64> -> i64
    %r = arith.cmpi slt, %kv, %n : i64
    attn.yield %r : i1""",
        (("lens", "tensor<?xi64>"),),
    ),
}

CAPTURE_SHAPES = {"slopes": "h", "bias": "hqk", "temp": "", "sinks": "h"}


def capture_types(*parts: Part | None) -> dict[str, str]:
    return {name: type_ for part in parts if part is not None for name, type_ in part.captures}


def attention_text(
    row: str = "softmax", score_mod: str | None = None, mask: str | None = None, dtype: str = "f32", dv: str = "?"
) -> str:
    """`func.func @attention` with one `attn.attention`."""
    chosen = ROWS[row], SCORE_MODS[score_mod], MASKS[mask]
    captures = capture_types(chosen[1], chosen[2], chosen[0])
    signature = "".join(f", %{name}: {type_}" for name, type_ in captures.items())
    tensor, value = f"tensor<?x?x?x?x{dtype}>", f"tensor<?x?x?x{dv}x{dtype}>"
    outputs = ["tensor<?x?x?xf32>"] * chosen[0].outputs
    results = ", ".join(f"%r{i}" for i in range(1 + len(outputs)))
    # In the regions, a capture has an argument of its own: %slopes is %slopes_ there.
    inner = "".join(f", %{name}_: {type_}" for name, type_ in captures.items())
    regions = "".join(
        f"  {name} {{\n  ^bb0({arguments}{inner}):{part.body}\n  }}\n"
        for name, arguments, part in (
            ("score_mod", SCORE, chosen[1]),
            ("mask", INDEX, chosen[2]),
            ("row", SCORE, chosen[0]),
        )
        if part is not None
    )
    names, types = ", ".join(f"%{n}" for n in captures), ", ".join(captures.values())
    return f"""
func.func @attention(%q: {tensor}, %k: {tensor}, %v: {value}, %scale: f32{signature}) -> ({", ".join([value, *outputs])}) {{
  {results} = attn.attention %q, %k, %v scale %scale {f"captures {names}" if captures else ""} : {tensor}, {tensor}, {value} {f"captures {types}" if captures else ""} -> {value} {f"outputs {', '.join(outputs)}" if outputs else ""}
{regions}  func.return {results} : {", ".join([value, *outputs])}
}}
"""


def parse(text: str) -> ModuleOp:
    module = Parser(make_context(), text).parse_module()
    module.verify()
    return module


def attention_module(
    row: str = "softmax", score_mod: str | None = None, mask: str | None = None, dtype: str = "f32"
) -> ModuleOp:
    return parse(attention_text(row, score_mod, mask, dtype))


def captures_for(
    q: Tensor, k: Tensor, row: str = "softmax", score_mod: str | None = None, mask: str | None = None, seed: int = 1
) -> list[Tensor]:
    """Captured tensors that fit the inputs, in the order of the op's captures."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"b": q.shape[0], "h": q.shape[1], "q": q.shape[2], "k": k.shape[2]}
    made: list[Tensor] = []
    for name in capture_types(SCORE_MODS[score_mod], MASKS[mask], ROWS[row]):
        if name == "lens":
            made.append(torch.arange(q.shape[0], dtype=torch.int64) % (k.shape[2] + 1))
        else:
            shape = [sizes[axis] for axis in CAPTURE_SHAPES[name]]
            made.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return made


def random_inputs(
    b: int = 1,
    hq: int = 2,
    hkv: int | None = None,
    sq: int = 7,
    skv: int | None = None,
    d: int = 4,
    dv: int | None = None,
    kind: str = "normal",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v. `kind`: "normal"; "large", magnitude 30; "low", every logit about -120 (at scale d ** -0.5)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int, length: int, channels: int) -> Tensor:
        return torch.randn((b, heads, length, channels), generator=generator, dtype=torch.float64)

    hkv, skv, dv = hkv or hq, sq if skv is None else skv, dv or d
    q, k, v = draw(hq, sq, d), draw(hkv, skv, d), draw(hkv, skv, dv)
    match kind:
        case "normal":
            pass
        case "large":
            q, k = 30 * q, 30 * k
        case "low":
            q, k = 0.1 * q, 0.1 * k
            q[..., 0], k[..., 0] = 1.0, -120.0 * d**0.5
        case _:
            raise ValueError(f"unknown kind of inputs '{kind}'")
    return q.to(dtype), k.to(dtype), v.to(dtype)


# Shapes on which an attention must be right: heads in groups, unequal lengths, none, one, and tails.
SHAPES = (
    {"b": 2, "hq": 4, "hkv": 2, "sq": 5, "skv": 9},
    {"hq": 6, "hkv": 2, "sq": 65, "skv": 63, "dv": 3},
    {"sq": 1, "skv": 1},
    {"sq": 9, "skv": 4},
    {"sq": 3, "skv": 0},
    {"sq": 0, "skv": 3},
    {"b": 0},
)
