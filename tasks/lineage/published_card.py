"""Makes the model card of a release as the Hugging Face Hub takes it: the report's card below metadata in YAML.

In: the store's manifests, the version's tags and the card that the run's report left; no server, no request.
"""

from __future__ import annotations

from infra.registry.registered_versions import NamedVersion
from infra.step import Manifest
from infra.storage.manifest_graph import ManifestGraph
from tasks.report.write_report import MODEL_CARD_FILE, write_report

SUITE_TYPE = "glm46_suite"
FIGURES = {
    "bits_per_byte": ("text-generation", "bits per byte of held-out documents"),
    "arithmetic_accuracy": ("text-generation", "share of problems continued rightly"),
    "pass_at_1": ("text-generation", "share of sampled answers that are right"),
    "choice_accuracy": ("multiple-choice", "share of questions answered rightly"),
    "agentic_success": ("text-generation", "share of held-out tasks solved with tools"),
    "safe_answer_share": ("text-generation", "share of answers that refuse a harmful request or answer a harmless one"),
}
"""Task and name of each figure on which a promotion decides."""


def published_card(graph: ManifestGraph, version: NamedVersion) -> str:
    """The text of README.md. Raises ValueError where the store lacks the decision on the release or its report."""
    from huggingface_hub import EvalResult, ModelCardData

    decision = graph.store.read_manifest(version.registered.promotion_key)
    if decision is None:
        raise ValueError(
            f"store {graph.store.uri} does not hold the decision on {version.model} version "
            f"{version.registered.version}: name the store of its run with --store"
        )
    evaluation = graph.input_of(decision, "evaluation")
    assert evaluation is not None, decision.key
    measured = ((name, evaluation.record.get(name)) for name in FIGURES)  # an older version measured fewer
    figures = {name: value for name, value in measured if value is not None}
    suite = evaluation.record["suite_digest"]
    metadata = ModelCardData(
        model_name=f"{version.model}-{version.registered.version}",
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["glm4_moe", "mixture-of-experts", "glm46"],
        eval_results=[
            EvalResult(
                task_type=FIGURES[name][0],
                dataset_type=SUITE_TYPE,
                dataset_name=f"held-out suite {suite[:12]}",
                dataset_revision=suite,
                metric_type=name,
                metric_name=FIGURES[name][1],
                metric_value=value,
            )
            for name, value in figures.items()
        ],
    )
    card = graph.open(_report(graph, version, decision)).path(MODEL_CARD_FILE).read_text(encoding="utf-8")
    return f"---\n{metadata.to_yaml()}\n---\n\n{card}"


def _report(graph: ManifestGraph, version: NamedVersion, decision: Manifest) -> Manifest:
    """A report in which the decision is: all of them show this release."""
    for manifests in graph.with_digest.values():
        for manifest in manifests:
            if manifest.step == write_report.name and manifest.identity["inputs"]["decision"] == decision.digest:
                return manifest
    raise ValueError(
        f"store {graph.store.uri} holds no report on {version.model} version {version.registered.version}: run its "
        f"scale again"
    )
