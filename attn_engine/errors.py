"""One exception class per mistake that a user can make; the message says what to write instead."""

from __future__ import annotations

from xdsl.utils.exceptions import PassFailedException


class AttnEngineError(Exception):
    """The base of every error that attn_engine raises on purpose."""


class UnsupportedOpError(AttnEngineError):
    """A backend met an op for which it has no emission rule."""

    def __init__(self, op: str, backend: str):
        super().__init__(f"backend '{backend}' cannot emit '{op}'; legalize it, or choose another backend")
        self.op = op
        self.backend = backend


class PassError(AttnEngineError, PassFailedException):
    """A pass met IR that it has no form for."""

    def __init__(self, name: str, problem: str):
        super().__init__(f"{name}: {problem}")
        self.name = name


class BackendError(AttnEngineError):
    """A backend's manifest is malformed, its name unknown, or its compiler absent."""


class BackendUnavailableError(AttnEngineError):
    """A backend that exists but cannot run here."""

    def __init__(self, backend: str, reason: str, others: list[str]):
        usable = f"usable here: {', '.join(others)}" if others else "no other backend is usable here"
        super().__init__(f"backend '{backend}' cannot run here: {reason}; {usable}")
        self.backend = backend


class EndlessKernelError(AttnEngineError):
    """A generated kernel has a barrier to which only some of the threads come that it waits for."""


class ToolError(AttnEngineError):
    """A program of the compiler's tool chain failed."""

    def __init__(self, command: str, said: str):
        super().__init__(f"`{command}` failed: {said.strip() or 'it said nothing'}")


class UnsupportedTileShapeError(AttnEngineError):
    """A backend cannot hold a tile of this shape."""

    def __init__(self, op: str, shape: str, backend: str):
        super().__init__(
            f"backend '{backend}' cannot hold the {shape} of '{op}': every size must be a power of two;"
            " choose block sizes that are, and pad channels with a limit"
        )


class DescriptorError(AttnEngineError):
    """A tensor that the device's copy engine cannot describe."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int):
        super().__init__(
            f"a tensor of shape {shape} with strides {strides}, {offset} bytes past a multiple of 16, cannot be copied"
            " asynchronously: its last axis must be contiguous, and its start and other strides multiples of 16 bytes;"
            " call .contiguous() on it"
        )


class ScheduleError(AttnEngineError):
    """A schedule does not fit the device, the head sizes or the dtype."""


class InterpreterError(AttnEngineError):
    """Triton's interpreter cannot run this text faithfully."""


class TraceError(AttnEngineError):
    """A user function does what cannot be traced: what it does, the line it stands on, what to write instead."""

    def __init__(self, problem: str, fix: str, where: str):
        super().__init__(f"{problem}\n{where}\n{fix}")
        self.problem, self.fix, self.where = problem, fix, where


class ControlFlowError(TraceError):
    """`if`, `while`, `and`, `or`, `not`, `in` or `bool()` on a traced value."""


class LoopError(TraceError):
    """A loop whose length or elements are traced values."""


class ConcreteValueError(TraceError):
    """A traced value where Python needs a number now: `float(x)`, `int(x)`, `math.exp(x)`, `values[x]`."""


class UnsupportedFunctionError(TraceError):
    """A torch function, method or attribute that tracing does not know."""


class OperandError(TraceError):
    """An operand of a type that an operation does not take."""


class InPlaceWriteError(TraceError):
    """A write into a traced value or, at a traced index, into a tensor."""


class ReductionError(TraceError):
    """A reduction where there is no row to reduce, or over something that is no element of the row."""


class IntegerOverflowError(TraceError):
    """An integer constant beyond 64 bits."""


class CaptureIndexError(TraceError):
    """A captured tensor used whole, indexed in part, or by something that is no integer."""


class CaptureTypeError(TraceError):
    """A captured tensor of a dtype that kernels cannot read."""


class LeakedValueError(TraceError):
    """A traced value used outside of the call that it was made in."""


class ReturnValueError(TraceError):
    """A user function returns None or something of the wrong type."""


