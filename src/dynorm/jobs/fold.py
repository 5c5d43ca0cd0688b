"""Fold the norms of a pretrained model into their neighbours, and save it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from dynorm.errors import ArgumentError, ModelError
from dynorm.fold import FoldReport, fold_
from dynorm.jobs.checkpoint import Checkpoint, example_of, model_name
from dynorm.jobs.flashnorm import fold_files
from dynorm.jobs.stages import Say, silent
from dynorm.jobs.write import require_output, write_out


def fold_pretrained(
    folder: str | Path,
    out: str | Path,
    options: dict[str, Any],
    *,
    format: Literal["flashnorm"] | None = None,
    overwrite: bool = False,
    say: Say = silent,
) -> FoldReport:
    """Fold the transformers model in a folder, and save it with its report in another folder.

    The ``folder`` may be a GGUF file; the ``options`` are those of :func:`dynorm.fold_`. With the
    ``format`` "flashnorm" the weights of RMSNorms are folded as
    :func:`dynorm.jobs.flashnorm.fold_files` does. After an error nothing is written.
    """
    if format is not None and (options.get("add_bias") or not options.get("center", True)):
        raise ArgumentError(
            "--format must come without --add-bias and --no-center, because it folds only weights, "
            "but one of them was given: leave it out"
        )
    import transformers

    folder = Path(folder)
    out = Path(out)
    require_output(folder, out, overwrite=overwrite)
    checkpoint = Checkpoint(folder, dtype="auto")
    remarks: tuple[str, ...] = ()
    save = None
    if format is not None:
        model, report, save = fold_files(checkpoint, untie=options.get("untie", False))
    else:
        names = checkpoint.config.architectures or [""]
        model_class = getattr(transformers, names[0], checkpoint.auto)
        model, remarks = checkpoint.model(model_class)
        inputs: dict[str, Any] = example_of(model, checkpoint.kind)
        say(f"{type(model).__name__} from {folder}, traced with {', '.join(inputs)}")
        for remark in remarks:
            say(remark)
        report = fold_(model, **(inputs | options))
    if not any(report.count(name) for name in ("affine", "center")):
        raise ModelError(
            f"at least one norm must be foldable, but none is; nothing was written\n{report}"
        )
    write_out(
        model,
        folder,
        out,
        overwrite,
        report,
        template="fold.jinja",
        save=save,
        name=model_name(folder),
        remarks=remarks,
    )
    say(f"saved {out / 'model'} and {out / 'report.json'}")
    return report
