"""Write the tables of README.md and docs/ from the committed results: ``python -m benchmarks.tables``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.committed import Row, kinds_of, left_in_place, load, runs_of
from dynorm.recipe import ENCODER

ROOT = Path(__file__).parent.parent
START = "<!-- {name}: made by python -m benchmarks.tables -->"
END = "<!-- end -->"
# Products with at most so many rows are those of decoding.
FEW_ROWS = 64
RETRIEVED = {
    "untrained": "DyISRU, no training",
    "demo": f"DyISRU, {ENCODER.steps} steps",
    "lines": f"a line, {ENCODER.steps} steps",
    "witnesses": f"DyISRU, 4 witnesses, {ENCODER.steps} steps",
}


def lines_of(heads: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for cells in rows:
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def embedding(figures: Row) -> str:
    """Return mean and worst cosine, and how often the nearest neighbour is the same."""
    return (
        f"{figures['cosine_mean']:.4f} / {figures['cosine_min']:.3f} / {figures['neighbours']:.0%}"
    )


def language(figures: Row) -> str:
    """Return the growth of the loss, the divergence and the worst token's."""
    return f"{figures['loss_difference']:+.3f} / {figures['kl']:.3f} / {figures['kl_worst']:.1f}"


def quality_table(model: str) -> Callable[[], str]:
    """Return the table of a model: one row per conversion and stage, one column per kind of data."""

    def table() -> str:
        figures_of = language if model == "smollm2" else embedding

        def cell(value: Row | str) -> str:
            return value if isinstance(value, str) else figures_of(value)

        rows = []
        runs = runs_of(model)
        kinds = list(
            dict.fromkeys(k for run in runs for row in run.values() for k in kinds_of(row))
        )
        for run in runs:
            for steps, row in run.items():
                stage = f"{steps:,} × {row['batch']}" if steps else "no training"
                if not row.get("kept", True):
                    stage += ", put back"
                if row["seeds"] > 1:
                    stage += f", {row['seeds']} seeds"
                rows.append(
                    [
                        left_in_place(row),
                        stage,
                        *(cell(row.get(kind, "")) for kind in kinds),
                    ]
                )
        return lines_of(["in the norms' place", "distilled, steps × batch", *kinds], rows)

    return table


def recipes_table(model: str, digits: int) -> str:
    """Return one row per way to distil a model, with its figures on the way."""
    rows = []
    steps: list[int] = []
    for way, points in load("recipes")[model].items():
        steps = [point["step"] for point in points]
        cells = []
        for point in points:
            kinds = [name for name in point if name not in ("step", "cpu_seconds")]
            cells.append(" / ".join(f"{point[kind]:.{digits}f}" for kind in kinds))
        rows.append([way, *cells])
    return lines_of(["way", *(f"{step} steps" for step in steps)], rows)


def headline_table() -> str:
    """Return one row per thing that is left: all-MiniLM-L6-v2, without training and distilled."""
    rows = []
    for run in runs_of("minilm"):
        if run[0]["to"] in ("dyt", "derf"):
            continue
        cells = [left_in_place(run[0])]
        for steps in (0, ENCODER.steps):
            if steps in run:
                figures = run[steps]["docstrings"]
                cells.append(f"{figures['cosine_mean']:.3f} ({figures['cosine_min']:.2f})")
            else:
                cells.append("not run")
        rows.append(cells)
    heads = ["in the norms' place", "no training", f"distilled, {ENCODER.steps} steps"]
    return lines_of(heads, rows)


def retrieval_table() -> str:
    """Return one row per model: means over the draws of packages, and the largest loss in a draw."""
    rows = []
    found = load("retrieval")["rows"]
    original = found[0]
    for row in found:
        losses = [a - b for a, b in zip(original["mrr"], row["mrr"], strict=True)]
        rows.append(
            [
                RETRIEVED.get(row["model"], row["model"]),
                f"{mean(row['recall_at_1']):.1%}",
                f"{mean(row['mrr']):.4f}",
                "" if row is original else f"{max(losses):.4f}",
            ]
        )
    return lines_of(
        [
            "all-MiniLM-L6-v2",
            "right package first",
            "mean reciprocal rank",
            "largest loss of a draw",
        ],
        rows,
    )


def deploy_table() -> str:
    """Return one row per exported model: nodes, reductions and time."""
    rows = []
    for title, row in load("deploy")["rows"].items():
        reductions = ", ".join(f"{n} {kind}" for kind, n in row["reductions"].items())
        median, lower, upper = row["time_over_norms"]
        time = f"{median:.2f} ({lower:.2f} to {upper:.2f})"
        rows.append([title, str(row["nodes"]), reductions or "none", time])
    return lines_of(
        ["in the norms' place", "nodes", "reductions over channels", "time over the norms'"], rows
    )


