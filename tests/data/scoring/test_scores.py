"""Scores: languages, classifiers and language models beside references; the steps for any partition count."""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from configs.files.stored_files import StoredFile, given_file
from configs.schema import LanguageRecipe
from tasks.data.extraction.html_text import html_to_text
from tasks.data.extraction.wikitext import is_redirect, wikitext_to_text
from tasks.data.readers.source_bytes import HashingReader
from tasks.data.readers.wiki_dumps import wiki_pages
from tasks.data.records.documents import DOCUMENT_COLUMNS, arrow_schema, content_digest, document_id
from tasks.data.scoring.classifier_training import LabelledText, Labels, area_under_curve, fit_calibration
from tasks.data.scoring.document_scores import LanguageModelFile, LanguageModelFiles, Scorers, _scores
from tasks.data.scoring.language_id import check_model, has_language, identify_languages, iso_code
from tasks.data.scoring.linear_model import LinearModel, load_linear_model, train_linear_model
from tasks.data.scoring.ngram_counts import held_out_hash
from tasks.data.scoring.ngram_model import NgramCounts, build_model, count_ngrams
from tasks.data.scoring.score_documents import score_documents
from tasks.data.scoring.text_classifiers import (
    Calibration,
    PassageReader,
    TextClassifier,
    described_classifier,
    judged_proses,
    num_letters,
    passages_of,
)
from tasks.data.scoring.toxicity_training import doubt_from, with_ordinary_text
from tasks.data.scoring.train_classifiers import train_classifiers
from tasks.data.scoring.train_ngram_model import train_ngram_model
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.text.prose_text import Beginnings, prose_of
from tests.support.data_inputs import RECIPE, SHARED_DATA, compute, in_partitions, prose, rows, write_jsonl

CLASSIFIERS = RECIPE.classifiers.model_copy(update={"min_records": 40, "num_folds": 3, "encoder": ""})
SENTENCES = {
    "en": "The committee met on Thursday and agreed that the new bridge should be opened before the end of the year.",
    "de": "Der Ausschuss traf sich am Donnerstag und beschloss, dass die neue Brücke noch in diesem Jahr eröffnet "
    "werden soll.",
    "fr": "Le comité s'est réuni jeudi et a décidé que le nouveau pont devait être ouvert avant la fin de l'année.",
    "ru": "Комитет собрался в четверг и решил, что новый мост должен быть открыт до конца года.",
    "ja": "委員会は木曜日に開かれ、新しい橋を年内に開通させることを決めた。",
    "zh": "委员会星期四开会，决定在年底之前开放新的大桥。",
    "he": "הוועדה התכנסה ביום חמישי והחליטה שהגשר החדש ייפתח לפני סוף השנה.",
}


# languages


def test_languages_are_found_whatever_else_is_in_the_batch():
    codes, scores = identify_languages(list(SENTENCES.values()), 2000, "")
    assert codes == list(SENTENCES)
    assert all(0.85 <= score <= 1 for score in scores)
    assert [identify_languages([text], 2000, "") for text in SENTENCES.values()] == [
        ([c], [s]) for c, s in zip(codes, scores, strict=True)
    ]


@pytest.mark.parametrize("text", ["", "  ", "\x00\x07", "1234 +++ 5678"])
def test_what_has_no_letters_has_no_language(text):
    assert identify_languages([text], 2000, "") == ([""], [0.0])


def test_control_characters_do_not_hide_a_language():
    dirty = "\x92\ufdd0\ud800\U0010ffff".join(SENTENCES["de"].split(" "))
    assert identify_languages([dirty.replace("\ufdd0", " \ufdd0")], 2000, "")[0] == ["de"]


def test_only_the_beginning_decides():
    assert identify_languages([SENTENCES["en"] + SENTENCES["ru"] * 9], len(SENTENCES["en"]), "")[0] == ["en"]


def test_codes_of_all_models_become_one():
    labels = {
        "__label__en": "en",
        "__label__eng_Latn": "en",
        "zh-Hant": "zh",
        "cmn_Hani": "zh",
        "iw": "he",
        "nob": "no",
        "ceb": "ceb",
        "un": "",
    }
    assert {label: iso_code(label) for label in labels} == labels


def test_program_code_has_no_language_but_its_readme_has():
    assert [has_language("code", name) for name in ("a.py", "README.md", "notes.txt.gz")] == [False, True, True]
    assert has_language("web", "a.py")


