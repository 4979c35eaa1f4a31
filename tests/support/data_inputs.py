"""What the data tests share: steps run on a real local store, one small Spark session, small corpora written as
files."""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from configs.load import load_scale
from configs.schema import DataRecipe, SparkResources, SynthesisRecipe
from infra.code_digest import ROOT
from infra.home import Home
from infra.step import Artifact, Step
from infra.storage.local_store import LocalStore
from infra.storage.store import Store, step_key
from tasks.data.decontamination.decontaminate_documents import decontaminate_documents
from tasks.data.deduplication.deduplicate_documents import deduplicate_documents
from tasks.data.deduplication.earlier_documents import list_earlier_documents
from tasks.data.deduplication.remove_semantic_duplicates import remove_semantic_duplicates
from tasks.data.deduplication.split_documents import split_documents
from tasks.data.extraction.extract_documents import extract_documents
from tasks.data.extraction.remove_boilerplate import remove_boilerplate
from tasks.data.filtering.filter_documents import filter_documents
from tasks.data.privacy.mask_personal_data import mask_personal_data
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.prompts.collect_prompts import collect_prompts
from tasks.data.scoring.score_documents import score_documents
from tasks.data.scoring.train_classifiers import train_classifiers
from tasks.data.scoring.train_ngram_model import train_ngram_model
from tasks.data.seeds.verify_solutions import verify_solutions
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import SourceListing

Compute = Callable[..., Artifact[Any]]
SHARED_DATA = ROOT.parent / "shared" / "data"
RECIPE = load_scale("micro").data.recipe
RESOURCES = SparkResources(master="local[2]", driver_memory="1g", executor_memory="1g", shuffle_partitions=2)


def in_partitions(count: int) -> SparkResources:
    """The same session with another number of shuffle partitions."""
    return RESOURCES.model_copy(update={"shuffle_partitions": count})


def compute(step: Step[Any], root: Path, **arguments: Any) -> Artifact[Any]:
    """Run a step into a store of its own directory; `recipe` and `resources` are passed on."""
    home = Home(root)
    return compute_in(LocalStore(home.store_dir, home), step, **arguments)


def compute_in(store: Store, step: Step[Any], **arguments: Any) -> Artifact[Any]:
    """Run a step, as the wrapper would."""
    data_files = arguments.pop("data_files", ())
    inputs = {name: value for name, value in arguments.items() if name not in ("recipe", "resources")}
    identity = step.identity(arguments.get("recipe"), inputs, data_files)
    key = step_key(identity)
    with store.locked(key):
        return store.compute(
            step,
            key,
            identity,
            lambda output: step(**arguments, output=output),
            lambda progress: None,
            print,
            lambda *_: None,
            time.monotonic,
        )


SYNTHESIS = SynthesisRecipe(
    operations=("+", "-"),
    num_training_problems=400,
    num_evaluation_problems=30,
    max_operand=30,
    problems_per_document=20,
    num_chats=100,
    thinking_share=0.25,
    worked_share=0.5,
    num_prompts=20,
    families={},
    difficulty=1,
    num_held_out_problems=0,
    prompt_families=(),
    tasks={},
    num_evaluation_tasks=0,
    num_task_chats=0,
    num_safety_chats=0,
    num_safety_prompts=0,
)
"""Sums and differences only."""


def chain_recipe(synthesize: SynthesisRecipe) -> DataRecipe:
    """Micro's, with a fifth of the clusters on either held-out side: a small corpus has few."""
    split = RECIPE.split.model_copy(update={"validation_share": 0.2, "test_share": 0.2})
    return RECIPE.model_copy(update={"split": split, "synthesize": synthesize})


