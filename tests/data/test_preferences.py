"""Preference pairs: every layout and every reason, wrong results against arithmetic, the real step on real files."""

from __future__ import annotations

import json
import re

import pytest

from configs.schema import ContractRecipe, IngestRecipe, PairPackingRecipe
from tasks.data.chats.chat_tools import MalformedChatError
from tasks.data.packing.pack_pairs import pack_pairs
from tasks.data.preferences.collect_preferences import collect_preferences
from tasks.data.preferences.pair_formats import pair_of
from tasks.data.preferences.pair_records import wrong_result
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tasks.data.validate_contract import validate_contract
from tests.support.data_inputs import RECIPE, RESOURCES, SYNTHESIS, compute, prose, rows, write_jsonl
from tests.support.training_inputs import make_toy_tokenizer

ASKED = [{"role": "user", "content": "Hi"}]
YES, NO = {"role": "assistant", "content": "Yes."}, {"role": "assistant", "content": "No."}
BRIEF = {"role": "system", "content": "Be brief."}
COMPARED = {
    "PKU-SafeRLHF": ({"prompt": "Hi", "response_0": "No.", "response_1": "Yes."}, "better_response_id", 1, 0, None),
    "HelpSteer2": ({"prompt": "Hi", "response_1": "Yes.", "response_2": "No."}, "preference_strength", -2, 2, 0),
    "HelpSteer3": ({"context": ASKED, "response1": "Yes.", "response2": "No."}, "overall_preference", -1, 3, 0),
    "SHP": ({"history": "Hi", "human_ref_A": "Yes.", "human_ref_B": "No."}, "labels", 1, 0, None),
    "arena": (
        {"conversation_a": [*ASKED, YES], "conversation_b": [*ASKED, NO]}, "winner", "model_a", "model_b", "tie"
    ),
}  # fmt: skip
"""The record, its verdict's field, and the verdicts for the good answer, for the other, and for neither."""


def rated(rating, **ratings):
    """A list of three answers and what they are rated."""
    ((text, values),) = ratings.items()
    return [{text: said, rating: value} for said, value in zip(("Well.", "Yes.", "No."), values, strict=True)]


def arena(prompts, first, second):
    """A record of Arena's 55k in which the first answer wins."""
    texts = {"prompt": prompts, "response_a": first, "response_b": second}
    return {name: json.dumps(said) for name, said in texts.items()} | {"winner_model_a": 1, "winner_model_b": 0}


TALK = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: Well?\n\nAssistant: "


