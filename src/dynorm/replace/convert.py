"""Replace the norms of a model by point-wise layers."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dynorm.errors import ModelError, listed
from dynorm.find.affine import affine_parts
from dynorm.find.probe import has_other_forward
from dynorm.find.tokens import tensor_like
from dynorm.guard import require_plain_model
from dynorm.layers import LinearControl, PointwiseNorm
from dynorm.plain import Plain
from dynorm.replace.converted import Replaced, dynorm_layers, replaced_by
from dynorm.replace.options import LayerOptions, Target, chosen_options, options_by_glob
from dynorm.replace.swap import swap_, take_over_
from dynorm.site import NormSite, check_sites
from dynorm.table import Table, count_of


@dataclass(frozen=True)
class ConversionReport(Plain):
    """The result of ``convert_``, one row per site.

    Args:
        converted: the sites that were replaced, in call order.
        layers: the name of the layer of each.
        refused: the selected sites that keep their norm; ``site.refused`` is the reason.
        skipped: the sites that could be replaced, but keep their norm because the options say so.

    Example:
        >>> site = dynorm.site.NormSite("norm", kind="rmsnorm", normalized_shape=(8,))
        >>> print(dynorm.report.ConversionReport([site], ["dyisru"], []))
        1 norm replaced by dyisru, 0 kept
        <BLANKLINE>
        site  norm        layer
        norm  rmsnorm(8)  dyisru
    """

    converted: list[NormSite]
    layers: list[str]
    refused: list[NormSite]
    skipped: list[NormSite] = field(default_factory=list)

    def __str__(self) -> str:
        """Return the report as a table."""
        rows = []
        for site, layer in zip(self.converted, self.layers, strict=True):
            rows.append((site.path, f"{site.kind}({site.normalized_shape[0]})", layer))
        return str(Table(("site", "norm", "layer"), rows, self._notes(), self._title()))

    def summary(self) -> str:
        """Return the report without the table of the replaced norms."""
        return str(Table((), (), self._notes(), self._title()))

    def _title(self) -> str:
        norms = count_of(len(self.converted), "norm")
        names = ", ".join(dict.fromkeys(self.layers))
        return f"{norms} replaced by {names}, {len(self.refused) + len(self.skipped)} kept"

    def _notes(self) -> list[str]:
        notes = []
        for site in self.refused:
            path = site.path or "the model"
            notes.append(f"{path}: {site.class_name} kept, {site.refused}")
        if self.skipped:
            notes.append(f"kept as the options say: {listed([site.path for site in self.skipped])}")
        return notes


def convert_(
    model: nn.Module,
    sites: Sequence[NormSite],
    to: Target = LayerOptions.to,
    *,
    witnesses: int = LayerOptions.witnesses,
) -> ConversionReport:
    """Replace norms by point-wise layers, in place.

    Weight, bias, dtype, device, ``requires_grad``, train or eval, hooks, path, order and sharing
    stay as they were, and so does the choice of the output's dtype. The constants are defaults
    until :func:`calibrate_` sets them. All layers are built before the first norm is replaced, so
    an error leaves the model as it was. :func:`restore_` undoes the conversion.

    Args:
        model: any module; plain, neither compiled nor wrapped.
        sites: the result of :func:`find_norms` on this very model.
        to: "dyisru", "dyt" (scaled, eq. 11), "derf" or "linear" (the control); or "annealed"
            (towards DyISRU), "annealed_dyt", "annealed_derf", "annealed_linear": they compute the
            norm until :func:`set_anneal_` moves them. A mapping gives different norms different
            layers, by globs of their paths: ``{"*.layers.0.*": "keep", "*.ln_f": "dyt", "head.*":
            {"witnesses": 4}}``. The first glob that matches a norm decides. A mapping
            of options lacks nothing that this call's arguments have, and "keep" leaves the norm.
            ``"*"`` is for the norms that no other glob matches, which become DyISRU without it.
        witnesses: how many channels :func:`calibrate_` may choose for each DyISRU, whose token sizes
            they show, at most 16. 0 keeps the pure function of one channel; other functions take 0.

    Returns:
        A report with one row per site. Refused sites keep their norms and are listed.

    Raises:
        ArgumentError: ``to`` or an option is unknown, a glob matches no site, or witnesses are for
            another function than DyISRU.
        ModelError: the model has no norm to replace, is converted already, is compiled, wrapped or
            on the meta device; the sites belong to another model; or a norm shares a weight of
            another shape than its channels with another module.

    Warns:
        UserWarning: a norm is part of a peft adapter, as ``modules_to_save`` makes it.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        >>> sites = dynorm.find_norms(model, torch.randn(4, 8))
        >>> print(dynorm.convert_(model, sites))
        1 norm replaced by dyisru, 0 kept
        <BLANKLINE>
        site  norm          layer
        1     layernorm(8)  dyisru
    """
    by_glob = options_by_glob(to, LayerOptions(witnesses=witnesses))
    require_plain_model(model)
    _require_sites(model, sites)
    options = chosen_options(sites, by_glob)
    replaceable: list[NormSite] = []
    refused: list[NormSite] = []
    skipped = []
    for site in sites:
        if site.path in options:
            chosen = replaceable if site.refused is None else refused
            chosen.append(site)
        elif site.refused is None:
            skipped.append(site)
    if not replaceable:
        reasons = "; ".join(f"{site.path or 'the model'}: {site.refused}" for site in refused)
        raise ModelError(
            "at least one norm must be replaceable, but none of the chosen ones is "
            f"({reasons or 'to= keeps them all'})"
        )
    modules = dict(model.named_modules(remove_duplicate=False))
    copies: dict[Tensor, nn.Parameter] = {}
    new: dict[nn.Module, nn.Module] = {}
    for site in replaceable:
        norm = _norm_at(modules, site)
        new[norm] = _built(norm, site, options[site.path], tensor_like(norm, model), copies)
    _warn_of_adapters(modules, replaceable)
    # A shared parameter stays shared if the layer holds it in the same shape and without NaN.
    same = {source: copy for source, copy in copies.items() if torch.equal(source, copy)}
    _require_unshared(model, new, copies.keys() - same.keys())
    swap_(model, {**new, **same})
    names = [options[site.path].to for site in replaceable]
    return ConversionReport(replaceable, names, refused, skipped)


def _require_sites(model: nn.Module, sites: Sequence[NormSite]) -> None:
    """Check that there are sites, and say why there may be none."""
    check_sites(sites)
    if sites:
        return
    layers = dynorm_layers(model)
    if layers:
        raise ModelError(
            "the model must have norms, but those it had are converted already: "
            f"{_undo(layers.values())}"
        )
    raise ModelError(
        "the model must have norms, but find_norms saw none: give find_norms an example that "
        "reaches them; a norm that is computed by a function must become a module first"
    )


def _warn_of_adapters(modules: Mapping[str, nn.Module], sites: Iterable[NormSite]) -> None:
    """Warn of the layers that peft will save with its adapter because of ``modules_to_save``.

    peft names the parts of an adapter in ``adapter_layer_names`` of the module that has them.
    """
    inside = []
    for site in sites:
        parts = site.path.split(".")
        for k, part in enumerate(parts):
            parent = modules[".".join(parts[:k])]
            if part in getattr(parent, "adapter_layer_names", ()):
                inside.append(site.path)
                break
    if inside:
        warnings.warn(
            f"{len(inside)} of the norms are part of a peft adapter (the first is {inside[0]}). "
            "Its file will hold the constants of the new layers, which a base model that is not "
            "converted drops: convert the base model first, save it with dynorm.save, and put the "
            "adapter on the loaded one; or save the result of merge_and_unload()",
            UserWarning,
            stacklevel=3,
        )


def _undo(layers: Iterable[nn.Module]) -> str:
    """Return the remedy for layers at the paths of norms."""
    if all(replaced_by(layer) is not None for layer in layers):
        return "call dynorm.restore_(model) first"
    return (
        "it was loaded or built so, and its norms are not known here; to convert it in another "
        "way, load the original model; dynorm.distill_, dynorm.fold_ and dynorm.save accept it as "
        "it is"
    )


def _norm_at(modules: Mapping[str, nn.Module], site: NormSite) -> nn.Module:
    if not site.path:
        raise ModelError(
            "a norm must have a parent to be replaced in, but the model is the norm itself: wrap "
            "it first"
        )
    module = modules.get(site.path)
    if isinstance(module, PointwiseNorm):
        raise ModelError(
            f"{site.path!r} must be a norm, but is converted already: {_undo([module])}"
        )
    if module is None or type(module).__qualname__ != site.class_name:
        raise ModelError(
            f"the sites must be this model's, but it has no {site.class_name} at {site.path!r}: call "
            "find_norms again"
        )
    if hasattr(module, "_hf_hook"):
        raise ModelError(
            f"{site.path!r} must keep its class's forward, but a hook of accelerate replaces it: "
            "remove it first, with accelerate.hooks.remove_hook_from_submodules(model)"
        )
    if has_other_forward(module):
        raise ModelError(
            f"{site.path!r} must keep its class's forward, but another one was set on the instance "
            "since find_norms saw it, as Liger-Kernel does: undo the patch, or convert first and "
            "patch the other modules then"
        )
    return module


def _built(
    norm: nn.Module,
    site: NormSite,
    options: LayerOptions,
    like: Tensor,
    copies: dict[Tensor, nn.Parameter],
) -> PointwiseNorm:
    """Return the layer for a norm, on the device and in the dtype of ``like``."""
    (channels,) = site.normalized_shape
    # No value of a norm is larger: closed form 2 (eq. 13) for LayerNorm, closed form 3 for RMSNorm.
    bound = channels
    if site.kind != "rmsnorm":
        bound = max(channels - 1, 1)
    has_bias = site.bias_name is not None
    # A line takes the mean out by its bias only.
    if issubclass(options.kind, LinearControl) and site.kind == "layernorm":
        has_bias = True
    own: dict[str, Any] = {}
    if options.is_annealed:
        own = {"kind": site.kind, "norm_eps": site.eps}
    layer = options.kind(
        channels,
        elementwise_affine=has_bias or site.weight_name is not None,
        bias=has_bias,
        scale=math.sqrt(bound),
        dim=site.dim,
        promote=site.promote,
        weight_offset=site.weight_offset,
        device=like.device,
        dtype=like.dtype,
        **own,
    )
    _fill_(layer, norm, site, copies)
    take_over_(layer, norm, Replaced(norm, site, min(options.witnesses, channels)))
    return layer


# Parameters that are made in inference mode can never be trained.
@torch.inference_mode(False)
def _fill_(
    layer: PointwiseNorm, norm: nn.Module, site: NormSite, copies: dict[Tensor, nn.Parameter]
) -> None:
    """Give a layer the norm's weight and bias, in their dtypes; shared tensors stay shared."""
    trained = [parameter.requires_grad for parameter in norm.parameters()]
    layer.requires_grad_(any(trained) or not trained)
    for name, part in affine_parts(norm, site).items():
        source = part.tensor
        if source not in copies:
            # The tensor and not the value: of a norm that scales by 1 + w it is w, and the layer
            # adds 1 too.
            copied = source.detach().clone().reshape(site.normalized_shape)
            copies[source] = nn.Parameter(copied, requires_grad=source.requires_grad)
        setattr(layer, name, copies[source])


def _require_unshared(
    model: nn.Module,
    norms: Iterable[nn.Module],
    changed: set[Tensor],
) -> None:
    """Refuse a parameter that other modules share, if the layer holds it in another shape or with NaN."""
    inside = {part for norm in norms for part in norm.modules()}
    for path, module in model.named_modules():
        if module in inside:
            continue
        for name, parameter in module._parameters.items():
            if parameter in changed:
                full_name = f"{path}.{name}".lstrip(".")
                raise ModelError(
                    "a weight or bias that is not finite, or not of the normalized shape, must "
                    f"belong only to a norm, but {full_name!r} is the same parameter: untie them, "
                    "or keep the norm with to={path: 'keep'}"
                )
