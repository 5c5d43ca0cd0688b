"""Do the runs of the study that are missing: ``python -m studies.sweep [--only GLOB] [--list]``.

A result is added to the file when its run is over, so the sweep can be stopped at any time.
"""

import argparse
import gzip
import json
from fnmatch import fnmatchcase
from pathlib import Path

from studies.plan import missing
from studies.settings import Settings
from studies.train import Record, run

RESULTS = Path(__file__).parent / "results" / "runs.jsonl.gz"


def read_results(path: Path = RESULTS) -> dict[str, Record]:
    """Return the results by the name of the run."""
    results = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            results[Settings(**record["settings"]).name] = record
    return results


def write_results(results: dict[str, Record], path: Path = RESULTS) -> None:
    """Write all results, sorted by name, so that the same results give the same file."""
    lines = [json.dumps(results[name]) + "\n" for name in sorted(results)]
    part = path.with_suffix(".part")
    part.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    part.replace(path)


def main() -> None:
    """Do the missing runs, or list them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="a glob for the names of the runs")
    parser.add_argument("--list", action="store_true", help="list the runs, and stop")
    arguments = parser.parse_args()
    results = read_results()
    while True:
        # Asked after each run: which seeds are wanted depends on the best rate.
        waiting = [s for s in missing(results) if fnmatchcase(s.name, arguments.only)]
        if arguments.list or not waiting:
            break
        settings = waiting[0]
        record = run(settings)
        loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f} nats"
        print(f"{settings.name}: {loss}, {record['seconds'] / 60:.1f} min", flush=True)
        results[settings.name] = record
        write_results(results)
    for settings in waiting:
        print(settings.name)


if __name__ == "__main__":
    main()
