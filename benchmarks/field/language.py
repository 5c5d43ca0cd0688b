"""Tasks of EleutherAI's lm-evaluation-harness, such as LAMBADA and HellaSwag."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

from benchmarks.field.pair import Result, of_both, required, side_by_side
from dynorm.errors import DataError
from dynorm.jobs.checkpoint import Pretrained, load_pretrained

PACKAGE = "lm-eval>=0.4.9"
Figures = dict[str, float]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--tasks", nargs="+", default=["lambada_openai", "hellaswag"])
    parser.add_argument("--shots", type=int, default=0, help="examples in front of each question")
    parser.add_argument("--limit", type=int, help="documents per task, to try the command")
    parser.add_argument("--batch", type=int, default=8)


def run(sources: tuple[str, str], options: Namespace) -> Result:
    """Return each metric of each task, for both models."""
    required("lm_eval", PACKAGE)
    load = partial(load_pretrained, device=options.device)
    original, converted = of_both(load, partial(evaluated, options=options), sources)
    figures = side_by_side(original["values"], converted["values"], original["higher_is_better"])
    facts = {
        "tasks": options.tasks,
        "shots": options.shots,
        "limit": options.limit,
        "evaluator": original["evaluator"],
    }
    # Accuracies and perplexities have different units, so the worst is looked for among the first.
    accuracies = [figure for figure in figures if figure.higher_is_better]
    return Result(figures, accuracies or figures, facts)


def evaluated(pretrained: Pretrained, options: Namespace) -> dict[str, Any]:
    """Return the values of one model, and which of them should be large."""
    lm_eval = required("lm_eval", PACKAGE)
    wrapper = required("lm_eval.models.huggingface", PACKAGE).HFLM
    language_model = wrapper(
        pretrained=pretrained.model,
        tokenizer=pretrained.tokenizer,
        batch_size=options.batch,
        device=options.device,
    )
    results = lm_eval.simple_evaluate(
        model=language_model,
        tasks=options.tasks,
        num_fewshot=options.shots,
        limit=options.limit,
        log_samples=False,
        bootstrap_iters=0,
    )
    values, higher_is_better = _metrics(results)
    if not values:
        raise DataError(f"the tasks must have a metric that is a number: {options.tasks} have none")
    return {
        "values": values,
        "higher_is_better": higher_is_better,
        "evaluator": results.get("lm_eval_version"),
    }


def _metrics(results: dict[str, Any]) -> tuple[Figures, dict[str, bool | None]]:
    """Return the metrics of all tasks, and their directions.

    The harness names a metric "acc,none": the metric, and the filter of the answers.
    """
    values: Figures = {}
    directions: dict[str, bool | None] = {}
    for task, metrics in results["results"].items():
        for key, value in metrics.items():
            metric, comma, _ = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            name = f"{task} {key.removesuffix(',none')}"
            values[name] = float(value)
            directions[name] = results["higher_is_better"].get(task, {}).get(metric)
    return values, directions
