"""What a corpus would cost, computed from the measured costs of the stages: nobody has run this size.

    python -m benchmarks.data.corpus_cost [--terabytes 60] [--cores 100 1000] [--core-hour 0.05] [--write]

Reads benchmarks/results/stages.json (python -m benchmarks.data.stages --write) and multiplies. Per stage: core-hours,
bytes shuffled, bytes written to the store, requests for them, and money. A stage costs what one more MB of the text
that it reads cost there; of the corpus each stage reads the share that it read there. A reader asks for blocks of 4
MiB, a writer puts parts of 8 MiB. Hours are core-hours divided by cores: start-up, waiting and network are not in it.
The default prices are list prices (a virtual core on demand, S3 Standard); pass your own.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.results import RESULTS_DIR, WRITE_FLAG, report
from configs.files.file_digests import BLOCK_BYTES

TERABYTE, MEGABYTE, HOUR = 1e12, 1e6, 3600
UPLOADED_PART_BYTES = 8 * 2**20
"""boto3's."""


@dataclass(frozen=True)
class Prices:
    """Dollars."""

    core_hour: float
    gigabyte_month: float
    thousand_puts: float
    thousand_gets: float


@dataclass(frozen=True)
class StageCost:
    """Of one stage over the whole corpus."""

    core_hours: float
    shuffled_terabytes: float
    stored_terabytes: float
    put_requests: float
    get_requests: float


def main() -> None:
    """The table, its sums, and the hours on so many cores."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--terabytes", type=float, default=60.0, help="text of the sources")
    parser.add_argument("--cores", type=int, nargs="+", default=[100, 1000])
    for name, dollars in asdict(Prices(0.05, 0.023, 0.005, 0.0004)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=float, default=dollars, help="dollars")
    parser.add_argument(WRITE_FLAG, action="store_true", help="store the record in benchmarks/results/")
    arguments = parser.parse_args()
    prices = Prices(*(getattr(arguments, name) for name in Prices.__dataclass_fields__))
    measured = json.loads((RESULTS_DIR / "stages.json").read_text(encoding="utf-8"))["table"]
    costs = corpus_cost(measured, arguments.terabytes)
    for name, cost in costs.items():
        print(
            f"{name:28} {cost.core_hours:10,.0f} core-hours {cost.shuffled_terabytes:8,.1f} TB shuffled "
            f"{cost.stored_terabytes:7,.1f} TB stored {(cost.put_requests + cost.get_requests) / 1e6:7,.1f} M requests"
        )
    core_hours = sum(cost.core_hours for cost in costs.values())
    bounding = max(costs, key=lambda name: costs[name].core_hours)
    report(
        "corpus_cost",
        ours=core_hours,
        peer=None,
        unit=f"core-hours for {arguments.terabytes:g} TB of text",
        bounded_by=bounding,
        share_of_it=round(costs[bounding].core_hours / core_hours, 3),
        hours={str(cores): round(core_hours / cores, 1) for cores in arguments.cores},
        dollars=dollars_of(costs, prices),
        prices=asdict(prices),
        table={name: {key: round(value, 1) for key, value in asdict(cost).items()} for name, cost in costs.items()},
    )


def corpus_cost(measured: dict[str, dict[str, Any]], terabytes: float) -> dict[str, StageCost]:
    """By stage. measured: the table of stages.json, whose first stage reads all of the text."""
    first = next(iter(measured.values()))
    times = terabytes * TERABYTE / MEGABYTE / first["megabytes"]
    costs, stored_before = {}, 0.0
    for name, row in measured.items():
        megabytes = row["megabytes"] * times
        stored = row["stored_bytes_per_mb"] * megabytes
        costs[name] = StageCost(
            core_hours=max(row["cpu_seconds_per_further_mb"], 0.0) * megabytes / HOUR,  # noise, where nothing is read
            shuffled_terabytes=row["shuffled_bytes_per_document"] * row["num_documents"] * times / TERABYTE,
            stored_terabytes=stored / TERABYTE,
            put_requests=stored / UPLOADED_PART_BYTES,
            get_requests=stored_before / BLOCK_BYTES,
        )
        if not name.startswith("train_"):  # these leave models: the next stage reads the same documents
            stored_before = stored
    return costs


def dollars_of(costs: dict[str, StageCost], prices: Prices) -> dict[str, float]:
    """Processors, requests, and a month of all that is stored."""
    dollars = {
        "cores": sum(cost.core_hours for cost in costs.values()) * prices.core_hour,
        "requests": sum(
            cost.put_requests * prices.thousand_puts + cost.get_requests * prices.thousand_gets
            for cost in costs.values()
        )
        / 1000,
        "a month of storage": sum(cost.stored_terabytes for cost in costs.values()) * 1000 * prices.gigabyte_month,
    }
    return {name: round(value) for name, value in dollars.items()}


if __name__ == "__main__":
    main()
