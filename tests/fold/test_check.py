"""What could deceive the proof by numbers: unseen outputs, coarse rounding, NaN, examples that show little."""

from __future__ import annotations

import copy
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from dynorm.errors import ArgumentError, DataError, ModelError
from dynorm.fold import apply, fold_, plan
from dynorm.fold.check import Check, fresh
from dynorm.stream.tensors import detached_copy, tensors_in

C = 8
Forward = Callable[[Any, Any], Any]


class Net(nn.Module):
    """A writer, a norm and a reader, put together as a test says."""

    def __init__(self, run: Forward | None = None) -> None:
        super().__init__()
        self.e, self.n, self.h = nn.Linear(4, C), nn.LayerNorm(C), nn.Linear(C, 3)
        self.run = run or (lambda m, x: m.h(m.n(m.e(x))))

    def forward(self, x: Any) -> Any:
        return self.run(self, x)


def net(
    run: Forward | None = None, dtype: torch.dtype = torch.float64, kind: Callable[..., Net] = Net
) -> Any:
    torch.manual_seed(0)
    model = kind(run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64) + 0.3)
    return model.to(dtype).eval()


def x_of(*shape: int) -> Tensor:
    return torch.randn(
        shape or (5, 4), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def unchanged(
    model: nn.Module,
    *args: Any,
    error: type[Exception] = ModelError,
    match: str = "",
    **options: Any,
) -> Any:
    """Fold, expect an error, and compare the model and its modules with what they were."""
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    with pytest.raises(error, match=match) as caught:
        fold_(model, *args, **options)
    after = model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert modules == list(model.modules())
    return caught.value


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every fold be wrong by a tenth."""
    right = plan.new_values

    def tenth_more(*folds: Any) -> Any:
        new = right(*folds)
        for table in (new.values, new.added):
            for slot, value in table.items():
                table[slot] = value * 1.1
        return new

    monkeypatch.setattr(plan, "new_values", tenth_more)


# 1. Outputs.


@dataclass(slots=True)
class Slotted:
    hidden: Tensor


class Private:
    __slots__ = ("__hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.__hidden = hidden


class Kept(dict):  # type: ignore[type-arg]
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


SEEN: dict[str, Callable[[Tensor], Any]] = {
    "slots": Slotted,
    "private slots": Private,
    "attribute of a dict": Kept,
    "deque": lambda h: deque([h]),
    "frozenset": lambda h: frozenset([h]),
    "values": lambda h: {"a": h}.values(),
    "items": lambda h: {"a": h}.items(),
    "closure": lambda h: lambda: h,
    "default": lambda h: lambda h=h: h,
    "method": lambda h: Slotted(h).__repr__,
    "complex": lambda h: torch.complex(h, h),
}


@pytest.mark.parametrize("name", SEEN)
def test_a_norm_in_any_output_stays(name: str) -> None:
    model = net(lambda m, x: (lambda h: (m.h(h), SEEN[name](h)))(m.n(m.e(x))))
    report = fold_(model, x_of(), center=False)
    assert report.sites[0].affine.state == "refused"
    if name != "complex":
        assert report.sites[0].affine.reason == "the model returns it"


@pytest.mark.parametrize(
    "wrap", [lambda h: (t for t in [h]), lambda h: iter([h]), lambda h: map(abs, [h])]
)
def test_outputs_that_cannot_be_seen_are_no_outputs_to_fold_by(
    wrap: Callable[[Tensor], Any],
) -> None:
    model = net(lambda m, x: (lambda h: (m.h(h), wrap(h)))(m.n(m.e(x))))
    unchanged(model, x_of(), match=r"tensors.*cannot")


def test_arrays_are_outputs_and_objects_of_c_are_refused() -> None:
    assert [t.tolist() for t in tensors_in({"a": np.ones(2), "b": np.array(["text"])})] == [
        [1.0, 1.0]
    ]
    with pytest.raises(ModelError, match="memoryview"):
        list(tensors_in(memoryview(b"1")))


# 2. Half precision.


def test_an_output_that_overflows_gives_no_tolerance() -> None:
    model = net(lambda m, x: (lambda y: (y, y * 30000))(m.h(m.n(m.e(x)))), torch.float16)
    unchanged(model, x_of().half(), match=r"half.*precision")


def test_a_jump_gives_no_tolerance() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        y = m.h(m.n(m.e(x)))
        return torch.where(y > 1, torch.finfo(y.dtype).min, y)

    unchanged(net(run, torch.float16), x_of().half(), match=r"half.*precision")


def test_each_half_precision_output_has_its_own_noise() -> None:
    class Two(nn.Module):
        """One output that is exact in bfloat16, and one that a sum with 40 has rounded."""

        def __init__(self) -> None:
            super().__init__()
            self.exact, self.rounded = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * self.exact, (x + 40 - 40) * self.rounded

    model = Two().bfloat16()
    check = Check(model, ((x_of().bfloat16(),), {}))
    with torch.no_grad():
        model.rounded.fill_(1.0625)
        assert check.require_same(model)["error"] > 0.05  # type: ignore[operator]
        model.rounded.fill_(1)
        model.exact.fill_(1.0625)
        with pytest.raises(ModelError, match=r"1\.6e-02.*differ by 6\.\de-02"):
            check.require_same(model)
    # Both are within the tolerance for all outputs together.
    assert max(check.errors(model)) < check.tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_still_folds(dtype: torch.dtype) -> None:
    report = fold_(net(dtype=dtype), x_of().to(dtype))
    assert report.count("affine") == report.count("center") == 1
    assert report.noise is not None
    assert report.noise < 0.1


# 3. NaN.


@pytest.mark.usefixtures("wrong")
def test_a_logarithm_of_positive_inputs_is_compared_by_numbers() -> None:
    model = net(lambda m, x: m.h(m.n(m.e(x.log()))))
    unchanged(model, x_of().abs() + 0.1, match="differ by")
    unchanged(model, torch.ones(5, 4).double(), match="differ by")


def test_a_logarithm_gets_fresh_positive_inputs() -> None:
    report = fold_(net(lambda m, x: m.h(m.n(m.e(x.log())))), x_of().abs() + 0.1)
    assert report.fresh == 2
    assert report.count("affine") == 1


def test_the_two_fresh_inputs_and_the_example_differ() -> None:
    check = Check(net(), ((x_of(),), {}))
    (example,), (first,), (second,) = (args for args, _ in check.inputs)
    assert not torch.equal(first, example)
    assert not torch.equal(second, example)
    assert not torch.equal(first, second)


def test_outputs_of_several_lengths_are_compared() -> None:
    class Ragged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return torch.nested.as_nested_tensor([y[:2], y], layout=torch.jagged)

    model = Ragged().double()
    check = Check(model, ((x_of(),), {}))
    assert max(check.errors(model)) == 0
    with torch.no_grad():
        model.linear.weight.mul_(1.5)
    assert max(check.errors(model)) > 0.1


def test_an_example_that_gives_no_number_is_no_example() -> None:
    unchanged(
        net(lambda m, x: (m.h(m.n(m.e(x))), x.log())),
        -x_of().abs(),
        error=DataError,
        match="all NaN",
    )


# 4. Constant examples, and classes of inputs.


def test_zeros_are_drawn_anew() -> None:
    zeros = torch.zeros(3, 4).double()
    report = fold_(net(), zeros)
    assert report.fresh == 2
    model = net()
    check = Check(model, ((zeros,), {}))
    with torch.no_grad():
        model.e.weight.mul_(1.5)
    assert max(check.errors(model)) > 1e-3


Pair = namedtuple("Pair", "ids text")


@dataclass
class Batch:
    ids: Tensor


@pytest.mark.parametrize(
    ("wrap", "get"),
    [
        (lambda t: Pair(t, "a"), lambda v: v.ids),
        (lambda t: Batch(t), lambda v: v.ids),
        (lambda t: Slotted(t), lambda v: v.hidden),
        (lambda t: SimpleNamespace(ids=[t]), lambda v: v.ids[0]),
        (lambda t: OrderedDict(ids=t), lambda v: v["ids"]),
        (lambda t: __import__("transformers").BatchEncoding({"ids": t}), lambda v: v["ids"]),
    ],
)
def test_inputs_of_any_class_are_drawn_anew_and_keep_it(
    wrap: Callable[[Tensor], Any], get: Any
) -> None:
    for tensor in (torch.arange(9), torch.zeros(9), torch.linspace(-1, 1, 9)):
        given = wrap(tensor)
        drawn = fresh(((given,), {}), 1)[0][0]
        assert type(drawn) is type(given)
        assert not torch.equal(get(drawn), tensor)
        assert get(given) is tensor


def test_what_is_drawn_keeps_signs_masks_and_aliases() -> None:
    x = torch.rand(50)
    (a, b), named = fresh(
        ((x, x), {"c": torch.full((9,), -2.0), "z": torch.ones(2, dtype=torch.complex64)}), 1
    )
    assert a is b
    assert (a >= x.min()).all() and (a <= x.max()).all()  # noqa: PT018
    assert (named["c"] < 0).all()
    assert not (named["c"] == -2).all()
    assert torch.equal(named["z"], torch.ones(2, dtype=torch.complex64))
    assert torch.equal(fresh(((torch.zeros(3),), {}), 1, constants=False)[0][0], torch.zeros(3))


@pytest.mark.parametrize("sign", [1, -1])
def test_numbers_of_one_sign_are_drawn_with_it(sign: int) -> None:
    given = sign * torch.linspace(0.01, 1.0, 200)
    (drawn,), _ = fresh(((given,), {}), 1)
    assert ((drawn >= given.min()) & (drawn <= given.max())).all()
    assert not torch.equal(drawn, given)


# 15, and whatever else a model's code raises.


@pytest.mark.parametrize("check", [True, False])
def test_code_that_needs_the_norm_s_weight_is_an_error_of_ours(check: bool) -> None:
    model = net(lambda m, x: m.h(m.n(m.e(x.to(m.n.weight.dtype)))))
    error = unchanged(model, x_of(), check=check, match=r"everything.*put")
    assert isinstance(error.__cause__, AttributeError)


def test_what_applying_raises_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of paper")

    # The last step: all tensors are changed by then.
    monkeypatch.setattr(apply, "swap_", fail)
    assert isinstance(unchanged(net(), x_of(), match="out of paper").__cause__, RuntimeError)


def test_a_buffer_that_cannot_be_written_into_is_left_alone_when_all_is_put_back(
    wrong: None,
) -> None:
    model = net()
    model.register_buffer("mask", torch.ones(1).expand(4))
    unchanged(model, x_of(), match=r"everything.*put")


class Config:
    """A config of transformers, as far as a fold sees it."""

    def __init__(self, tie_word_embeddings: bool = True) -> None:
        self.tie_word_embeddings = tie_word_embeddings

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        return cls(**values)


class Unreadable(Config):
    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Any:
        raise ValueError("no such key")


def tied(config: Config, run: Forward) -> Any:
    model = net(run)
    model.config, model.e = config, nn.Linear(C, 3, bias=False, dtype=torch.float64)
    model.e.weight = model.h.weight
    return model.eval()


@pytest.mark.parametrize("check", [True, False])
def test_a_config_that_cannot_be_read_again_is_an_error_of_ours(check: bool) -> None:
    model = tied(Unreadable(), lambda m, x: (m.h(m.n(x)), m.e(x)))
    unchanged(model, x_of(5, C), untie=True, check=check, match="no such key")
    assert model.config.tie_word_embeddings
    assert model.e.weight is model.h.weight


def test_a_forward_that_reads_from_its_config_whether_weights_are_tied_is_checked_with_the_new_one() -> (
    None
):
    model = tied(
        Config(), lambda m, x: (m.h(m.n(x)) * (2 if m.config.tie_word_embeddings else 1), m.e(x))
    )
    unchanged(model, x_of(5, C), untie=True, match=r"everything.*put")
    assert model.config.tie_word_embeddings
    assert model.e.weight is model.h.weight
    plain = tied(Config(), lambda m, x: (m.h(m.n(x)), m.e(x)))
    assert fold_(plain, x_of(5, C), untie=True).untied
    assert not plain.config.tie_word_embeddings


# 16 to 21, 23: examples and models that the check must take, or refuse with a reason.


def test_a_model_that_takes_one_example_only_is_checked_on_it() -> None:
    example = x_of()

    def picky(m: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and not torch.equal(x, example):
            raise ValueError("not this")
        y: Tensor = m.h(m.n(m.e(x)))
        return y

    report = fold_(net(picky), example)
    assert report.count("affine") == 1
    assert report.fresh == 0
    assert "on the example only" in str(report)


def test_a_model_that_checks_its_range_is_checked_within_it() -> None:
    def ranged(m: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and x.min() < 0:
            raise ValueError("a pixel is 0 or more")
        y: Tensor = m.h(m.n(m.e(x)))
        return y

    assert fold_(net(ranged), x_of().abs()).fresh == 2


def test_a_model_without_a_float32_copy_asks_for_a_tolerance() -> None:
    cast = net(lambda m, x: m.h(m.n(m.e(x.to(torch.bfloat16)))), torch.bfloat16)
    holds = net(dtype=torch.bfloat16)
    holds.cache = holds.e.weight * 2
    for model in (cast, holds):
        error = unchanged(model, x_of().bfloat16(), match="pass tolerance=")
        assert isinstance(error.__cause__, RuntimeError)
        report = fold_(model, x_of().bfloat16(), tolerance=0.1)
        assert report.noise is None
        assert report.error is not None
        assert report.count("affine") == 1


def test_an_object_that_holds_half_precision_is_widened_too() -> None:
    model = net(lambda m, b: m.h(m.n(m.e(b.x))), torch.bfloat16)
    assert fold_(model, SimpleNamespace(x=x_of().bfloat16())).noise is not None


def test_inputs_with_gradients_are_copied() -> None:
    leaf = torch.ones(5, 4, dtype=torch.float64, requires_grad=True)
    for x in (leaf, leaf * 2):
        assert fold_(net(), x).count("affine") == 1


def test_complex_inputs_are_kept() -> None:
    model = net(lambda m, x: m.h(m.n(m.e(torch.view_as_real(x).flatten(1)))))
    assert fold_(model, torch.view_as_complex(x_of(5, 2, 2))).count("affine") == 1


class Attributes(OrderedDict):  # type: ignore[type-arg]
    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize("kind", [Attributes, SimpleNamespace])
def test_inputs_keep_their_class(kind: Callable[..., Any]) -> None:
    report = fold_(net(lambda m, b: m.h(m.n(m.e(b.x)))), kind(x=x_of()))
    assert report.count("affine") == 1
    assert report.fresh == 2


def test_an_example_that_cannot_be_copied_is_refused() -> None:
    unchanged(
        net(lambda m, x: m.h(m.n(m.e(next(x))))),
        (t for t in [x_of()]),
        error=DataError,
        match="deepcopy",
    )


@pytest.mark.parametrize("tolerance", ["1e-3", True, -1.0, float("nan"), [1]])
def test_a_tolerance_is_a_number(tolerance: Any) -> None:
    unchanged(net(), x_of(), error=ArgumentError, match="tolerance", tolerance=tolerance)


# 24. The caller's objects.


class Cache:
    """A store that a model writes into, as a key-value cache."""

    def __init__(self, past: Tensor) -> None:
        self.past = past

    def grown(self, new: Tensor) -> Tensor:
        self.past = torch.cat([self.past, new], 0)
        return self.past


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_cache_stays_as_the_caller_left_it(tolerance: float | None) -> None:
    model, past = net(lambda m, x: m.h(m.n(m.e(x[1].grown(x[0]))))), x_of(2, 4)
    cache, before = Cache(past), past.clone()
    if tolerance is None:
        report = fold_(model, (x_of(), cache))
        assert report.count("affine") == 1
    else:
        unchanged(model, (x_of(), cache), tolerance=tolerance, match="differ by")
    assert cache.past is past
    assert torch.equal(past, before)


@pytest.mark.parametrize("options", [{}, {"check": False}, {"tolerance": 0.0}])
def test_what_a_forward_keeps_on_self_stays_the_caller_s(options: dict[str, Any]) -> None:
    def stash(m: Any, x: Tensor) -> Tensor:
        m.last = m.n(m.e(x))
        y: Tensor = m.h(m.last)
        return y

    model = net(stash)
    model(x_of())
    last = model.last
    if "tolerance" in options:
        unchanged(model, x_of(), match="differ by", **options)
    else:
        fold_(model, x_of(), **options)
    assert model.last is last


def test_copies_share_nothing() -> None:
    x = torch.zeros(2)
    given = {"a": [x, x], "b": Cache(x)}
    made = detached_copy(given)
    made["a"][0].add_(1)
    assert made["b"].past is made["a"][1]
    assert not x.any()


def test_a_transformers_cache_is_an_example_and_does_not_grow() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel
    from transformers.cache_utils import DynamicCache

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=16)
    model = GPT2LMHeadModel(config).double().eval()
    ids, cache = torch.randint(2, 30, (2, 6)), DynamicCache(config=config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        exact = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
    report = fold_(model, ids[:, :1], past_key_values=cache, untie=True)
    assert report.count("affine") >= 2
    assert cache.get_seq_length() == 6
    with torch.no_grad():
        given = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
    assert (given - exact).norm() <= 1e-12 * exact.norm()


# 26. Changes in place, and layers that only look like linear ones.


def in_place(m: Any, x: Tensor) -> Tensor:
    h = m.n(m.e(x))
    h.add_(1)
    y: Tensor = m.h(h)
    return y


def test_what_is_changed_in_place_is_seen() -> None:
    assert "aten.add" in (fold_(net(in_place), x_of()).sites[0].affine.reason or "")


def test_inputs_by_name_are_seen() -> None:
    assert fold_(net(lambda m, x: m.h(input=m.n(m.e(x)))), x_of()).count("affine") == 1
    both = net(lambda m, x: m.h(input=m.n(m.e(x))) + m.h(input=m.e(x)))
    assert "is also used by" in (fold_(both, x_of()).sites[0].affine.reason or "")


class Linear(nn.Linear):
    """Of the name, not of the class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu())


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_that_do_more_than_a_product_stay() -> None:
    normed, named, hooked = net(), net(), net()
    nn.utils.weight_norm(normed.h)
    named.h = Linear(C, 3).double().eval()
    hooked.h.register_forward_hook(lambda module, args, output: output + args[0].sum())
    for model in (normed, named, hooked):
        assert fold_(model, x_of()).sites[0].affine.state == "refused"


def test_the_docs_name_what_is_not_seen() -> None:
    text = " ".join((fold_.__doc__ or "").split())
    assert "keeps on ``self``" in text
    assert "longer than 1" in text


def test_the_trace_does_not_start_from_what_the_first_run_kept_on_a_module() -> None:
    def lazy(m: Any, x: Tensor) -> Any:
        # The first call keeps a tensor that later calls use.
        if not hasattr(m, "kept"):
            m.kept = m.h.weight * 2
        return m.h(m.n(m.e(x))), functional.linear(x.repeat(1, 2), m.kept)

    report = fold_(net(lazy), x_of(), check=False)
    assert "h.weight" in (report.sites[0].affine.reason or "")