def speed_table() -> str:
    """Return one row per pass and dtype: how many times as fast as LayerNorm DyISRU is, by size."""
    document = load("speed")
    rows: dict[str, list[str]] = {}
    sizes = []
    for row in document["operations"]:
        size = "{} x {}".format(*row["size"])
        if size not in sizes:
            sizes.append(size)
        title = f"{row['pass']}, {row['dtype']}"
        median, lower, upper = row["as_fast_as_layer_norm"]["DyISRU"]
        rows.setdefault(title, []).append(f"{median:.2f} ({lower:.2f} to {upper:.2f})")
    machine = document["machine"]
    instructions = ", ".join(machine["instructions"])
    note = (
        f"{machine['cpu']} ({instructions}), {machine['threads']} threads, torch {machine['torch']}; "
        f"medians and quartiles of {document['rounds']} rounds."
    )
    return lines_of(["DyISRU", *sizes], [[title, *cells] for title, cells in rows.items()]) + (
        f"\n\n{note}"
    )


def speed_models_table() -> str:
    """Return the times of whole models over the same model with identities in the norms' place."""
    models = load("speed")["models"]
    rows = []
    for row in models:
        cells = [f"{row['model']}, {row['input']}"]
        for median, lower, upper in row["over_identities"].values():
            cells.append(f"{median:.3f} ({lower:.3f} to {upper:.3f})")
        rows.append(cells)
    heads = ["its norms" if name == "norms" else name for name in models[0]["over_identities"]]
    return lines_of(["time over identities", *heads], rows)


def tile_rows(kernel: str) -> list[Row]:
    """Return the rows of a Triton kernel, with the microseconds of the tile that the code takes."""
    rows = []
    for row in load("tiles")["rows"]:
        if row["kernel"] == kernel:
            rows.append(row | {"chosen": row["microseconds"][row["chosen"]]})
    return rows


def gpu_table() -> str:
    """Return the time of the kernels of a layer on a GPU over the time to move the same data."""
    backward = {tuple(row["size"]): row["chosen"] for row in tile_rows("backward")}
    rows = []
    for row in tile_rows("forward"):
        times = row["microseconds"]
        copy = times["copy"]
        cells = ["{:,} x {:,}".format(*row["size"]), f"{copy:.1f}"]
        for time in (row["chosen"], times["RMSNorm"], times["LayerNorm"]):
            cells.append(f"{time:.1f} ({time / copy:.2f})")
        # A copy moves two tensors, and a backward pass three.
        limit = 1.5 * copy
        time = backward.get(tuple(row["size"]))
        cells.append("" if time is None else f"{time:.1f} ({time / limit:.2f})")
        rows.append(cells)
    heads = ["rows x channels", "a copy", "DyISRU", "RMSNorm", "LayerNorm", "DyISRU backward"]
    return lines_of(heads, rows)


def models_gpu_table() -> str:
    """Return the milliseconds of whole models on a GPU, over those of the compiled norm, and the machine."""
    contenders = {
        "norm compiled": "its norm, compiled",
        "dyisru fused": "DyISRU, fused",
        "dyisru compiled": "DyISRU, compiled",
        "identity compiled": "nothing, compiled",
        "norm": "its norm, eager",
        "dyisru": "DyISRU, eager",
    }
    document = load("gpu")
    times: dict[str, dict[str, float]] = {}
    for row in document["models"]:
        title = f"{row['model']}: {row['pass']}"
        times.setdefault(title, {})[row["contender"]] = row["graph"]
    rows = []
    for title, found in times.items():
        norm = found["norm compiled"]
        cells = [title, f"{norm:.2f}"]
        for name in list(contenders)[1:]:
            cells.append(f"{found[name]:.2f} ({found[name] / norm:.2f})")
        rows.append(cells)
    lines = lines_of(["milliseconds", *contenders.values()], rows)
    return f"{lines}\n\n{described_gpu(document)}"


def family_table() -> str:
    """Return the microseconds of layers and norms on a GPU, and over the time to move the data."""
    size = load("gpu")["family"][0]
    copy = size["forward"]["copy"]["median"]
    names = {
        "dyisru layer": "DyISRU",
        "dyisru compiled": "DyISRU, its definition compiled",
        "dyt layer": "DyT",
        "derf layer": "Derf",
        "dyisru layer, few witnesses": "DyISRU with 4 witnesses",
        "dyt liger": "DyT of Liger",
        "rms_norm": "RMSNorm of torch",
        "rms_norm compiled": "RMSNorm, compiled",
        "rms_norm liger": "RMSNorm of Liger",
        "rms_norm quack": "RMSNorm of quack",
        "layer_norm": "LayerNorm of torch",
        "layer_norm compiled": "LayerNorm, compiled",
    }
    rows = []
    for name, title in names.items():
        cells = [title]
        # A copy moves two tensors; forward and backward move five.
        for which, limit in (("forward", copy), ("both", 2.5 * copy)):
            time = size[which][name]["median"]
            cells.append(f"{1e3 * time:.0f} ({time / limit:.2f})")
        rows.append(cells)
    return lines_of(["microseconds", "forward", "forward and backward"], rows)