class SignatureError(TraceError):
    """A user function with the wrong number of parameters."""


class OnlineFuncError(TraceError):
    """An OnlineFunc that does not keep its contract."""


class CustomInputError(TraceError):
    """A named input that was not declared, not given, or declared with unknown dimensions."""


class LseError(TraceError):
    """return_lse for a row function that is no softmax."""


class PrecedenceWarning(UserWarning):
    """`a & b == c` parses as `(a & b) == c`, which is rarely meant."""


class OnlineFuncWarning(UserWarning):
    """A method of an OnlineFunc that is derived anyway, and cannot run."""


class UnsupportedGradientError(AttnEngineError):
    """A gradient was asked for through something that has none here."""

    def __init__(self, what: str, fix: str | None = None):
        fix = (
            fix
            or "detach it, write it with differentiable arithmetic, or pass the tensors that it reads without requires_grad"
        )
        super().__init__(f"no gradient through {what}; {fix}")
        self.what = what


class LayoutError(AttnEngineError):
    """A layout that does not exist."""

    def __init__(self, layout: str):
        super().__init__(f"layout '{layout}' is unknown; write 'bshd' (batch, positions, heads, channels) or 'bhsd'")


class MetaMismatchError(AttnEngineError):
    """A tensor that is not what its meta tensor promised, or too few or many of them."""

    def __init__(self, name: str, have: str, want: str):
        super().__init__(f"{name}: got {have}, the engine was made for {want} (batch, heads, positions, channels)")


class MaskSizeError(AttnEngineError):
    """A mask made for other sizes than those of the tensors."""

    def __init__(self, shape: tuple[int, ...], problem: str):
        super().__init__(f"block mask of shape {shape}: {problem}; make it with create_block_mask for these tensors")


class ArgumentError(AttnEngineError, ValueError):
    """A tensor or number that attention cannot be called with."""


class NotATensorError(ArgumentError):
    """An argument that is no torch tensor."""


class RankError(ArgumentError):
    """A tensor that has not the four dimensions batch, head, position, channel."""


class NamedTensorError(ArgumentError):
    """A tensor with named dimensions."""


class DtypeError(ArgumentError):
    """Tensors of a dtype that kernels do not compute in, or of several dtypes."""


class DeviceError(ArgumentError):
    """Tensors on several devices."""


class BatchError(ArgumentError):
    """Tensors of different batch sizes."""


class KeyLengthError(ArgumentError):
    """Keys and values of different numbers."""


class HeadCountError(ArgumentError):
    """Query heads that do not divide among the key heads."""


class HeadDimError(ArgumentError):
    """Head dims that differ between query and key, or that are zero."""


class HeadDimLimitError(ArgumentError):
    """A head dim beyond what kernels hold."""


class BlockMaskError(ArgumentError):
    """A block mask of the wrong shape or dtype."""


class MaskRuleError(ArgumentError):
    """A mask that is written in a way that no mask has."""

    def __init__(self, rule: str, problem: str):
        super().__init__(f"mask '{rule}': {problem}")


class MaskLengthsError(ArgumentError):
    """A mask that depends on the lengths, called where they are not known."""

    def __init__(self, name: str):
        super().__init__(
            f"mask '{name}' depends on the numbers of queries and keys: pass it to an attention as it is, compose it with"
            " & | ~, or call mask.of_lengths(q_len, kv_len) for a function"
        )


class ScaleError(ArgumentError):
    """A scale that is no finite number."""


class NoGradientError(ArgumentError):
    """A tensor that requires a gradient where none exists."""


class RowValueError(AttnEngineError):
    """A row function returns, beside its weight, a value that differs from key to key."""

    def __init__(self, value: str):
        super().__init__(f"row value '{value}' depends on the key: reduce it over the row (sum, max, min) first")
        self.value = value


class StageError(AttnEngineError):
    """A stage of compilation that does not exist."""

    def __init__(self, stage: str, stages: tuple[str, ...]):
        super().__init__(f"stage '{stage}' is unknown; there are {', '.join(stages)}")