@pytest.mark.parametrize(
    ("record", "num_turns"),
    [
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}, 1),
        ({"prompt": "Hi", "chosen": [YES], "rejected": [NO]}, 1),
        ({"prompt": ASKED, "chosen": [YES], "rejected": [NO]}, 1),
        ({"prompt": "Hi", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, 1),
        ({"messages": ASKED, "chosen": "Yes.", "rejected": "No."}, 1),
        ({"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, 1),
        ({"system": "Be brief.", "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, 2),
        ({"system_prompt": "Be brief.", "prompt": "Hi", "chosen": "Yes.", "rejected": "No."}, 2),
        ({"system": "Be brief.", "chosen": [BRIEF, *ASKED, YES], "rejected": [BRIEF, *ASKED, NO]}, 2),
        ({"chosen": f"{TALK}Yes.", "rejected": f"{TALK}No."}, 3),
        ({"query": "Hi", "response": "Yes.", "rejected_response": "No."}, 1),
        (
            {"system": "Be brief.", "query": "Hi", "history": [["Well?", "Well."]]}
            | {"response": "Yes.", "rejected_response": "No."},
            4,
        ),
        ({"prompt": TALK, "chosen": " Yes.", "rejected": " No."}, 3),
        ({"chosen": "[INST] Hi [/INST] Yes.", "rejected": "[INST] Hi [/INST] No."}, 1),
        ({"prompt": "Hi", "messages": [*ASKED, YES], "chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}, 1),
        ({"prompt": "Hi", "chosen": [BRIEF, *ASKED, YES], "rejected": [BRIEF, *ASKED, NO]}, 2),
        ({"prompt": "Hi", "chosen": [*ASKED, NO, *ASKED, YES], "rejected": [*ASKED, NO, *ASKED, NO]}, 3),
        ({"messages": [*ASKED, YES], "rejected_messages": [*ASKED, NO]}, 1),
        ({"question": "Hi", "response_j": "Yes.", "response_k": "No."}, 1),
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No.", "chosen-rating": 5.0, "rejected-rating": 4.75}, 1),
        ({"instruction": "Hi", "completions": rated("fine-grained_score", response=(2.5, 4.75, 1))}, 1),
        ({"instruction": "Hi", "completions": rated("fine-grained_score", response=(None, 4.75, 1))}, 1),
        ({"instruction": "Hi", "completions": rated("fine-grained_score", response=(float("nan"), 4.75, 1))}, 1),
        (
            {
                "instruction": "Hi",
                "completions": [
                    {"response": "", "fine-grained_score": 9},
                    {"response": "Yes.", "fine-grained_score": 5},
                    {"response": "Yes.", "fine-grained_score": 1},
                    {"response": "No.", "fine-grained_score": 2},
                ],
            },
            1,
        ),
        ({"prompt": "\n\nHuman: Hi\n\nAssistant: ", "answers": rated("rank", answer=(2, 1.0, 7))}, 1),
        ({"context": ASKED, "completions": [{"rank": 1, "completion": [NO]}, {"rank": 0, "completion": [YES]}]}, 1),
        ({"context": "Hi", "completions": [{"rank": 1, "completion": [NO]}, {"rank": 0, "completion": [YES]}]}, 1),
        ({"instruction": "Hi", "input": "", "output": ["Yes.", "No."]}, 1),
        ({"input": {"messages": ASKED, "tools": []}, "preferred_output": [YES], "non_preferred_output": [NO]}, 1),
        ({"instruction": "Hi", "chosen_response": "Yes.", "rejected_response": "No."}, 1),
        ({"trajectory": [{"from": "user", "value": "Hi"}], "chosen": "Yes.", "rejected": "No."}, 1),
        (arena(["Hi"], ["Yes."], ["No."]), 1),
        ({"question": {"full_text": "Hi"}, "answer_0": "No.", "score_0": -1.0, "answer_1": "Yes.", "score_1": 1.0}, 1),
        ({"instruction": "Hi", "input": "", "output": "Yes.", "chosen": "Yes.", "rejected": "No."}, 1),
        (
            {
                "conversations": [{"from": "human", "value": "Hi"}],
                "chosen": {"from": "gpt", "value": "Yes."},
                "rejected": {"from": "gpt", "value": "No."},
            },
            1,
        ),
    ],
)
def test_every_layout_gives_a_prompt_and_two_answers(record, num_turns):
    pair = pair_of(record)
    assert (pair.chosen["content"], pair.rejected["content"]) == ("Yes.", "No.")
    assert len(pair.prompt) == num_turns and pair.prompt[-1]["role"] == "user"


@pytest.mark.parametrize("written", [json.dumps, str])
def test_turns_may_be_text_as_in_a_table(written):
    """Of JSON, or as pandas writes a list."""
    turns = {"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}
    assert pair_of({name: written(value) for name, value in turns.items()}) == pair_of(turns)
    quoted = {"prompt": "Hi", "chosen": '["Yes."]', "rejected": '[{"a": 1}]'}
    assert (pair_of(quoted).chosen["content"], pair_of(quoted).rejected["content"]) == ('["Yes."]', '[{"a": 1}]')


@pytest.mark.parametrize("name", COMPARED)
def test_a_verdict_chooses_the_preferred_answer(name):
    record, field, right, wrong, neither = COMPARED[name]
    pair, reversed_pair = pair_of({**record, field: right}), pair_of({**record, field: wrong})
    assert (pair.chosen["content"], pair.rejected["content"]) == ("Yes.", "No.")
    assert (reversed_pair.chosen, reversed_pair.rejected) == (pair.rejected, pair.chosen)
    assert [message["content"] for message in pair.prompt] == ["Hi"]
    as_text = pair_of({**record, field: str(right)})
    assert as_text == pair, "a table of comma-separated values holds texts only"
    with pytest.raises(MalformedChatError, match="unknown_verdict" if neither is None else "no_preference"):
        pair_of({**record, field: neither})
    with pytest.raises(MalformedChatError, match="unknown_verdict"):
        pair_of({**record, field: "the first"})


def test_a_rejected_response_stands_in_place_of_the_last_turn():
    pair = pair_of({"messages": [*ASKED, YES], "rejected_response": "No."})
    assert (pair.prompt, pair.chosen["content"], pair.rejected["content"]) == (
        pair_of({"chosen": [*ASKED, YES], "rejected": [*ASKED, NO]}).prompt,
        "Yes.",
        "No.",
    )


@pytest.mark.parametrize("content", [None, ""])
def test_an_answer_may_be_a_call_alone(content):
    call = {"role": "assistant", "content": content, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    pair = pair_of({"prompt": ASKED, "chosen": [call], "rejected": [NO]})
    assert pair.chosen.get("tool_calls") == [{"name": "f", "arguments": {}}]


def test_the_input_of_an_instruction_is_asked_with_it():
    pair = pair_of({"instruction": "Edit.", "input": "He go.", "chosen": "He goes.", "rejected": "He went."})
    assert pair.prompt[0]["content"] == "Edit.\n\nHe go."


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "Hi"}, "no_pair"),
        ({"prompt": "Hi", "chosen": "Yes."}, "no_pair"),
        ({"prompt": "Hi", "answers": rated("rank", answer=(1, 1, 1))}, "no_preference"),
        ({"prompt": "Hi", "answers": rated("rank", answer=(1, None, None))}, "no_pair"),
        ({"prompt": "Hi", "answers": rated("score", answer=(1, 2, 3))}, "no_pair"),
        ({"prompt": "Hi", "answers": ["Yes.", "No."]}, "no_pair"),
        ({"prompt": "Hi", "response_1": "Yes.", "response_2": "No."}, "no_pair"),
        ({"conversation_a": [*ASKED, YES], "conversation_b": [*ASKED, NO], "winner": ["model_a"]}, "unknown_verdict"),
        ({"conversation_a": [*ASKED, YES], "conversation_b": [*ASKED, NO], "winner": "both_bad"}, "no_preference"),
        ({"prompt": "Hi", "answer_0": "Yes.", "answer_1": "No.", "score_0": 0, "score_1": 0.0}, "no_preference"),
        ({"prompt": "Hi", "answer_0": "Yes.", "answer_1": "No.", "score_0": 1, "score_1": "n/a"}, "unknown_verdict"),
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No.", "status": "tie"}, "no_preference"),
        ({**arena(["Hi", "Ho"], ["Yes.", "Yes."], ["No.", "No."])}, "no_shared_prompt"),
        ({**arena(["Hi"], ["Yes."], [None])}, "no_answer"),
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "No.", "images": ["x.png"]}, "unsupported_part"),
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": "Yes."}, "equal_answers"),
        (
            {"prompt": "Hi", "chosen": "Yes.", "rejected": "No.", "score_chosen": 7, "score_rejected": 7.0},
            "no_preference",
        ),
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": " "}, "no_answer"),
        ({"prompt": "Hi", "chosen": "Yes.", "rejected": None}, "no_answer"),
        ({"prompt": "Hi", "chosen": [*ASKED, YES, *ASKED], "rejected": [NO]}, "no_answer"),
        ({"prompt": "Hi", "chosen": [], "rejected": [NO]}, "no_answer"),
        ({"chosen": f"{TALK}Yes.", "rejected": "\n\nHuman: Ho\n\nAssistant: No."}, "no_shared_prompt"),
        ({"chosen": "Yes.", "rejected": "No."}, "no_shared_prompt"),
        ({"chosen": [{"role": "poet", "content": "Hi"}, YES], "rejected": [NO]}, "unknown_role"),
    ],
)
def test_a_record_that_is_no_pair_is_rejected_for_its_reason(record, reason):
    with pytest.raises(MalformedChatError) as error:
        pair_of(record)
    assert error.value.reason == reason


def test_a_made_answer_is_never_right():
    for number in range(200):
        identity = f"{number:08x}" + f"{number * 7919:08x}"
        for sign, right in (("+", 20), ("-", 4), ("*", 96)):
            wrong = wrong_result(f"What is 12 {sign} 8?", str(right), identity)
            assert wrong is not None and int(wrong) != right
    assert wrong_result("What is 0 - 0?", "0", "0000000000000001") == "1", "another operation gives the same result"


@pytest.mark.parametrize(("question", "answer"), [("What is 12 + 8?", "21"), ("Which is larger?", "12"), ("1+1", "2")])
def test_a_problem_that_cannot_be_verified_makes_no_pair(question, answer):
    assert wrong_result(question, answer, "0" * 16) is None


def collect(data, root, **changes):
    """The real step on a directory, or on Python's own library where there is none."""
    sources = list_sources(data)
    ingest = IngestRecipe(max_record_bytes=10**6, max_source_bytes=10**6, max_rejected_share=0.1)
    ingested = compute(ingest_documents, root, sources=sources, recipe=ingest, resources=RESOURCES)
    synthesis = SYNTHESIS.model_copy(update={"num_chats": 60, "num_prompts": 40})
    synthetic = compute(synthesize_problems, root, recipe=synthesis)
    recipe = RECIPE.preference_collection
    preferences = recipe.preferences.model_copy(update={"validation_share": 0.2, "test_share": 0.2, **changes})
    return compute(
        collect_preferences,
        root,
        sources=sources,
        synthetic=synthetic,
        ingested=ingested,
        recipe=recipe.model_copy(update={"preferences": preferences}),
        resources=RESOURCES,
    )


def files_of_pairs(directory, records) -> None:
    write_jsonl(directory / "pairs.jsonl", records)
    write_jsonl(directory / "text.jsonl", [{"text": prose(99)}])
    roles = "  - {files: pairs.jsonl, role: preference}\n  - {files: text.jsonl, role: pretrain}\n"
    (directory / "glm46-data.yaml").write_text(f"version: 1\nentries:\n{roles}")


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """40 pairs of 20 prompts, a copy of one, and one of each fault."""
    directory, root = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("pairs")
    pairs = [
        {"prompt": f"Tell me about {prose(number)}", "chosen": f"{answer} of {number}.", "rejected": "No."}
        for number in range(20)
        for answer in ("Much", "A little")
    ]
    faults = [
        {"prompt": "Hi", "chosen": "Yes.", "rejected": "Yes."},
        {"prompt": "Hi", "chosen": "Yes.", "rejected": ""},
        {"text": "Hi"},
        {"prompt": "Hi", "response_1": "Yes.", "response_2": "No.", "preference_strength": 0},
        {"prompt": "Hi", "chosen": "Mail anna.smith@gmail.com", "rejected": "Mail bob.jones@gmail.com"},
        {"prompt": "Hi", "chosen": "Yes. " * 4000, "rejected": "No."},
    ]
    files_of_pairs(directory, [*pairs, pairs[0], *faults])
    return collect(directory, root)


def test_each_reason_drops_its_pair_and_leaves_its_neighbour(collected, tmp_path):
    record = collected.record
    assert record.dropped == {"equal_answers": 1, "exact_duplicate": 1, "no_preference": 1, "too_long": 1}
    assert record.rejected == {"equal_answers": 1, "no_answer": 1, "no_pair": 1}
    assert (record.num_sources, record.num_pairs, record.pairs_by_collection) == (1, 40, {"pairs.jsonl": 40})
    contract = ContractRecipe(name="preferences")
    checked = compute(validate_contract, tmp_path, subject=collected, recipe=contract, resources=RESOURCES)
    assert checked.record.num_rows >= 40


def test_pairs_of_one_prompt_are_in_one_part_of_the_split(collected):
    parts: dict[str, set[str]] = {}
    for row in rows(collected, "pairs/*.parquet"):
        parts.setdefault(row["prompt"], set()).add(row["split"])
    assert len(parts) == 20 and all(len(part) == 1 for part in parts.values())
    assert set.union(*parts.values()) == {"train", "validation", "test"}


def test_too_many_malformed_pairs_stop_the_run_with_examples(tmp_path):
    files_of_pairs(tmp_path, [{"prompt": "Hi", "chosen": "Yes.", "rejected": "Yes."}] * 9)
    with pytest.raises(ValueError, match=r"9 of 9 .* malformed \(equal_answers 9\).*pairs.jsonl at byte 0"):
        collect(tmp_path, tmp_path)


def test_a_part_without_pairs_is_named(tmp_path):
    files_of_pairs(tmp_path, [{"prompt": "Hi", "chosen": "Yes.", "rejected": "No."}])
    with pytest.raises(ValueError, match=r"of 1 preference pairs none is left for .*: bring more files"):
        collect(tmp_path, tmp_path)


def test_without_files_pairs_are_made_of_verified_problems_and_judged_by_unseen_ones(tmp_path):
    write_jsonl(tmp_path / "data" / "text.jsonl", [{"text": prose(99)}])
    made = collect(tmp_path / "data", tmp_path)
    of_split: dict[str, set[str]] = {}
    for row in rows(made, "pairs/*.parquet"):
        question = json.loads(row["prompt"])[0]["content"]
        a, sign, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", question).groups()
        right = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]
        assert json.loads(row["chosen"])["content"] == str(right) != json.loads(row["rejected"])["content"]
        of_split.setdefault(row["split"], set()).add(row["source"])
    assert of_split["test"] == {"synthetic/arithmetic-prompts-pairs"}
    assert of_split["train"] == of_split["validation"] == {"synthetic/arithmetic-chats-pairs"}