def labelled_sentences(name: str) -> list[tuple[str, str]]:
    """(language, sentence)"""
    with gzip.open(SHARED_DATA / "multilingual" / f"{name}.jsonl.gz", "rt") as file:
        return [(iso_code(record["lang"]), record["text"]) for record in map(json.loads, file)]


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
@pytest.mark.parametrize(
    ("name", "num_languages", "min_chars", "bound"),
    [("language_id_sentences", 75, 0, 0.9591), ("ud_sentences_dev", 9, 0, 0.98), ("ud_sentences_dev", 8, 100, 0.995)],
)
def test_languages_are_distinguished_short_and_long(name, num_languages, min_chars, bound):
    """The bound of the 75 languages is what lingua reaches on all 22,448 sentences."""
    pairs = [(language, text) for language, text in labelled_sentences(name)[::3] if len(text) >= min_chars]
    codes, _ = identify_languages([text for _, text in pairs], 2000, "")
    assert len({language for language, _ in pairs}) == num_languages
    assert sum(language == code for (language, _), code in zip(pairs, codes, strict=True)) / len(pairs) > bound


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
def test_russian_has_a_language_and_a_low_score_is_a_warning():
    pairs = labelled_sentences("ud_sentences_dev") + labelled_sentences("language_id_sentences")[::5]
    codes, scores = identify_languages([text for _, text in pairs], 2000, "")
    russian = [code for (language, _), code in zip(pairs, codes, strict=True) if language == "ru"]
    assert len(russian) > 500 and russian.count("") == 0 and russian.count("ru") / len(russian) > 0.97
    is_right = np.array([language == code for (language, _), code in zip(pairs, codes, strict=True)])
    is_low = np.array(scores) < 0.65
    assert is_low.mean() < 0.1 and is_right[~is_low].mean() > 0.98 and is_right[is_low].mean() < 0.85


def test_what_one_identifier_cannot_name_others_do():
    """CLD2's first answer to this one is "Unknown"."""
    text = (
        "В телефонах типа Мате 9 не хватает интерфейса искусственного интеллекта, как Google Assistant или Siri от "
        "компании Apple."
    )
    (code,), (score,) = identify_languages([text], 2000, "")
    assert code == "ru" and score > 0.5


def test_a_model_of_the_user_decides_where_one_is_named(tmp_path):
    path = language_model(tmp_path)
    assert identify_languages(["bonjour le monde\nbonjour", "hello world"], 2000, str(path))[0] == ["fr", "en"]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    check_model(LanguageRecipe(max_chars=10, model_path=str(path), model_sha256=digest))
    with pytest.raises(ValueError, match=f"has sha256 {digest}, model_sha256 is {'0' * 64}"):
        check_model(LanguageRecipe(max_chars=10, model_path=str(path), model_sha256="0" * 64))
    with pytest.raises(ValueError, match="cannot be read"):
        check_model(LanguageRecipe(max_chars=10, model_path=str(tmp_path / "none.bin"), model_sha256="0" * 64))
    with pytest.raises(ValueError, match="give both, or leave both empty"):
        LanguageRecipe(max_chars=10, model_path=str(path), model_sha256="")


def language_model(directory: Path) -> Path:
    """A fastText model with the labels of GlotLID, every row of its matrix given."""
    import fasttext

    texts = {"__label__eng_Latn": "hello world good day", "__label__fra_Latn": "bonjour le monde bonne nuit"}
    words = ["</s>", *sorted({word for text in texts.values() for word in text.split()})]
    vectors = np.random.Generator(np.random.Philox(1)).uniform(-0.1, 0.1, (len(words), 4))
    lines = [f"{word} {' '.join(map(str, row))}\n" for word, row in zip(words, vectors, strict=True)]
    (directory / "start.vec").write_text(f"{len(words)} 4\n{''.join(lines)}")
    (directory / "train.txt").write_text("".join(f"{label} {text}\n" for label, text in texts.items()) * 20)
    given = {
        "pretrainedVectors": str(directory / "start.vec"),
        "dim": 4,
        "lr": 0.5,
        "epoch": 20,
        "minCount": 1,
        "bucket": 0,
        "thread": 1,
    }
    model = fasttext.train_supervised(str(directory / "train.txt"), verbose=0, **given)
    model.save_model(str(directory / "languages.bin"))
    return directory / "languages.bin"


# classifiers


def labelled(num_records: int = 90) -> list[dict]:
    """Texts whose label is in their words, most of them."""
    generator = np.random.Generator(np.random.Philox(7))
    sides = (["awful", "vile", "rotten", "table"], ["kind", "gentle", "bright", "table"])
    plain = ["the", "house", "was", "near", "a", "river", "and", "people", "came"]
    return [
        {
            "body": " ".join(generator.choice(plain + sides[number % 2] * 2, 14)),
            "verdict": ("bad", "good", "bad", "fine")[number % 4],
        }
        for number in range(num_records)
    ]


def classifier_sources(directory: Path, records: list[dict], entry: str = "kind: toxicity, text: body, label: verdict"):
    write_jsonl(directory / "labels.jsonl", records)
    (directory / "text.txt").write_text(prose(1))
    (directory / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n"
        f"  - {{files: labels.jsonl, role: classifier, format: jsonl, {entry}}}\n"
        "  - {files: text.txt, role: pretrain, domain: web}\n"
    )
    return list_sources(directory)


NO_FILE = StoredFile("", 0, "")
TOXIC = CLASSIFIERS.model_copy(update={"positive_labels": {"toxicity": ("bad",)}, "max_flagged_harmless": 1.0})


def trained_classifier(artifact, kind: str) -> TextClassifier:
    return described_classifier(
        kind, json.loads(artifact.path("classifiers.json").read_text())[kind]["classifier"], artifact.file
    )