class DefinitionNotFoundError(AttnEngineError):
    """The command line names a definition that is not there."""


class AsyncUnsupportedError(AttnEngineError):
    """A kernel that cannot be scheduled with asynchronous copies and products."""

    def __init__(self, reason: str):
        super().__init__(f"there is no asynchronous kernel of this: {reason}; use backend 'triton'")
        self.reason = reason


class KernelOptionError(ArgumentError):
    """A kernel option that does not exist, or has a value that it cannot have."""

    def __init__(self, key: str, problem: str):
        super().__init__(f"kernel option '{key}': {problem}")
        self.key = key


class CaptureSizeError(AttnEngineError):
    """A captured tensor that is indexed by the batch or the head, or trains and is indexed by a number, and has fewer entries."""

    def __init__(self, name: str, axis: int, have: int, want: int, what: str):
        by = f"the {_COUNTED[what]}, of which there are {want}" if what in _COUNTED else what
        super().__init__(
            f"captured tensor '{name}' has {have} entries along axis {axis}, which is indexed by {by}: give it {want} entries"
        )
        self.name = name


_COUNTED = {"batch": "batch entry", "heads": "query head", "kv_heads": "key head"}


class NondeterministicError(AttnEngineError):
    """Results that are the same in every run were asked for, and a backend has no kernels that give them."""

    def __init__(self, backend: str):
        super().__init__(
            f"backend '{backend}' adds gradients of captured tensors in an order that may change from run to run: for"
            " deterministic=True use backend 'triton' or 'cpu', or detach the captured tensors"
        )
        self.backend = backend


_REFERENCE = 'backend="reference" has it, densely and in float64'


class SecondDerivativeError(UnsupportedGradientError):
    """A gradient of a gradient."""

    def __init__(self, fix: str | None = None, what: str = "attention") -> None:
        super().__init__(f"the gradients of {what} themselves (a second derivative)", fix)

    @classmethod
    def of_kernels(cls) -> SecondDerivativeError:
        """Of an attention whose reference has it."""
        return cls(_REFERENCE)


class FunctionTransformError(UnsupportedGradientError):
    """A derivative by a transform of `torch.func`."""

    def __init__(self, what: str = "attention", fix: str = _REFERENCE) -> None:
        super().__init__(f"{what} in torch.func.grad, vjp or jacrev", f"call torch.autograd.grad, or {fix}")


class ForwardModeError(UnsupportedGradientError):
    """A derivative in forward mode."""

    def __init__(self, what: str = "attention", fix: str = _REFERENCE) -> None:
        super().__init__(f"{what} in forward mode (a tangent)", fix)


class RecurrenceFormError(AttnEngineError):
    """A recurrence that a form of its kernels does not cover."""

    def __init__(self, what: str, form: str, works: str = "the recurrent form covers it"):
        super().__init__(f"{what} has no {form} form: {works}")
        self.what, self.form = what, form


class StaticSizeError(AttnEngineError):
    """A size that kernels need to know when they are compiled."""

    def __init__(self, name: str, size: str):
        super().__init__(f"the {size} of {name} must be static: give the tensor type a number there")


class StateShapeError(ArgumentError):
    """A decay, beta, weight or state of a recurrence whose shape does not fit its queries, keys and values."""


class DecayError(ArgumentError):
    """Log decays above 0, with which a state would grow."""


class SequenceBoundsError(ArgumentError):
    """Bounds of packed sequences that are none."""

    def __init__(self, problem: str):
        super().__init__(f"cu_seqlens: {problem}; pass int32 or int64 [N + 1], ascending, of sequences in a batch of 1")


class TuneFileError(AttnEngineError):
    """A tune file that cannot be read or written."""

    def __init__(self, file: str, problem: str):
        super().__init__(f"tune file '{file}' {problem}; name another, or remove it to measure anew")
        self.file = file


class UnsupportedOptionError(ArgumentError):
    """An option of another library's function that its namesake here does not have."""

    def __init__(self, option: str, problem: str, fix: str):
        super().__init__(f"{option} is not supported {problem}; {fix}")
