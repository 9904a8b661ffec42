"""Wrong arguments: each has an error of its own, which names it, both values and the fix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from attn_engine import errors, flex, library
from attn_engine.frontend import Definition, checks, create_block_mask
from tests.support.frontend_tracing import trace


def tensor(*shape, dtype=torch.float16, device="cpu"):
    return torch.zeros(shape, dtype=dtype, device=device)


GOOD = tensor(2, 4, 8, 64)


def test_sizes():
    sizes = checks.check_qkv(tensor(2, 8, 5, 64), tensor(2, 4, 7, 64), tensor(2, 4, 7, 32))
    assert sizes == checks.Sizes(2, 8, 4, 5, 7, 64, 32)


WRONG = [
    ((None, GOOD, GOOD), errors.NotATensorError, "q is a NoneType"),
    ((GOOD, GOOD[0], GOOD), errors.RankError, "k has 3 dimensions"),
    ((GOOD, GOOD, GOOD.to_sparse()), errors.NotATensorError, "v has layout"),
    ((GOOD.to(torch.int32), GOOD, GOOD), errors.DtypeError, "q is torch.int32"),
    ((GOOD, GOOD, GOOD.float()), errors.DtypeError, "v is torch.float32 but q is torch.float16"),
    ((GOOD, tensor(2, 4, 8, 64, device="meta"), GOOD), errors.DeviceError, "k is on meta but q is on cpu"),
    ((GOOD, tensor(1, 4, 8, 64), GOOD), errors.BatchError, "k has batch size 1 but q has 2"),
    ((GOOD, tensor(2, 3, 8, 64), tensor(2, 3, 8, 64)), errors.HeadCountError, "q has 4 heads and k has 3"),
    ((GOOD, GOOD, tensor(2, 2, 8, 64)), errors.HeadCountError, "v has 2 heads but k has 4"),
    ((GOOD, GOOD, tensor(2, 4, 7, 64)), errors.KeyLengthError, "v holds 7 positions but k holds 8"),
    ((GOOD, tensor(2, 4, 8, 32), GOOD), errors.HeadDimError, "64 of q, 32 of k"),
    ((GOOD, GOOD, tensor(2, 4, 8, 0)), errors.HeadDimError, "none may be 0"),
    ((GOOD, GOOD, tensor(2, 4, 8, 320)), errors.HeadDimLimitError, "head dim of v is 320"),
    ((tensor(2, 4, 8, 257), tensor(2, 4, 8, 257), GOOD), errors.HeadDimLimitError, "at most 256"),
]


@pytest.mark.parametrize(("arguments", "error", "text"), WRONG)
def test_wrong_tensors(arguments, error, text):
    with pytest.raises(error) as caught:
        checks.check_qkv(*arguments)
    assert text in str(caught.value)
    assert type(caught.value) is error


def test_nested_tensors():
    with pytest.raises(errors.NotATensorError, match=r"k is a nested tensor.*offsets"):
        checks.check_qkv(GOOD, torch.nested.nested_tensor(list(GOOD)), GOOD)


class Named(torch.Tensor):
    names = ("b", "h", "s", "d")


def test_named_tensors():
    with pytest.raises(errors.NamedTensorError, match=r"k has named dimensions .*\.rename\(None\)"):
        checks.check_qkv(GOOD, GOOD.as_subclass(Named), GOOD)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -float("inf"), "1", True, torch.ones(())])
def test_scales_that_are_no_finite_numbers(scale):
    with pytest.raises(errors.ScaleError, match="scale is"):
        checks.check_scale(scale)


def test_zero_and_negative_scales_are_numbers():
    assert [checks.check_scale(s) for s in (0, -0.5, np.float32(2), np.int64(3))] == [0.0, -0.5, 2.0, 3.0]


def test_captures_elsewhere():
    with pytest.raises(errors.DeviceError, match="captured tensor 'slopes' is on meta but q is on cpu"):
        checks.check_captures(["slopes"], [tensor(4, device="meta")], torch.device("cpu"))


def test_gradients_that_do_not_exist():
    limit = torch.rand(2, requires_grad=True)
    with pytest.raises(errors.NoGradientError, match="q requires a gradient, but decoding has none"):
        checks.check_no_gradient("q", limit, "decoding has none")
    with torch.no_grad():
        checks.check_no_gradient("q", limit, "decoding has none")


def test_block_masks():
    mask = create_block_mask(library.causal, 1, None, 300, 200, Qblk=128, KVblk=64)
    assert mask.dtype == torch.int8
    assert mask.tolist() == [[[[1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]]]
    sizes = checks.Sizes(2, 4, 4, 300, 200, 64, 64)
    checks.check_block_mask(mask, sizes, 128, 64)
    with pytest.raises(errors.BlockMaskError, match=r"\(1, 1, 3, 4\), expected \(2, 4, 3, 2\)"):
        checks.check_block_mask(mask, sizes)
    with pytest.raises(errors.BlockMaskError, match="int8 or bool"):
        checks.check_block_mask(mask.float(), sizes, 128, 64)


def test_block_masks_by_batch_head_and_table():
    ids = torch.tensor([[0] * 5 + [1] * 5, [0] * 2 + [1] * 8])
    mask = create_block_mask(
        lambda b, h, q, kv: (ids[b, q] == ids[b, kv]) & (kv % 2 == h), 2, 2, 10, 10, Qblk=4, KVblk=2
    )
    q, kv = torch.arange(10).view(-1, 1), torch.arange(10)
    for b in range(2):
        for h in range(2):
            dense = (ids[b][q] == ids[b][kv]) & (kv % 2 == h)
            expected = [[int(dense[i : i + 4, j : j + 2].any()) for j in range(0, 10, 2)] for i in range(0, 10, 4)]
            assert mask[b, h].tolist() == expected


def test_block_masks_of_constants_and_of_no_masks():
    assert create_block_mask(lambda b, h, q, kv: True, 1, 1, 130, 130).tolist() == [[[[1, 1], [1, 1]]]]
    with pytest.raises(errors.ReturnValueError, match="q_idx >= kv_idx"):
        create_block_mask(lambda b, h, q, kv: q - kv, 1, 1, 4, 4)


@pytest.mark.parametrize(
    ("definition", "text"),
    [
        (Definition(mask_mod=torch.ones(4, 4) > 0), "masks.from_tensor(tensor)"),
        (Definition(score_mod=torch.ones(4, 4)), "library.bias(tensor)"),
        (Definition(mask_mod=flex.create_block_mask(library.causal, None, None, 4, 4)), "its mask_mod goes here"),
        (Definition(row="softmax"), "pass a function row(s)"),
    ],
)
def test_what_is_no_function_is_refused_with_the_way_in(definition, text):
    with pytest.raises(errors.SignatureError) as caught:
        trace(definition)
    assert text in str(caught.value)