def test_a_classifier_is_the_same_twice_and_tells_the_sides_apart(tmp_path):
    (tmp_path / "data").mkdir()
    sources = classifier_sources(tmp_path / "data", labelled())
    one, two = (compute(train_classifiers, tmp_path / name, sources=sources, recipe=TOXIC) for name in ("one", "two"))
    assert one.digest == two.digest
    assert one.record.kinds == ("toxicity",)
    assert set(one.record.unused) == {"quality", "factuality"}
    assert one.record.auc["toxicity"] > 0.95
    described = json.loads(one.path("classifiers.json").read_text())["toxicity"]
    assert (described["num_records"], described["num_positive"]) == (90, 45)
    assert sum(row["records"] for row in described["calibration_at_even_odds"]) == 90
    even = log_odds_shifted(trained_classifier(one, "toxicity"), TOXIC.prior["toxicity"])
    vile, kind, foreign, empty, absent = even.scores(
        ["The house was vile, rotten", "the people came, gentle and kind", "自由 平等 博愛 der", " ", None]
    )
    assert vile > 0.8 and kind < 0.2
    assert foreign is None and empty is None and absent is None
    assert even.scores(["The house was vile, rotten"]) == [vile]
    assert replace(even, min_known_share=1.0).scores(["the vile xylophone"]) == [None]


def log_odds_shifted(classifier: TextClassifier, prior: float) -> TextClassifier:
    """The classifier at even odds."""
    intercept = classifier.calibration.intercept - math.log(prior / (1 - prior))
    return replace(classifier, calibration=replace(classifier.calibration, intercept=intercept))


def test_a_prior_moves_every_probability_by_its_log_odds(tmp_path):
    (tmp_path / "data").mkdir()
    sources = classifier_sources(tmp_path / "data", labelled())
    priors = [TOXIC.model_copy(update={"prior": {"toxicity": prior}}) for prior in (0.01, 0.5)]
    rare, even = (
        trained_classifier(
            compute(train_classifiers, tmp_path / str(number), sources=sources, recipe=recipe), "toxicity"
        )
        for number, recipe in enumerate(priors)
    )
    assert even.calibration.intercept - rare.calibration.intercept == pytest.approx(math.log(99))
    assert Calibration(1.0, math.log(1 / 99)).probabilities(np.zeros(1)) == pytest.approx(0.01)


def test_words_signs_and_pairs_weigh_as_in_scikit_learn():
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    texts = [record["body"] + mark for record in labelled() for mark in (".", "! so, so.")]
    is_positive = np.array([record["verdict"] == "bad" for record in labelled() for _ in range(2)])
    model = train_linear_model(texts, is_positive, np.ones(len(texts)), TOXIC)
    vectorizer = TfidfVectorizer(
        sublinear_tf=True, min_df=TOXIC.min_texts, ngram_range=(1, 2), token_pattern=r"[^\W_]+|[^\w\s]"
    )
    peer = LogisticRegression(C=TOXIC.inverse_penalty, max_iter=1000).fit(vectorizer.fit_transform(texts), is_positive)
    unseen = ["the house was vile, so vile!", "gentle people came near.", "A river; a table"]
    assert model.logits(unseen, 0.1) == pytest.approx(peer.decision_function(vectorizer.transform(unseen)), abs=1e-3)
    assert [model.logits([text], 0.1)[0] for text in unseen] == model.logits(unseen, 0.1).tolist()


def test_a_model_is_read_as_it_was_written(tmp_path):
    records = labelled()
    texts = [record["body"] for record in records]
    model = train_linear_model(texts, np.array([record["verdict"] == "bad" for record in records]), np.ones(90), TOXIC)
    model.save(tmp_path / "model.npz")
    assert (
        load_linear_model(str(tmp_path / "model.npz")).logits(texts, 0.1).tolist() == model.logits(texts, 0.1).tolist()
    )


def test_passages_hold_the_whole_text_and_end_with_sentences():
    text = " ".join(prose(number, 40).strip() for number in range(12))
    passages = passages_of(text)
    assert " ".join(passages).split() == text.split() and max(map(len, passages)) <= 400
    assert all(passage.endswith(".") for passage in passages)
    assert passages_of("x" * 1000) == ["x" * 400, "x" * 400, "x" * 200]


class WordModel(LinearModel):
    """Log odds 4 for a passage that holds the word, -4 for others, NaN for an empty one."""

    def logits(self, texts, min_known_share):
        return np.array([4.0 if "vile" in text else -4.0 for text in texts])


def test_a_long_text_is_as_toxic_as_its_worst_tenth(monkeypatch):
    monkeypatch.setattr(
        "tasks.data.scoring.text_classifiers.load_linear_model",
        lambda path: WordModel(np.zeros(0), np.zeros(0), 0.0, 1),
    )
    classifier = TextClassifier("toxicity", NO_FILE, Calibration(1.0, 0.0), 10**6, 0.5, is_by_passage=True, reader=None)
    calm = [f"{prose(number, 40).replace('.', '')[:230].strip()}." for number in range(20)]
    assert len(passages_of(" ".join(calm))) == 20
    bad = [passage.replace(passage.split()[3], "vile", 1) for passage in calm]
    one, two, none = classifier.scores([" ".join(bad[:count] + calm[count:]) for count in (1, 2, 0)])
    assert none < 0.02 and 0.45 < one < 0.55 and two > 0.98


