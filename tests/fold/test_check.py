"""What could deceive the proof by numbers: unseen outputs, coarse rounding, NaN, examples that show little."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.fold_models import build
from dynorm.errors import DataError, ModelError
from dynorm.fold import apply, fold, fold_
from dynorm.fold.check import Check
from dynorm.fold.tensors import fresh, mapped, tensors_in

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


def net(run: Forward | None = None, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(0)
    model = Net(run)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64) + 0.3)
    return model.to(dtype).eval()


def x_of(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape or (5, 4), generator=generator, dtype=torch.float64)


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
    """Let every fold be wrong by a billionth."""
    right = fold.planned

    def more(*args: Any) -> Any:
        plan = right(*args)
        for table in (plan.values, plan.added):
            for slot, value in table.items():
                table[slot] = value * (1 + 1e-9)
        return plan

    monkeypatch.setattr(fold, "planned", more)


@dataclass
class Batch:
    x: Tensor


@dataclass(slots=True)
class Slotted:
    x: Tensor


class Attributes(OrderedDict):  # type: ignore[type-arg]
    """A dict that torch's pytrees do not know."""


Pair = namedtuple("Pair", "x text")
SEEN: dict[str, Callable[[Tensor], Any]] = {
    "object": Batch,
    "named tuple": lambda h: Pair(h, "text"),
    "deque": lambda h: deque([h]),
    "user dict": lambda h: UserDict({"x": h}),
    "encoding": lambda h: __import__("transformers").BatchEncoding({"x": h}),
    "twice": lambda h: [h, {"a": (h, h)}],
}
HIDDEN: dict[str, Callable[[Tensor], Any]] = {
    "slots": Slotted,
    "namespace": lambda h: SimpleNamespace(x=[h]),
    "dict of its own": lambda h: Attributes(x=h),
    "set": lambda h: {h},
    "closure": lambda h: lambda: h,
    "partial": lambda h: functools.partial(print, h),
    "iterator": lambda h: iter([h]),
    "exception": RuntimeError,
    "array": lambda h: np.ones(2),
}


@pytest.mark.parametrize("name", SEEN)
def test_tensors_in_plain_objects_are_seen_once_and_drawn_anew(name: str) -> None:
    tensor = torch.linspace(-1, 1, 9)
    given = SEEN[name](tensor)
    found = tensors_in(given)
    assert len(found) == 1
    assert found[0] is tensor
    drawn = fresh(((given,), {}), 1)[0][0]
    assert type(drawn) is type(given)
    assert not torch.equal(tensors_in(drawn)[0], tensor)
    assert tensors_in(given)[0] is tensor


def test_a_norm_in_any_output_stays() -> None:
    model = net(lambda m, x: (lambda h: (m.h(h), Batch(h)))(m.n(m.e(x))))
    assert fold_(model, x_of(), center=False).sites[0].affine.reason == "the model returns it"


@pytest.mark.parametrize("name", HIDDEN)
def test_outputs_and_inputs_that_hide_tensors_are_refused(name: str) -> None:
    model = net(lambda m, x: (lambda h: (m.h(h), HIDDEN[name](h)))(m.n(m.e(x))))
    unchanged(model, x_of(), match=r"cannot be seen")
    unchanged(net(), HIDDEN[name](x_of()), match=r"cannot be seen")


def test_copies_share_nothing_and_keep_aliases() -> None:
    x = torch.zeros(2)
    made = mapped({"a": [x, x], "b": Batch(x)}, Tensor.clone)
    made["a"][0].add_(1)
    assert made["b"].x is made["a"][1]
    assert not x.any()


def jump(m: Any, x: Tensor) -> Tensor:
    y = m.h(m.n(m.e(x)))
    return torch.where(y > 1, torch.finfo(y.dtype).min, y)


def overflow(m: Any, x: Tensor) -> Any:
    y = m.h(m.n(m.e(x)))
    return y, y * 30000


@pytest.mark.parametrize("run", [jump, overflow])
def test_outputs_too_coarse_in_half_precision_give_no_tolerance(run: Forward) -> None:
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
    check = Check(model, [((x_of().bfloat16(),), {})])
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
    assert report.error is not None
    assert 0 < report.error <= 2 * report.noise == report.tolerance < 0.2