def test_rows_are_whole_pairs_and_longer_ones_are_counted(collected, tmp_path):
    """Decoded again, the rows are what the template gives; the prompt is equal up to where the answers start."""
    from tokenizers import Tokenizer

    tokenizer = compute(make_toy_tokenizer, tmp_path)

    def pack(sequence_length):
        recipe = PairPackingRecipe(sequence_length=sequence_length)
        return compute(pack_pairs, tmp_path, preferences=collected, tokenizer=tokenizer, recipe=recipe)

    packed = pack(10_000)
    assert packed.record.num_training + packed.record.num_validation + packed.record.num_test == 40
    opened = Tokenizer.from_file(str(tokenizer.path("tokenizer.json")))
    known = {row["id"]: row for row in rows(collected, "pairs/*.parquet")}
    for row in rows(packed, "*.parquet"):
        for side in ("chosen", "rejected"):
            answer = opened.decode(row[side][row["answer_start"] :], skip_special_tokens=False)
            assert answer == "\n" + json.loads(known[row["id"]][side])["content"] + "<|user|>"
    longest = sorted(max(len(row["chosen"]), len(row["rejected"])) for row in rows(packed, "*.parquet"))
    shorter = pack(longest[-1] - 1).record
    num_kept = shorter.num_training + shorter.num_validation + shorter.num_test
    assert num_kept + sum(shorter.too_long.values()) == 40 and num_kept < 40
    with pytest.raises(ValueError, match="no preference pair of 5 tokens or less is left for train, validation, test"):
        pack(5)
