"""Batches: what counts as one, how the model is called, and which tokens are padding."""

from collections import UserDict
from itertools import repeat
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dynorm.batches import call, cycled, iterate, token_masks, valid_tokens
from dynorm.errors import DataError
from dynorm.find import find_norms

MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


class Recorder(nn.Module):
    """Keeps how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        return args, kwargs


def test_calls() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    args, kwargs = call(Recorder(), x)
    assert (len(args), kwargs) == (1, {})
    assert torch.equal(args[0], x)
    assert call(Recorder(), (x, "text", y))[0][1] == "text"
    assert all(map(torch.equal, call(Recorder(), [x, y])[0], (x, y)))
    kwargs = call(Recorder(), UserDict(a=x, b=3))[1]
    assert kwargs.keys() == {"a", "b"}
    assert torch.equal(kwargs["a"], x)
    assert kwargs["b"] == 3


class Cache:
    """No container that torch knows."""


def test_a_model_gets_copies_of_the_tensors() -> None:
    x, cache = torch.ones(2), Cache()
    batch = {"x": x, "twice": [x, (x, 1)], "data": UserDict(x=x), "cache": cache}
    kwargs = call(Recorder(), batch)[1]
    copy = kwargs["x"]
    assert copy is not x
    assert kwargs["twice"][0] is copy
    assert kwargs["twice"][1][0] is copy
    assert kwargs["data"]["x"] is not x
    # Nor does a cache of the caller grow.
    assert isinstance(kwargs["cache"], Cache)
    assert kwargs["cache"] is not cache
    copy.zero_()
    assert torch.equal(x, torch.ones(2))


def test_a_copy_requires_a_gradient_if_the_tensor_does() -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert call(Recorder(), x)[0][0].requires_grad
    call(Recorder(), x)[0][0].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_what_a_model_raises_is_an_error_of_the_data() -> None:
    with pytest.raises(DataError, match=r"batch.*TypeError.*unexpected keyword"):
        call(nn.Linear(2, 2), {"x": torch.ones(2)})
    with pytest.raises(DataError, match="leave labels out"):
        find_norms(nn.Linear(2, 2), (torch.ones(2), torch.ones(2)))


def test_batches_are_read_once_and_one_at_a_time() -> None:
    read = []

    def feed() -> Any:
        for k in range(3):
            read.append(k)
            yield torch.ones(k + 1)

    for k, _ in enumerate(iterate(feed())):
        assert read == list(range(k + 1))


def test_the_name_of_what_is_wrong_is_said() -> None:
    with pytest.raises(DataError, match=r"texts.*least"):
        list(iterate([], "texts"))
    with pytest.raises(DataError, match=r"texts.*tensor"):
        list(iterate([1], "texts"))


def test_batches_without_an_end_are_refused_but_not_steps_over_them() -> None:
    endless = repeat(torch.ones(1))
    with pytest.raises(DataError, match=r"texts must have an end, got more than 500 of.*islice"):
        list(iterate(endless, "texts"))
    assert len(list(cycled(endless, 501))) == 501
    # A list has an end, however long it is.
    assert len(list(iterate([torch.ones(1)] * 501))) == 501


def test_masks_are_known_by_name() -> None:
    batch = {
        "input_ids": torch.ones(2, 3),
        "attention_mask": MASK,
        "decoder_attention_mask": MASK.bool(),
        "src_key_padding_mask": MASK == 0,
        "tgt_key_padding_mask": torch.where(MASK == 0, -torch.inf, 0.0),
    }
    masks = token_masks(batch)
    assert len(masks) == 4
    assert all(torch.equal(mask, MASK.bool()) for mask in masks)
    assert token_masks({"attention_mask": MASK[:, None], "src_key_padding_mask": None}) == []
    assert token_masks((MASK,)) == token_masks(MASK) == []


@pytest.mark.parametrize(
    ("shape", "dim", "expected"),
    [
        ((2, 3, 8), -1, [1, 1, 1, 1, 1, 0]),
        ((2, 8, 3), 1, [1, 1, 1, 1, 1, 0]),
        ((3, 2, 8), -1, [1, 1, 1, 1, 1, 0]),
        ((6, 8), -1, [1, 1, 1, 1, 1, 0]),
        ((6, 2, 8), -1, [1] * 10 + [0] * 2),
        ((2, 3, 4, 8), -1, [1] * 20 + [0] * 4),
        ((2, 4, 3, 8), -1, [1] * 12 + [1, 1, 0] * 4),
        ((2, 5, 8), -1, None),
        ((2, 8), -1, None),
        ((8,), -1, None),
    ],
)
def test_layouts(shape: tuple[int, ...], dim: int, expected: list[int] | None) -> None:
    valid = valid_tokens(torch.Size(shape), dim, [MASK.bool()])
    if expected is None:
        assert valid is None
    elif shape == (3, 2, 8):
        assert valid is not None
        assert valid.tolist() == MASK.bool().t().flatten().tolist()
    else:
        assert valid is not None
        assert valid.int().tolist() == expected


def test_where_two_readings_fit_padding_is_left_out_by_either() -> None:
    """Three heads and three positions; an encoder's and a decoder's mask of one size; three texts of three tokens."""
    mask = MASK.bool()
    valid = valid_tokens(torch.Size((2, 3, 3, 8)), -1, [mask])
    assert valid is not None
    assert torch.equal(valid.reshape(2, 3, 3), mask[:, :, None] & mask[:, None, :])
    other = torch.tensor([[True, False, True], [True, True, True]])
    assert valid_tokens(torch.Size((2, 3, 8)), -1, []) is None
    both = valid_tokens(torch.Size((2, 3, 8)), -1, [mask, other])
    assert both is not None
    assert torch.equal(both.reshape(2, 3), mask & other)
    square: Tensor = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()
    valid = valid_tokens(torch.Size((3, 3, 8)), -1, [square])
    assert valid is not None
    assert torch.equal(valid.reshape(3, 3), square & square.t())