def test_a_model_without_a_float32_copy_asks_for_a_tolerance() -> None:
    model = net(lambda m, x: m.h(m.n(m.e(x.to(torch.bfloat16)))), torch.bfloat16)
    unchanged(model, x_of().bfloat16(), match="pass tolerance=")
    assert fold_(model, x_of().bfloat16(), tolerance=0.1).noise is None


@pytest.mark.usefixtures("wrong")
def test_a_wrong_fold_is_found_whatever_the_example_is() -> None:
    model = net(lambda m, x: m.h(m.n(m.e(x.log()))))
    for example in (x_of().abs() + 0.1, torch.ones(5, 4).double()):
        unchanged(model, example, match="differ by")
    model = net()
    model.register_buffer("expanded", torch.ones(1).expand(4))
    unchanged(model, x_of(), match=r"everything.*put")


@pytest.mark.parametrize("example", [torch.zeros(5, 4).double(), x_of().abs() + 0.1])
def test_the_two_fresh_inputs_and_the_example_differ(example: Tensor) -> None:
    model = net(lambda m, x: m.h(m.n(m.e((x + 1e-9).log() if x.min() > 0 else x))))
    check = Check(model, [((example,), {})])
    assert check.fresh == 2
    inputs = [args[0] for args, _ in check.inputs]
    assert not any(torch.equal(inputs[i], inputs[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_what_is_drawn_keeps_signs_masks_and_aliases() -> None:
    x = torch.rand(50)
    mask, ids = torch.tensor([[1, 0, 1]]), torch.tensor([[3, 9, 5]])
    named: dict[str, Any] = {"c": torch.full((9,), -2.0), "m": mask, "i": ids}
    named["inf"] = torch.tensor([-torch.inf])
    (a, b), drawn = fresh(((x, x), named), 1)
    assert a is b
    assert ((a >= x.min()) & (a <= x.max())).all()
    assert (drawn["c"] < 0).all()
    assert not (drawn["c"] == -2).all()
    assert torch.equal(drawn["m"], mask)
    assert torch.isinf(drawn["inf"]).all()
    assert ((drawn["i"] >= 3) & (drawn["i"] <= 9)).all()
    (a, _), drawn = fresh(((x, x), named), 1, all_random=False)
    assert not torch.equal(a, x)
    assert torch.equal(drawn["i"], ids)
    assert (drawn["c"] == -2).all()


def test_an_example_that_gives_no_number_is_no_example() -> None:
    model = net(lambda m, x: (m.h(m.n(m.e(x))), x.log()))
    unchanged(model, -x_of().abs(), error=DataError, match="all NaN")


def test_outputs_that_are_not_dense_are_refused() -> None:
    def ragged(m: Any, x: Tensor) -> Any:
        if torch.compiler.is_exporting():
            return m.h(m.n(m.e(x)))
        return torch.nested.as_nested_tensor([m.h(m.n(m.e(x)))], layout=torch.jagged)

    unchanged(net(ragged), x_of(), match="dense")


def test_code_that_needs_the_norm_s_weight_is_an_error_of_ours() -> None:
    model = net(lambda m, x: m.h(m.n(m.e(x.to(m.n.weight.dtype)))))
    error = unchanged(model, x_of(), match=r"everything.*put")
    assert isinstance(error.__cause__, AttributeError)


def test_what_applying_raises_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("out of paper")

    # The last step: all tensors are changed by then.
    monkeypatch.setattr(apply, "swap_", fail)
    assert isinstance(unchanged(net(), x_of(), match="out of paper").__cause__, RuntimeError)


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


def scaled(m: Any, x: Tensor) -> Any:
    return m.h(m.n(x)) * (2 if m.config.tie_word_embeddings else 1), m.e(x)


@pytest.mark.parametrize(
    ("config", "run", "words"),
    [
        (Unreadable(), lambda m, x: (m.h(m.n(x)), m.e(x)), "no such key"),
        (Config(), scaled, r"everything.*put"),
        (Config(), lambda m, x: (m.h(m.n(x)), m.e(x)), None),
    ],
)
def test_a_config_says_afterwards_that_weights_are_untied_or_nothing_changes(
    config: Config, run: Forward, words: str | None
) -> None:
    model = net(run)
    model.config, model.e = config, nn.Linear(C, 3, bias=False, dtype=torch.float64)
    model.e.weight = model.h.weight
    model.eval()
    if words is None:
        assert fold_(model, x_of(5, C), untie=True).untied
    else:
        unchanged(model, x_of(5, C), untie=True, match=words)
    assert config.tie_word_embeddings is (words is not None)
    assert (model.e.weight is model.h.weight) is (words is not None)


def only(accepts: Callable[[Tensor], bool]) -> Any:
    def run(m: Any, x: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and not accepts(x):
            raise ValueError("not this")
        y: Tensor = m.h(m.n(m.e(x)))
        return y

    return net(run)


def test_a_model_that_takes_one_example_only_is_checked_on_it() -> None:
    example = x_of()
    report = fold_(only(lambda x: torch.equal(x, example)), example)
    assert (report.count("affine"), report.fresh) == (1, 0)
    assert "on the example only" in str(report)
    assert fold_(only(lambda x: bool(x.min() >= 0)), example.abs()).fresh == 2


def test_examples_with_gradients_and_complex_ones_are_copied() -> None:
    assert fold_(net(), x_of().requires_grad_() * 2).count("affine") == 1
    model = net(lambda m, x: m.h(m.n(m.e(torch.view_as_real(x).flatten(1)))))
    assert fold_(model, torch.view_as_complex(x_of(5, 2, 2))).count("affine") == 1


class Cache:
    """A store that a model writes into, as a key-value cache."""

    def __init__(self, past: Tensor) -> None:
        self.past = past

    def grown(self, new: Tensor) -> Tensor:
        self.past = torch.cat([self.past, new], 0)
        return self.past


def test_a_cache_stays_as_the_caller_left_it() -> None:
    past = x_of(2, 4)
    before = past.clone()
    for tolerance in (None, 0.0):
        model = net(lambda m, x: m.h(m.n(m.e(x[1].grown(x[0])))))
        cache = Cache(past)
        if tolerance is None:
            assert fold_(model, (x_of(), cache)).count("affine") == 1
        else:
            unchanged(model, (x_of(), cache), tolerance=tolerance, match="differ by")
        assert cache.past is past
        assert torch.equal(past, before)


def test_a_transformers_cache_is_an_example_and_does_not_grow() -> None:
    from transformers.cache_utils import DynamicCache

    model: Any = build("gpt2").double()
    ids, cache = torch.randint(2, 30, (2, 6)), DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        exact = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
        report = fold_(model, ids[:, :1], past_key_values=cache, untie=True)
        given = model(ids[:, :1], past_key_values=copy.deepcopy(cache)).logits
    assert report.count("affine") >= 2
    assert cache.get_seq_length() == 6
    assert (given - exact).norm() <= 1e-12 * exact.norm()


def test_what_a_forward_keeps_on_self_stays_the_caller_s() -> None:
    def stash(m: Any, x: Tensor) -> Tensor:
        m.last = m.n(m.e(x))
        y: Tensor = m.h(m.last)
        return y

    model = net(stash)
    model(x_of())
    last = model.last
    fold_(model, x_of())
    assert model.last is last


def test_the_trace_does_not_start_from_what_the_first_run_kept_on_a_module() -> None:
    def lazy(m: Any, x: Tensor) -> Any:
        # The first call keeps a tensor that later calls use.
        if not hasattr(m, "kept"):
            m.kept = m.h.weight * 2
        return m.h(m.n(m.e(x))), functional.linear(x.repeat(1, 2), m.kept)

    report = fold_(net(lazy), x_of())
    assert "h.weight" in (report.sites[0].affine.reason or "")


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_layers_that_do_more_than_a_product_stay() -> None:
    class Linear(nn.Linear):
        """Of the name, not of the class."""

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.relu())

    normed, named, hooked = net(), net(), net()
    nn.utils.weight_norm(normed.h)
    named.h = Linear(C, 3).double().eval()
    hooked.h.register_forward_hook(lambda module, args, output: output + args[0].sum())
    for model in (normed, named, hooked):
        assert fold_(model, x_of()).sites[0].affine.state == "refused"