def product_table() -> str:
    """Return the times of products of many rows, and the machine."""
    document = load("tiles")
    rows = [row for row in tile_rows("product") if row["size"][0] > FEW_ROWS]
    return f"{product_lines(rows)}\n\n{described_gpu(document)}"


def described_gpu(document: Any) -> str:
    """Return the machine of a benchmark, and what must be known of the run."""
    device = document["device"]
    note = f"{device['name']}, torch {device['torch']}, triton {device['triton']}, bfloat16."
    return f"{note} {document.get('note', '')}".rstrip()


def few_rows_table() -> str:
    """Return the times of products of few rows, as in decoding."""
    return product_lines([row for row in tile_rows("product") if row["size"][0] <= FEW_ROWS])


def product_lines(products: list[Row]) -> str:
    """Return the times of products with residual and DyISRU in one kernel, and of the unfused ones."""
    rows = []
    for row in products:
        times, fused = row["microseconds"], row["chosen"]
        cells = [row["model"], "{:,} x {:,} x {:,}".format(*row["size"]), f"{fused:.1f}"]
        for name in ("compiled", "with residual", "cuBLAS"):
            cells.append(f"{times[name]:.1f} ({fused / times[name]:.2f})")
        rows.append(cells)
    heads = [
        "model",
        "rows x channels x depth",
        "residual and DyISRU, fused",
        "residual and RMSNorm, unfused",
        "residual, no norm",
        "product only",
    ]
    return lines_of(heads, rows)


def host_table() -> str:
    """Return the microseconds of the host for a layer and for torch's norms."""
    host = load("tiles")["host"]
    rows = []
    for name in ("DyISRU", "RMSNorm", "LayerNorm"):
        cells = [f"{host[title][name]:.0f}" for title in ("forward", "forward and backward")]
        rows.append([name, *cells])
    return lines_of(["microseconds of the host", "forward", "forward and backward"], rows)


def paper_table() -> str:
    """Return the fits of section 4 and the paper's printed values."""
    document = load("paper")
    constants = {"DyT": "alpha", "DyISRU": "beta", "Derf": "alpha", "linear": "slope"}
    not_printed = {"constant": "", "mean_absolute_residual": ""}
    rows = []
    for name, constant in constants.items():
        fit = document["fits"][name]
        printed = document["paper"].get(name, not_printed)
        rows.append(
            [
                name,
                f"{constant} = {fit[constant]:.8g}",
                str(printed["constant"]),
                f"{fit['mean_absolute_residual']:.6g}",
                str(printed["mean_absolute_residual"]),
            ]
        )
    form = document["closed_form"]
    exact = f"m = {form['center']:.5f}, C v = {form['beta']:.8g}"
    rows.append(["closed form, no fit", exact, "", f"{form['mean_absolute_residual']:.1e}", ""])
    return lines_of(
        ["function", "constant", "in the paper", "mean absolute residual", "in the paper"], rows
    )


def studies_table() -> str:
    """Return one row per setting of section 4's simulation: residuals over many samples."""
    rows = []
    for study in load("paper")["studies"]:
        cells = [f"{study['channels']:,}", f"{study['sigma']:g}", f"{study['mean']:g}"]
        for name in ("DyISRU", "DyT"):
            found = study["residuals"][name]
            cells.append(f"{found['median']:.2g} ({found['p5']:.2g} to {found['p95']:.2g})")
        cells.append(f"{study['dyt_wins']:,} of {study['samples']:,}")
        rows.append(cells)
    return lines_of(["C", "sigma", "mean", "DyISRU", "DyT", "DyT nearer"], rows)


def inspection_table() -> str:
    """Return the comparison of section 4 on real activations: one row per model."""
    rows = []
    for name, report in load("inspection")["models"].items():
        cells = [name, str(len(report["sites"]))]
        for part in ("outliers", "core"):
            errors = [site[part]["errors"] for site in report["sites"]]
            least = [min(figures, key=figures.__getitem__) for figures in errors]
            holds = sum(figures["dyisru"] < figures["dyt"] for figures in errors)
            counts = [str(least.count(kind)) for kind in ("dyisru", "dyt", "linear")]
            cells += [str(holds), ", ".join(counts)]
        rows.append(cells)
    best = "least error: DyISRU, DyT, linear"
    heads = ["model", "norms", "outliers: DyISRU below DyT", best, "all channels", best]
    return lines_of(heads, rows)