def test_the_encoder_reads_only_what_words_leave_in_doubt(monkeypatch):
    monkeypatch.setattr(
        "tasks.data.scoring.text_classifiers.load_linear_model",
        lambda path: WordModel(np.zeros(0), np.zeros(0), 0.0, 1),
    )
    monkeypatch.setattr("tasks.data.scoring.text_classifiers.load_head", lambda path: np.array([1.0, 0.0]))
    read: list[str] = []

    def encode(passages, encoder):
        read.extend(passages)
        return np.full((len(passages), 1), -3.0)

    monkeypatch.setattr("tasks.data.scoring.text_classifiers.encode_passages", encode)
    reader = PassageReader("all-MiniLM-L6-v2", NO_FILE, -1.0, Calibration(1.0, 0.0))
    classifier = TextClassifier(
        "toxicity", NO_FILE, Calibration(1.0, 0.0), 1000, 0.5, is_by_passage=True, reader=reader
    )
    scores = classifier.scores(["a calm text", "a vile text", None])
    assert read == ["a vile text"] and scores[1] == pytest.approx(1 / (1 + math.exp(3)), abs=1e-6) and scores[2] is None


def test_mathematics_and_code_are_not_judged_and_prose_is():
    maths = r"Solve for $x$: $\frac{x}{2} + \frac{x}{3} = 5$. We get $\frac{5x}{6} = 5$, so $x = 6$."
    code = (
        "Run it:\n\n```python\nfor name in sorted(names):\n    table[name] = read(name)\n    "
        "print(table[name].total())\n```\n"
    )
    assert judged_proses(Beginnings([maths, code, SENTENCES["en"]]), 1000) == [None, None, SENTENCES["en"]]


def test_letters_are_counted_as_python_counts_them():
    texts = ["", *SENTENCES.values(), "".join(map(chr, range(0x3000))), "a\ud800b \U0001d400"]
    assert [num_letters(text) for text in texts] == [sum(map(str.isalpha, text)) for text in texts]


def test_words_in_doubt_are_those_of_nearly_all_toxic_records():
    generator = np.random.Generator(np.random.Philox(2))
    records = [LabelledText(str(number), number % 2 == 0, "ab"[number % 10 == 0]) for number in range(3000)]
    labels = Labels.of(records, 3)
    logits = generator.normal(size=3000) + 2 * labels.is_positive - 3 * (labels.files == "b")
    bound = doubt_from(logits, labels)
    shares = [np.mean(logits[labels.is_positive & (labels.files == file)] >= bound) for file in "ab"]
    assert np.mean(shares) == pytest.approx(0.95, abs=0.005)


def test_records_of_other_kinds_are_ordinary_text():
    records = [LabelledText("vile", True, "a"), LabelledText("kind", False, "a")]
    page = prose(1, 100)
    given = with_ordinary_text(records, [LabelledText(page, True, "pages"), LabelledText(page, False, "more")])
    assert given[:2] == records and sorted(record.text for record in given[2:]) == sorted(passages_of(page))
    assert not any(record.is_positive for record in given[2:])


def test_a_classifier_that_flags_harmless_sentences_scores_nothing_and_says_why(tmp_path):
    """Labels by which whatever names a group is toxic."""
    words = ["Muslim", "gay", "black", "women", "Jewish", "immigrants", "disabled", "trans", "people", "killed"]
    others = ["teacher", "garden", "window", "meal", "tree"]
    records = [
        {"body": f"the {word} {verb} {thing}", "verdict": "good" if word in others else "bad"}
        for verb in ("work near", "live by", "walk to", "like")
        for thing in ("the river", "a school", "the town")
        for word in (*words, *others)
    ]
    (tmp_path / "data").mkdir()
    recipe = TOXIC.model_copy(update={"prior": {"toxicity": 0.5}, "min_known_share": 0.1, "max_flagged_harmless": 0.1})
    trained = compute(
        train_classifiers, tmp_path / "home", sources=classifier_sources(tmp_path / "data", records), recipe=recipe
    )
    assert trained.record.auc["toxicity"] > 0.9 and trained.record.kinds == ()
    assert "harmless sentences score above 0.3, max_flagged_harmless is 10%" in trained.record.unused["toxicity"]
    assert trained.record.flagged_sentences["group_named"] > 0.3


def test_a_classifier_that_guesses_scores_nothing(tmp_path):
    records = labelled(60)
    generator = np.random.Generator(np.random.Philox(3))
    shuffled = [
        {**record, "verdict": str(verdict)}
        for record, verdict in zip(records, generator.choice(["bad", "good"], 60), strict=True)
    ]
    trained = compute(
        train_classifiers,
        tmp_path / "home",
        sources=classifier_sources(tmp_path, shuffled),
        recipe=TOXIC.model_copy(update={"min_auc": 0.9}),
    )
    assert trained.record.kinds == ()
    assert "is below min_auc 0.9" in trained.record.unused["toxicity"]