def cleaned(
    sources: SourceListing,
    root: Path,
    recipe: DataRecipe,
    resources: SparkResources = RESOURCES,
    run: Compute = compute,
) -> dict[str, Artifact[Any]]:
    """The artifacts of flows/prepare_data.py from the sources to the decontaminated documents, by their names in
    PreparedData.

    `run` computes a step: a benchmark's measures it too.
    """
    spark = {"resources": resources}
    ingested = run(ingest_documents, root, sources=sources, recipe=recipe.ingest, **spark)
    extracted = run(extract_documents, root, records=ingested, recipe=recipe.extract, **spark)
    clean = run(remove_boilerplate, root, documents=extracted, recipe=recipe.boilerplate, **spark)
    classifiers = run(train_classifiers, root, sources=sources, recipe=recipe.classifiers)
    ngram_model = run(train_ngram_model, root, sources=sources, documents=clean, recipe=recipe.ngram_training, **spark)
    models = {"classifiers": classifiers, "ngram_model": ngram_model}
    scored = run(score_documents, root, documents=clean, **models, recipe=recipe.language, **spark)
    earlier = list_earlier_documents(recipe.deduplicate.previous)
    unique = run(deduplicate_documents, root, documents=scored, previous=earlier, recipe=recipe.deduplicate, **spark)
    distinct = run(remove_semantic_duplicates, root, documents=unique, recipe=recipe.semantic, **spark)
    split = run(split_documents, root, documents=distinct, recipe=recipe.split, **spark)
    filtered = run(filter_documents, root, documents=split, extracted=None, blocked=None, recipe=recipe.filter, **spark)
    masked = run(mask_personal_data, root, documents=filtered, recipe=recipe.personal_data, **spark)
    problems = run(synthesize_problems, root, recipe=recipe.synthesize)
    solutions = run(verify_solutions, root, sources=sources)
    prompts = run(
        collect_prompts, root, sources=sources, synthetic=problems, solutions=solutions, recipe=recipe.prompts
    )
    decontaminated = run(
        decontaminate_documents,
        root,
        documents=masked,
        synthetic=problems,
        prompts=prompts,
        ingested=ingested,
        recipe=recipe.decontaminate,
        **spark,
    )
    return {
        "ingested": ingested,
        "extracted": extracted,
        "boilerplate_free": clean,
        **models,
        "scored": scored,
        "deduplicated": unique,
        "distinct": distinct,
        "split": split,
        "filtered": filtered,
        "masked": masked,
        "problems": problems,
        "solutions": solutions,
        "prompts": prompts,
        "decontaminated": decontaminated,
    }


def write_jsonl(path: Path, records: list[dict[str, Any]]) -> None:
    """One JSON object per line, gzipped where the name says so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def prose(seed: int, num_words: int = 120) -> str:
    """Sentences of made-up words: different seeds share no long run of words."""
    generator = np.random.Generator(np.random.Philox(seed))
    syllables = ["ka", "lo", "mi", "ren", "tos", "vul", "da", "shi", "por", "ne", "gar", "wen"]
    words = ["".join(generator.choice(syllables, size=generator.integers(2, 4))) for _ in range(num_words)]
    return ". ".join(" ".join(words[start : start + 12]).capitalize() for start in range(0, num_words, 12)) + ".\n"


def write_corpus(directory: Path, num_documents: int = 60) -> None:
    """A data directory with roles: web text with duplicates, a little code, and a benchmark."""
    texts = [prose(seed) for seed in range(num_documents)]
    texts[5] = texts[4]
    texts[7] = texts[6].replace(texts[6].split()[20], "changed", 1)
    write_jsonl(
        directory / "web.jsonl.gz", [{"text": text, "url": f"https://example.org/{n}"} for n, text in enumerate(texts)]
    )
    for number in range(20):
        lines = [f"def function_{number}_{line}(value):\n    return value * {number} + {line}\n" for line in range(12)]
        (directory / f"module_{number}.py").write_text("\n\n".join(lines))
    write_jsonl(
        directory / "bench" / "questions.jsonl",
        [{"question": texts[9][:200], "answer": "none"}, {"question": "Who?", "answer": "I"}],
    )
    (directory / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n"
        "  - {files: 'bench/**', role: evaluation}\n"
        "  - {files: '*.py', role: pretrain, domain: code}\n"
        "  - {files: '*.jsonl.gz', role: pretrain, domain: web, lang: en, text: text}\n"
    )


def write_packages(directory: Path, num_packages: int = 6, files_per_package: int = 5) -> None:
    """Packages whose files import one another in the opposite order of their names, and are longer than a document may
    be."""
    for package in range(num_packages):
        (directory / f"package_{package}").mkdir()
        for number in range(files_per_package):
            used = f"from .part_{number + 1} import function_{number + 1}\n" if number + 1 < files_per_package else ""
            words = (prose(1000 + 500 * package + 50 * number + line, 24) for line in range(30))
            body = "".join(
                f"def function_{number}_{line}(a):\n    return {text!r}\n" for line, text in enumerate(words)
            )
            (directory / f"package_{package}" / f"part_{number}.py").write_text(used + body)
    path = directory / "glm46-data.yaml"
    path.write_text(path.read_text().replace("'*.py'", "'**/*.py'"))


def rows(artifact: Artifact[Any], pattern: str) -> list[dict[str, Any]]:
    """All rows of an artifact's Parquet files, in order."""
    return [row for path in artifact.paths(pattern) for row in pq.read_table(path).to_pylist()]
