"""Tasks of MTEB, the benchmark of text embeddings, by sentence-transformers."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from functools import partial
from typing import Any

# from_pretrained, which sentence-transformers calls, needs it for a converted model.
import dynorm  # noqa: F401
from benchmarks.field.pair import Result, of_both, required, side_by_side

PACKAGE = "mteb>=2"
LOADER = "sentence-transformers>=5"
TASKS = ["STSBenchmark", "Banking77Classification", "AskUbuntuDupQuestions", "SciFact"]


def add_options(parser: ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--benchmark", help='all tasks of one, such as "MTEB(eng, v2)"')
    parser.add_argument("--batch", type=int, default=32)


def run(sources: tuple[str, str], options: Namespace) -> Result:
    """Return the main score of each task, and their mean, for both models."""
    mteb = required("mteb", PACKAGE)
    transformer = required("sentence_transformers", LOADER).SentenceTransformer
    load = partial(transformer, device=options.device)
    if options.benchmark:
        tasks = mteb.get_benchmark(options.benchmark)
    else:
        tasks = mteb.get_tasks(tasks=options.tasks)
    measure = partial(scores, tasks=tasks, batch=options.batch)
    original, converted = of_both(load, measure, sources)
    figures = side_by_side(original, converted, dict.fromkeys(original, True))
    facts = {"tasks": list(original), "evaluator": getattr(mteb, "__version__", None)}
    mean = side_by_side(_mean(original), _mean(converted), {"mean": True})
    return Result([*mean, *figures], figures, facts)


def scores(model: Any, tasks: Any, batch: int) -> dict[str, float]:
    """Return the main score of a model at each task."""
    mteb = required("mteb", PACKAGE)
    results = mteb.evaluate(
        model,
        tasks,
        encode_kwargs={"batch_size": batch},
        # The cache knows a model by its name, which the original and its conversion may share.
        cache=None,
        show_progress_bar=False,
    )
    return {result.task_name: float(result.get_score()) for result in results.task_results}


def _mean(values: dict[str, float]) -> dict[str, float]:
    return {"mean": sum(values.values()) / len(values)}