FAMILIES = {
    "GPT-2, GPT-NeoX, GPT-J, OPT, Falcon, Phi, StableLM, OLMo, MPT, a hand-written GPT": (
        "gpt2",
        "gpt_neox",
        "gptj",
        "opt",
        "falcon",
        "phi",
        "stablelm",
        "olmo",
        "mpt",
        "nanogpt",
    ),
    "Llama, Mistral, Qwen2, Mixtral": ("llama", "mistral", "qwen2", "mixtral"),
    "Qwen3, Gemma 2, Gemma 3, OLMo 2, Cohere": ("qwen3", "gemma2", "gemma3", "olmo2", "cohere"),
    "Mamba": ("mamba",),
    "Bloom": ("bloom",),
    "BERT, RoBERTa, BART, post-norm nn.TransformerEncoder": (
        "bert",
        "roberta",
        "bart",
        "encoder_post",
    ),
    "ModernBERT": ("modernbert",),
    "T5": ("t5",),
    "ViT, DINOv2, CLIP, pre-norm nn.TransformerEncoder": ("vit", "dinov2", "clip", "encoder_pre"),
    "ConvNeXt": ("convnext",),
    "Whisper, Wav2Vec2": ("whisper", "wav2vec2"),
}
"""The models of each row of the table of folds."""


def fold_table() -> str:
    """Return one row per family of architectures: what of its norms folds if all is allowed."""
    models = {row["model"]: row for row in load("fold")["models"]}
    rows = []
    for title, names in FAMILIES.items():
        family = [models[name] for name in names]
        norms = sum(row["norms"] for row in family)
        cells = [title]
        for rewrite in ("affine", "center"):
            folded = sum(row[rewrite][0] for row in family)
            possible = sum(row[rewrite][1] for row in family)
            cells.append(f"{folded} of {possible}" if possible else "none")
        gone = sum(row["lines"]["gone"] for row in family)
        cells.append(f"{gone} of {norms}")
        rows.append(cells)
    return lines_of(["models", "weights and biases", "means", "lines gone"], rows)


def flashnorm_table() -> str:
    """Return time and memory of a fold of a checkpoint's files, one row per size of model."""
    rows = []
    for size, row in load("flashnorm")["rows"].items():
        files = f"{row['gib']} GiB, the largest {row['largest_file_gib']} GiB"
        seconds = f"{row['processor_seconds']} s, {row['seconds']} s in all"
        rows.append([size.upper(), files, seconds, f"{row['peak_memory_gib']} GiB"])
    return lines_of(["a Llama's shapes", "files", "one processor core", "peak memory"], rows)


PAGES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headline": headline_table},
    "docs/quality.md": {
        "minilm": quality_table("minilm"),
        "recipes": partial(recipes_table, "minilm", 4),
        "recipes of smollm2": partial(recipes_table, "smollm2", 2),
        "recipes of dinov2": partial(recipes_table, "dinov2", 4),
        "smollm2": quality_table("smollm2"),
        "dinov2": quality_table("dinov2"),
        "retrieval": retrieval_table,
    },
    "docs/fold.md": {"fold": fold_table, "flashnorm": flashnorm_table},
    "docs/run-elsewhere.md": {"deploy": deploy_table},
    "docs/speed.md": {
        "speed": speed_table,
        "speed-models": speed_models_table,
        "gpu": gpu_table,
        "models-gpu": models_gpu_table,
        "family-gpu": family_table,
        "product": product_table,
        "few-rows": few_rows_table,
        "host": host_table,
    },
    "docs/mathematics.md": {
        "paper": paper_table,
        "studies": studies_table,
        "inspection": inspection_table,
    },
}
"""The tables of each page, by their marks."""


def renewed(page: str) -> str:
    """Return the text of a page with its tables made from the results."""
    text = (ROOT / page).read_text("utf-8")
    for name, table in PAGES[page].items():
        start = START.format(name=name)
        before, rest = text.split(start)
        _, after = rest.split(END, 1)
        text = f"{before}{start}\n{measured(table)}\n{END}{after}"
    return text


def measured(table: Callable[[], str]) -> str:
    """Return a table, or say that its results are not there."""
    try:
        return table()
    except FileNotFoundError as error:
        return f"Not measured for this version: benchmarks/results/{Path(error.filename).name} is missing."


def main() -> None:
    """Renew the tables."""
    for page in PAGES:
        (ROOT / page).write_text(renewed(page), "utf-8")


if __name__ == "__main__":
    main()