@pytest.mark.parametrize(
    ("records", "entry", "message"),
    [
        (
            labelled(39),
            "kind: toxicity, text: body, label: verdict",
            r"39 labelled records of kind toxicity, at least .*min_records \(40\)",
        ),
        (labelled(), "kind: toxicity, text: body", "labels.jsonl: role classifier needs `label`"),
        (
            labelled(),
            "kind: taste, text: body, label: verdict",
            "kind 'taste', allowed are toxicity, quality, factuality",
        ),
        (
            labelled(),
            "kind: toxicity, text: body, label: grade",
            r"labels.jsonl, byte 0: field 'grade' holds no label \(fields are body, verdict\)",
        ),
        (labelled(), "kind: toxicity, text: words, label: verdict", "byte 0: no text in words"),
        (
            [{**record, "verdict": "good"} for record in labelled()],
            "kind: toxicity, text: body, label: verdict",
            "positive and other labels must both occur",
        ),
        (labelled(), "kind: quality, text: body, label: verdict", "no positive_labels or no prior for quality"),
    ],
)
def test_bad_labelled_data_is_refused_by_name(tmp_path, records, entry, message):
    with pytest.raises(ValueError, match=message):
        compute(
            train_classifiers, tmp_path / "home", sources=classifier_sources(tmp_path, records, entry), recipe=TOXIC
        )


def test_figures_of_a_classifier_agree_with_scikit_learn():
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score

    generator = np.random.Generator(np.random.Philox(5))
    is_positive = generator.random(400) < 0.8
    logits = np.round(generator.normal(size=400) + is_positive, 1)
    assert area_under_curve(logits, is_positive) == pytest.approx(roc_auc_score(is_positive, logits), abs=1e-12)
    for weights in (np.ones(400), generator.random(400) + 0.1):
        sides = np.where(is_positive, weights[is_positive].sum(), weights[~is_positive].sum())
        peer = LogisticRegression(C=1000.0, tol=1e-8).fit(
            logits[:, None], is_positive, sample_weight=weights * 200 / sides
        )
        assert fit_calibration(logits, is_positive, weights) == pytest.approx(
            (peer.coef_[0, 0], peer.intercept_[0]), abs=1e-3
        )


def test_equal_texts_are_held_out_together():
    assert LabelledText("a", True).fold_hash == LabelledText("a", False).fold_hash != LabelledText("b", True).fold_hash


# language models


def counts_of(texts: list[str], order: int, min_count: int) -> NgramCounts:
    """What Spark reduces, in one process."""
    counted = count_ngrams(texts, order)
    is_longer = counted["size"] > 1
    contexts, index = np.unique(counted["context"][is_longer], return_inverse=True)
    totals = np.bincount(index, counted["num_occurrences"][is_longer]).astype(np.int64)
    kept = (counted["size"] == 1) | (counted["num_occurrences"] >= min_count)
    columns = (counted[name][kept] for name in ("size", "hash", "context", "suffix", "num_occurrences"))
    return NgramCounts(*columns, contexts, totals, np.bincount(index))


class NaiveWittenBell:
    """The formula of tasks/data/scoring/ngram_model.py on tuples of words."""

    def __init__(self, texts: list[str], order: int, min_count: int) -> None:
        runs = [
            tuple(words[i : i + n])
            for words in map(str.split, texts)
            for n in range(1, order + 1)
            for i in range(len(words) - n + 1)
        ]
        self.counts, self.order, self.min_count = Counter(runs), order, min_count

    def probability(self, context: tuple[str, ...], word: str) -> float:
        after = {run[-1]: count for run, count in self.counts.items() if run[:-1] == context}
        kept = {successor: count for successor, count in after.items() if count >= self.min_count}
        pruned = sum(after.values()) - sum(kept.values())
        if not context:
            share = (pruned + len(kept)) / (len(kept) + len(after))
            return (kept.get(word, 0) + share) / (sum(after.values()) + len(kept))
        lower = self.probability(context[1:], word)
        return (
            (kept.get(word, 0) + (len(after) + pruned) * lower) / (sum(after.values()) + len(after)) if after else lower
        )

    def perplexity(self, text: str) -> float:
        words = text.split()
        logs = [
            math.log(self.probability(tuple(words[max(0, i - self.order + 1) : i]), word))
            for i, word in enumerate(words)
        ]
        return math.exp(-sum(logs) / len(logs))


CORPUS = [
    "the cat sat on the mat the cat ran",
    "a dog sat on the cat",
    "the dog ran to the mat",
    "on the mat a cat sat",
]
UNSEEN = ["the cat sat on a dog", "the mat the mat", "zebra", "the zebra sat zebra zebra on the mat", "a"]


@pytest.mark.parametrize("order", [1, 2, 3, 4])
@pytest.mark.parametrize("min_count", [1, 2])
def test_perplexity_is_that_of_the_formula(order, min_count):
    model = build_model(counts_of(CORPUS, order, min_count), order, min_count)
    naive = NaiveWittenBell(CORPUS, order, min_count)
    expected = [naive.perplexity(text) for text in UNSEEN + CORPUS]
    assert model.perplexities(UNSEEN + CORPUS).tolist() == pytest.approx(expected, rel=1e-9)
    assert [model.perplexities([text])[0] for text in UNSEEN + CORPUS] == model.perplexities(UNSEEN + CORPUS).tolist()
    assert np.isnan(model.perplexities(["", "the"])).tolist() == [True, False]


@pytest.mark.parametrize("min_count", [1, 2])
def test_probabilities_add_up_over_known_words_and_as_many_unknown_ones_as_training_saw_words(min_count):
    naive = NaiveWittenBell(CORPUS, 3, min_count)
    words = sorted({word for text in CORPUS for word in text.split()})
    kept = [word for word in words if naive.counts[(word,)] >= min_count]
    for context in ((), ("the",), ("on", "the"), ("never",)):
        total = sum(naive.probability(context, word) for word in kept) + len(words) * naive.probability(
            context, "unknown"
        )
        assert total == pytest.approx(1, abs=1e-12)


def test_interpolation_is_that_of_nltk():
    from nltk.lm import WittenBellInterpolated
    from nltk.lm.preprocessing import everygrams

    peer = WittenBellInterpolated(2)
    texts = [text.split() for text in CORPUS]
    peer.fit([list(everygrams(text, max_len=2)) for text in texts], [word for text in texts for word in text])
    naive = NaiveWittenBell(CORPUS, 2, 1)
    for context in ("the", "on", "cat"):
        behind = {run[1]: count for run, count in naive.counts.items() if len(run) == 2 and run[0] == context}
        backoff = len(behind) / (len(behind) + sum(behind.values()))
        for word in ("cat", "mat", "dog", "ran"):
            ours = naive.probability((context,), word) - backoff * naive.probability((), word)
            assert ours == pytest.approx(peer.score(word, [context]) - backoff * peer.score(word), abs=1e-12)


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
def test_disorder_and_unknown_words_cost_more_than_text():
    with gzip.open(SHARED_DATA / "text" / "gutenberg_en.jsonl.gz", "rt") as file:
        texts = [json.loads(line)["text"] for line in list(file)[:300]]
    model = build_model(counts_of(texts[::2], 3, 2), 3, 2)
    generator = np.random.Generator(np.random.Philox(1))
    unseen = texts[1:100:2]
    disordered = [" ".join(generator.permutation(text.split())) for text in unseen]
    junk = [" ".join("".join(map(chr, generator.integers(97, 123, 6))) for _ in range(100)) for _ in range(9)]
    clean, mixed, nonsense = (model.perplexities(group) for group in (unseen, disordered, junk))
    assert np.median(clean) * 2 < np.median(mixed)
    assert mixed.max() * 5 < nonsense.min()


def judged_area(texts: list[str]) -> float:
    """How often a page that people called poor is more perplexing than one that they called good, to a model of the
    texts."""
    with gzip.open(SHARED_DATA / "quality" / "dclm_human_quality.jsonl.gz", "rt") as file:
        pages = [json.loads(line) for line in file]
    perplexity = build_model(counts_of(texts, 3, 2), 3, 2).perplexities([page["text"] for page in pages])
    return area_under_curve(perplexity, np.array([page["label"] == 0 for page in pages]))


@pytest.mark.skipif(not SHARED_DATA.exists(), reason="needs ../shared/data")
def test_an_encyclopedia_tells_judged_pages_apart_better_than_as_much_mixed_text():
    """Area under the curve 0.804 beside 0.666."""
    name = "text/enwiki_sample_pages_articles.xml.bz2"
    with open(SHARED_DATA / name, "rb") as file:
        pages = [parsed.text or "" for parsed in wiki_pages(name, HashingReader(file), "en", 10**7)]
    articles = [wikitext_to_text(page) for page in pages if not is_redirect(page)]
    mixed: list[str] = []
    for path in ("gutenberg_en", "peps", "movie_reviews", "rust_book"):
        with gzip.open(SHARED_DATA / "text" / f"{path}.jsonl.gz", "rt") as file:
            mixed += [json.loads(line)["text"] for line in file]
    size = sum(map(len, articles))
    chosen = np.random.Generator(np.random.Philox(1)).permutation(len(mixed))
    sizes = np.cumsum([len(mixed[index]) for index in chosen])
    of_articles, of_mixed = (
        judged_area(articles),
        judged_area([mixed[index] for index in chosen[: int(np.searchsorted(sizes, size)) + 1]]),
    )
    assert of_articles > 0.78 and of_articles > of_mixed + 0.05, (of_articles, of_mixed)


# the steps


@dataclass(frozen=True)
class Documents:
    """Parquet files instead of an artifact."""

    directory: Path
    record: SimpleNamespace
    digest: str

    def files(self, pattern: str) -> list[StoredFile]:
        return [given_file(path) for path in sorted(self.directory.glob(pattern))]


@pytest.fixture(scope="module")
def documents(tmp_path_factory) -> Documents:
    """English of a made-up vocabulary between English sentences, some German, code, and a change."""
    directory = tmp_path_factory.mktemp("documents")
    (directory / "documents").mkdir()
    texts = [("web", "web.jsonl", f"{SENTENCES['en']} {prose(number, 60)} {SENTENCES['en']}") for number in range(40)]
    texts += [
        ("multilingual", "de.jsonl", SENTENCES["de"] * 3),
        ("code", "a.py", "def f(a):\n    return a\n"),
        ("commit", "b.diff", "+ a"),
    ]
    texts += [("code", "README.md", SENTENCES["en"])]
    rows = []
    for offset, (domain, source, text) in enumerate(texts):
        given = {
            "id": document_id(source, offset, 0),
            "source": source,
            "offset": offset,
            "piece": 0,
            "collection": source,
        }
        blank = dict.fromkeys(("url", "licence", "lang", "repository", "path"), "")
        sizes = {"num_chars": len(text), "num_bytes": len(text.encode()), "content_digest": content_digest(text)}
        rows.append({**given, **blank, **sizes, "domain": domain, "text": text})
    pq.write_table(
        pa.Table.from_pylist(rows, schema=arrow_schema(DOCUMENT_COLUMNS)),
        directory / "documents" / "part-00000.parquet",
    )
    record = SimpleNamespace(num_documents=len(rows), num_bytes=sum(row["num_bytes"] for row in rows))
    return Documents(directory, record, "0" * 64)


NGRAMS = RECIPE.ngram_training.model_copy(
    update={
        "ngram_model": RECIPE.ngram_model.model_copy(
            update={
                "order": 3,
                "min_count": 2,
                "min_language_bytes": 5000,
                "held_out_documents": 4,
                "max_language_bytes": 10_000_000,
                "max_bytes": 100_000_000,
            }
        )
    }
)


def scored(documents: Documents, sources, classifiers, root: Path, partitions: int):
    """The language models and the scores."""
    resources = in_partitions(partitions)
    model = compute(train_ngram_model, root, sources=sources, documents=documents, recipe=NGRAMS, resources=resources)
    models = {"classifiers": classifiers, "ngram_model": model}
    return model, compute(
        score_documents, root, documents=documents, **models, recipe=RECIPE.language, resources=resources
    )


def test_without_reference_text_there_is_no_perplexity_and_everything_else(documents, tmp_path):
    (tmp_path / "data").mkdir()
    sources = classifier_sources(tmp_path / "data", labelled())
    classifiers = compute(train_classifiers, tmp_path / "home", sources=sources, recipe=TOXIC)
    model, result = scored(documents, sources, classifiers, tmp_path / "two", 2)
    assert model.record.languages == () and model.record.too_small == {}
    assert result.record.documents_by_language == {"": 2, "de": 1, "en": 41}
    # Made-up words are unknown to the classifier: nothing but the README and the German text could be scored, and are
    # not.
    unscored = {"quality": 44, "toxicity": 44, "perplexity": 44, "perplexity_percentile": 44, "factuality": 44}
    assert result.record.unscored == {"language_score": 2, **unscored}
    rows_of = {row["source"]: row for row in rows(result, "documents/*.parquet")}
    assert (rows_of["a.py"]["language"], rows_of["de.jsonl"]["language"]) == ("", "de")


def reference_sources(directory: Path, texts: list[str], manifest: str = "", **files: str | pa.Table):
    """Reference text beside something to train on."""
    directory.mkdir()
    write_jsonl(directory / "web.jsonl", [{"text": prose(1)}])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "book.jsonl").write_text(lines)
    for name, text in files.items():
        path = directory / name.replace("_", ".")
        path.write_text(text) if isinstance(text, str) else pq.write_table(text, path)
    (directory / "glm46-data.yaml").write_text(
        f"version: 1\nentries:\n{manifest}  - {{files: web.jsonl, role: pretrain}}\n  - {{files: 'book.*', role: "
        f"reference}}\n"
    )
    return list_sources(directory)


def book(num_texts: int) -> list[str]:
    return [f"{SENTENCES['en']} {prose(1000 + number, 60)} {SENTENCES['en']}" for number in range(num_texts)]


def test_a_document_is_ranked_among_reference_text_that_the_model_has_not_seen(documents, tmp_path):
    rows_in = pq.read_table(documents.files("documents/*.parquet")[0].uri).to_pylist()
    known = next(row["text"] for row in rows_in if row["source"] == "web.jsonl")
    page = f"<html><body><article><p>{book(61)[60]}</p></article></body></html>"
    sources = reference_sources(
        tmp_path / "data", [*book(60), known, SENTENCES["de"]], book_html=page, book_txt=book(62)[61]
    )
    with open(tmp_path / "data" / "book.jsonl", "a") as file:
        file.write('{"text"\n')
    sources = list_sources(tmp_path / "data")
    classifiers = compute(train_classifiers, tmp_path / "home", sources=sources, recipe=TOXIC)
    model, result = scored(documents, sources, classifiers, tmp_path / "two", 2)
    assert (model.digest, result.digest) == tuple(
        part.digest for part in scored(documents, sources, classifiers, tmp_path / "three", 3)
    )
    record = model.record
    assert (record.languages, record.num_known_references, record.reference_rejected) == (
        ("en",),
        1,
        {"broken_json": 1},
    )
    assert record.too_small == {"de": len(SENTENCES["de"].encode())}
    records = [
        ("book.jsonl", offset, text)
        for offset, text in zip(line_offsets(tmp_path / "data" / "book.jsonl"), book(60), strict=False)
    ]
    records += [("book.html", 0, html_to_text(page, NGRAMS.extract.html_extractor)[0]), ("book.txt", 0, book(62)[61])]
    is_held = [held_out_hash(document_id(name, offset, 0)) < 2 * 4 / 62 * 65536 for name, offset, _ in records]
    assert 4 <= sum(is_held) < 20
    texts = [prose_of(text).natural for _, _, text in records]
    expected = build_model(counts_of([text for text, held in zip(texts, is_held, strict=True) if not held], 3, 2), 3, 2)
    held_out = np.sort(expected.perplexities([text for text, held in zip(texts, is_held, strict=True) if held]))
    english = [row for row in rows(result, "documents/*.parquet") if row["language"] == "en"]
    values = expected.perplexities([prose_of(row["text"]).natural for row in english])
    assert [row["perplexity"] for row in english] == values.tolist()
    assert [row["perplexity_percentile"] for row in english] == [float(np.mean(held_out < value)) for value in values]
    described = json.loads(model.path("ngram_model.json").read_text())["languages"]["en"]
    assert described["held_out"] == held_out.tolist() and described["num_bytes"] == sum(
        len(text.encode()) for text in texts
    )
    others = [row for row in rows(result, "documents/*.parquet") if row["language"] != "en"]
    assert {row["perplexity_percentile"] for row in others} == {None}


def line_offsets(path: Path) -> list[int]:
    sizes = [len(line) for line in path.read_bytes().splitlines(keepends=True)]
    return [sum(sizes[:number]) for number in range(len(sizes))]


@pytest.mark.parametrize(
    ("bounds", "languages"), [({}, ("en",)), ({"min_language_bytes": 10_000_000}, ()), ({"held_out_documents": 20}, ())]
)
def test_a_language_with_too_little_reference_text_has_no_model(documents, tmp_path, bounds, languages):
    sources = reference_sources(tmp_path / "data", book(60))
    recipe = NGRAMS.model_copy(update={"ngram_model": NGRAMS.ngram_model.model_copy(update=bounds)})
    model = compute(
        train_ngram_model,
        tmp_path / "home",
        sources=sources,
        documents=documents,
        recipe=recipe,
        resources=in_partitions(2),
    )
    assert model.record.languages == languages and bool(model.record.too_small) != bool(languages)


def test_mathematics_has_no_perplexity_and_a_page_with_code_that_of_its_prose(tmp_path):
    model = build_model(counts_of(book(20), 3, 2), 3, 2)
    np.save(tmp_path / "en.npy", model.rows)
    files = LanguageModelFiles(
        3, {"en": LanguageModelFile(given_file(tmp_path / "en.npy"), model.log_unknown, (100.0, 200.0))}
    )
    plain, coded = book(1)[0], f"{book(1)[0]}\n\n```\nx = {{1: 2}}\n```\n"
    sums = f"{SENTENCES['en']} Let $x^2 = 4$ and $y^2 = 9$ and $z^2 = 16$."
    scores = _scores([plain, coded, sums], Scorers(2000, "", (), files))
    assert scores["language"] == ["en"] * 3
    first, second, third = scores["perplexity"]
    assert first == second and third is None and scores["perplexity_percentile"][2] is None


def test_reference_text_is_neither_trained_on_nor_protected(tmp_path):
    sources = reference_sources(tmp_path / "data", book(3))
    ingested = compute(
        ingest_documents, tmp_path / "home", sources=sources, recipe=RECIPE.ingest, resources=in_partitions(2)
    )
    assert {row["source"] for row in rows(ingested, "documents/*.parquet")} == {"web.jsonl"}
    assert rows(ingested, "evaluation/*.parquet") == []
    assert {row["role"] for row in rows(ingested, "sources.parquet")} == {"pretrain", "reference"}


@pytest.mark.parametrize(
    ("manifest", "files", "message"),
    [
        (
            "  - {files: book.copy.jsonl, role: evaluation}\n",
            {"book_copy_jsonl": "COPY"},
            r"book\.jsonl: role reference, but its copy",
        ),
        (
            "",
            {"book_bad_jsonl": "{\n" * 9},
            r"9 of 12 records are unreadable.*book\.bad\.jsonl at byte 0: broken_json.*role ignore",
        ),
        (
            "  - {files: book.field.parquet, role: reference, text: body}\n",
            {"book_field_parquet": pa.table({"text": ["a"]})},
            r"book\.field\.parquet.*column 'body'",
        ),
    ],
)
def test_bad_reference_text_is_refused_by_name(documents, tmp_path, manifest, files, message):
    texts = book(3)
    copy = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    given = {name: copy if text == "COPY" else text for name, text in files.items()}
    sources = reference_sources(tmp_path / "data", texts, manifest, **given)
    with pytest.raises(ValueError, match=message):
        compute(
            train_ngram_model,
            tmp_path / "home",
            sources=sources,
            documents=documents,
            recipe=NGRAMS,
            resources=in_partitions(2),
        )


def test_a_reference_file_that_changed_or_has_no_format_is_named(documents, tmp_path):
    sources = reference_sources(tmp_path / "data", book(3))
    changed = replace(
        sources,
        files=tuple(replace(file, sha256="0" * 64) if file.role == "reference" else file for file in sources.files),
    )
    with pytest.raises(ValueError, match=r"book\.jsonl at byte 0: changed"):
        compute(
            train_ngram_model,
            tmp_path / "home",
            sources=changed,
            documents=documents,
            recipe=NGRAMS,
            resources=in_partitions(2),
        )
    (tmp_path / "data" / "book.xyz").write_text("text")
    with pytest.raises(ValueError, match=r"book\.xyz has role reference, but its ending names no format"):
        list_sources(tmp_path / "data")
