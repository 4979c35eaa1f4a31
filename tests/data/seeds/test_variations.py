"""Seed problems varied with other numbers: the program that is read gives the seed back, and every variation
verifies."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from itertools import islice

import pytest

from configs.schema import SeedVariationRecipe
from tasks.data.chats.collect_chats import collect_chats
from tasks.data.problems.synthesize_problems import synthesize_problems
from tasks.data.seeds.math_answers import answers_agree, false_annotations
from tasks.data.seeds.seed_numbers import (
    Style,
    constants_of,
    must_stay,
    num_decimals,
    words_of,
    write_number,
    written_numbers,
)
from tasks.data.seeds.seed_problems import Seed
from tasks.data.seeds.seed_programs import NoProgramError, Slot, read_program, write
from tasks.data.seeds.seed_variations import check_variation, seed_variations
from tasks.data.seeds.vary_problems import vary_problems
from tasks.data.seeds.verify_solutions import verify_solutions
from tasks.data.sources.ingest_documents import ingest_documents
from tasks.data.sources.list_sources import list_sources
from tests.support.data_inputs import RECIPE, RESOURCES, compute, rows, write_jsonl

CAKES = (
    "Mona bakes 6 cakes a day and sells each for $4.50. How much does she earn in 8 days?",
    "She bakes 6*8=<<6*8=48>>48 cakes.\nShe earns 48*$4.50=$<<48*4.5=216>>216.",
    "216",
)
SALE = (
    "A lamp of $80 is sold at a 25% discount. Ivo also buys a carpet for $1,250. What does he pay?",
    "The discount is 80*.25=$<<80*.25=20>>20.\nThe lamp costs 80-20=$<<80-20=60>>60.\nHe pays "
    "1,250+60=$<<1250+60=1310>>1,310.",
    "1,310",
)
BUS = (
    "A bus has 48 seats. A third of them are empty, and 14 passengers get off. How many passengers are left?",
    "48/3=<<48/3=16>>16 seats are empty.\nThere were 48-16=<<48-16=32>>32 passengers.\nNow there are "
    "32-14=<<32-14=18>>18 passengers.",
    "18",
)
HIRE = (
    "Ana hires a boat for 150 minutes at 20 cents a minute. How many dollars is it?",
    "It is 150*20=<<150*20=3000>>3000 cents.\nThat is 3000/100=$<<3000/100=30>>30.",
    "30",
)
STORIES = {"cakes": CAKES, "sale": SALE, "bus": BUS, "hire": HIRE}


def seed_of(question: str, solution: str, answer: str) -> Seed:
    return Seed("0123456789abcdef", "seeds.jsonl", 7, "seeds", "MIT", "math", question, answer, solution, "")


def variations(story: tuple[str, str, str], count: int = 40) -> list[Seed]:
    seed = seed_of(*story)
    return list(islice(seed_variations(seed, read_program(seed)), count))


def numbers(text: str) -> list[Fraction]:
    return [number.value for number in written_numbers(text)]


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_the_program_of_a_seed_gives_it_back_and_every_variation_verifies(story):
    seed = seed_of(*story)
    program = read_program(seed)
    values = program.values({})
    assert (write(program.question, values), write(program.solution, values), write(program.answer, values)) == story
    made = variations(story)
    assert len({variation.question for variation in made} | {seed.question}) > 10
    refused = [check_variation(seed, program, variation) for variation in made]
    assert refused.count("") > 0.8 * len(made) and set(refused) <= {"", "nothing_to_vary", "another_program"}
    assert all(not false_annotations(variation.solution) and variation.question != seed.question for variation in made)


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_another_reckoner_finds_the_same_answer(story):
    """Each story's answer by a formula of its own over the numbers of the question."""
    formulas = {
        "cakes": lambda per_day, price, days: per_day * price * days,
        "sale": lambda lamp, percent, carpet: lamp * (100 - percent) / 100 + carpet,
        "bus": lambda seats, off: seats - seats / 3 - off,
        "hire": lambda minutes, cents: minutes * cents / 100,
    }
    formula = formulas[next(name for name, known in STORIES.items() if known is story)]
    for variation in variations(story):
        assert answers_agree(variation.answer, f"{float(formula(*numbers(variation.question))):.4f}"), variation


@pytest.mark.parametrize("story", STORIES.values(), ids=STORIES)
def test_all_numbers_compare_as_in_the_seed_and_stay_whole(story):
    seed = seed_of(*story)
    old = numbers(seed.question) + numbers(seed.solution)
    for variation in variations(story):
        new = numbers(variation.question) + numbers(variation.solution)
        pairs = sorted(zip(old, new, strict=True))
        assert [value for _, value in pairs] == sorted(value for _, value in pairs)
        assert all((before > 1) == (after > 1) and after > 0 for before, after in pairs)
        assert all(after.denominator == 1 for before, after in pairs if before.denominator == 1)


def test_the_words_stay_and_only_numbers_change():
    for story in STORIES.values():
        for variation in variations(story):
            assert re.sub(r"[\d.,]+", "#", variation.question) == re.sub(r"[\d.,]+", "#", story[0])


def test_numbers_are_written_as_they_stood():
    texts = ["0.5", ".5", ".50", "7", "7.25", "1,250", "12,000,000", "1250", "$4.50", "2.50", "100"]
    for text in texts:
        (number,) = written_numbers(text)
        assert text.endswith(write_number(number.value, number.style)) and write_number(
            number.value, number.style
        ) == text.lstrip("$")
    (price,) = written_numbers("$12.75")
    assert price.style == Style(2, False, False) and write_number(Fraction(25, 2), price.style) == "12.50"
    assert [num_decimals(Fraction(text)) for text in ("3", "0.5", "0.25")] == [0, 1, 2] and num_decimals(
        Fraction(1, 3)
    ) == 7


STAYS = [
    "in the year 2012",
    "at 5 pm he",
    "at 6:30 he",
    "the 3rd of",
    "a cow with 4 legs",
    "60 minutes in an hour",
    "1 apple",
    "0 apples",
    "page 12 of",
    "7 days a week",
    "1/4 of",
    "a 10x12 room",
    "an iPhone12 for",
    "the 4 Sundays of",
    "he is 61 inches tall",
    "a $20 bill",
    "size 8 shoes",
    "3-5 apples",
]
VARIES = [
    "15 apples",
    "$20 for",
    "4 dogs",
    "90 minutes of",
    "a 12-page book",
    "20% of",
    "5 boxes.",
    "1,900 steps",
    "$2000 for",
]


@pytest.mark.parametrize("text", STAYS)
def test_what_is_no_quantity_stays(text):
    assert must_stay(text, written_numbers(text)[0])


@pytest.mark.parametrize("text", VARIES)
def test_what_is_a_quantity_may_vary(text):
    assert not must_stay(text, written_numbers(text)[0])


def test_words_stand_for_numbers_and_bring_constants_in():
    assert words_of("twenty-five and three hundred") == {20, 25, 3, 5, 100, 300} and words_of("twice a dozen") == {
        2,
        12,
    }
    assert (
        words_of("on the 4th day") == {3, 4, 5}
        and words_of("on the third day") == {2, 3, 4}
        and words_of("nothing") == set()
    )
    assert (
        {7, 24} <= constants_of("every day")
        and 100 in constants_of("20% of it")
        and 100 not in constants_of("some of it")
    )
    assert {1, 4, 3, Fraction(1, 4), Fraction(3, 4)} <= constants_of("1/4 of it") and constants_of("nothing") == {1}


@pytest.mark.parametrize(
    ("change", "free"),
    [
        (("6 cakes", "6 cakes"), {6, 8, Fraction(9, 2)}),
        (("6 cakes a day", "6 cakes a day for six friends"), {8, Fraction(9, 2)}),
        (("in 8 days", "in the 8 days of May"), {6, Fraction(9, 2)}),
        (("8 days?", "8 days, on the 9th as well?"), {6, Fraction(9, 2)}),
    ],
    ids=["free", "stated_in_words", "calendar", "ordinal"],
)
def test_what_words_also_state_stays(change, free):
    seed = seed_of(CAKES[0].replace(*change), CAKES[1], CAKES[2])
    program = read_program(seed)
    assert {program.sources[index].value for index in program.free} == free


def test_a_number_with_two_meanings_stays():
    """8 is days and cakes of each day: the factors of 8*8 are ambiguous."""
    solution = "She bakes 8*8=<<8*8=64>>64 cakes.\nShe earns 64*$4.50=$<<64*4.5=288>>288."
    program = read_program(seed_of(CAKES[0].replace("6", "8"), solution, "288"))
    assert [program.sources[index].value for index in program.free] == [Fraction(9, 2)]


def test_quantities_of_which_one_follows_from_two_others_stay():
    question = (
        "Of 12 dogs 5 are black and 7 are white. Each black dog eats 3 bones, each white dog 20, and all 12 "
        "get a toy. How many things?"
    )
    solution = "5*3=<<5*3=15>>15\n7*20=<<7*20=140>>140\n15+140=<<15+140=155>>155 bones\n155+12=<<155+12=167>>167"
    program = read_program(seed_of(question, solution, "167"))
    assert {program.sources[index].value for index in program.free} == {3, 20}


BAD = {
    "no_calculation": (CAKES[0], "She earns $216.", "216"),
    "unreadable_calculation": (CAKES[0], CAKES[1].replace("<<6*8=48>>", "<<6*8=7*8=48>>"), "216"),
    "rounded_result": (
        "5 boys share 16 pens of $3. What?",
        "16/3=<<16/3=5.33>>5.33\n5.33*5=<<5.33*5=26.65>>26.65",
        "26.65",
    ),
    "unexplained_number": (CAKES[0], CAKES[1] + "\nThat is 77 more.", "216"),
    "unused_number": (CAKES[0].replace("How", "She has 31 friends. How"), CAKES[1], "216"),
    "answer_not_calculated": (CAKES[0], CAKES[1], "6"),
    "nothing_to_vary": ("Two men have two hats each. How many?", "2*2=<<2*2=4>>4", "4"),
    "too_long_number": (CAKES[0], CAKES[1], "216" + "0" * 20),
    "not_reproduced": (CAKES[0].replace("6 cakes", "06 cakes"), CAKES[1], "216"),
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_be_varied_says_why(reason):
    with pytest.raises(NoProgramError) as refused:
        read_program(seed_of(*BAD[reason]))
    assert refused.value.reason == reason
    assert read_program(seed_of(*CAKES)).free


@pytest.mark.parametrize(
    "annotation",
    [
        "<<__import__('os')=1>>",
        "<<6**8=48>>",
        "<<" + "(" * 300 + "6=6>>",
        "<<1/0=1>>",
        "<<6*=48>>",
        "<<2(3)=6>>",
        "<<6e8=48>>",
        "<<6*8=x>>",
    ],
)
def test_nothing_but_arithmetic_is_read(annotation):
    with pytest.raises(NoProgramError):
        read_program(seed_of(CAKES[0], f"{annotation} {CAKES[1]}", "216"))
    assert false_annotations(annotation)


def test_calculations_that_python_cannot_convert_do_not_hold():
    huge = "9" * 5000
    assert len(
        false_annotations(f"<<1e999=1>> <<{huge}=1>> <<1={huge}>> <<{'-' * 9000}1=1>>")
    ) == 4 and not answers_agree(huge, "1")


def test_the_check_refuses_what_was_tampered_with():
    seed = seed_of(*CAKES)
    program = read_program(seed)
    made = next(variation for variation in variations(CAKES) if not check_variation(seed, program, variation))
    (first, *_), text = numbers(made.question), made.question
    assert check_variation(seed, program, replace(made, answer="1")) == "answer_not_calculated"
    assert (
        check_variation(seed, program, replace(made, solution=made.solution.replace("<<", "<<1+")))
        == "false_calculation"
    )
    assert check_variation(seed, program, replace(made, solution=made.solution + " And 997 more.")) == "untraced_number"
    assert (
        check_variation(seed, program, replace(made, question=text.replace(f"{first} cakes", "998 cakes")))
        == "untraced_number"
    )
    assert check_variation(seed, program, replace(made, question=text.replace("sells", "sold"))) == "another_program"
    assert check_variation(seed, program, replace(made, question=f"{text} 31 friends come.")) == "unused_number"


def test_a_unit_an_article_and_a_percentage_bound_what_is_drawn():
    story = ("A man rests for 20 hours of a day and an 8-hour night. How long?", "20*8=<<20*8=160>>160", "160")
    drawn = [numbers(variation.question) for variation in variations(story, 400)]
    assert {hours for hours, _ in drawn} <= {12, 15, 20, 14, 16, 18, 22, 24} or max(hours for hours, _ in drawn) <= 24
    assert {night for _, night in drawn} <= {8, 11}
    sale = [numbers(variation.question)[1] for variation in variations(SALE, 400)]
    assert max(sale) <= 100 and len(set(sale)) > 3


def given_sources(directory):
    records = [
        {"question": question, "answer": f"{solution}\n#### {answer}"}
        for question, solution, answer in STORIES.values()
    ]
    records += [
        {"question": question, "answer": f"{solution}\n#### {answer}"} for question, solution, answer in BAD.values()
    ]
    records.append({"question": CAKES[0], "answer": "6*8=<<6*8=49>>49\n#### 49"})
    records.append({"problem": "What is half?", "answer": "1/2"})
    write_jsonl(directory / "seeds.jsonl", records)
    write_jsonl(directory / "text.jsonl", [{"text": "unused"}])
    (directory / "glm46-data.yaml").write_text(
        "version: 1\nentries:\n  - {files: seeds.jsonl, role: prompts, kind: math}\n  - {files: text.jsonl, role: "
        "pretrain}\n"
    )
    return list_sources(directory)


def test_the_step_keeps_what_verifies_and_counts_the_rest(tmp_path):
    sources = given_sources(tmp_path / "data")
    made = compute(vary_problems, tmp_path / "home", sources=sources, recipe=SeedVariationRecipe(per_seed=3))
    record, chats, rejected = made.record, rows(made, "chats.parquet"), rows(made, "rejected.parquet")
    assert (record.num_seeds, record.num_varied_seeds, record.num_chats) == (
        len(STORIES) + len(BAD) + 1,
        len(STORIES),
        3 * len(STORIES),
    )
    of_seeds = {reason: count for reason, count in record.rejected.items() if not reason.startswith("variation_")}
    assert of_seeds == dict.fromkeys(BAD, 1) | {"false_calculation": 1}
    assert len(rejected) == sum(record.rejected.values()) and record.chats_by_collection == {
        "seeds.jsonl#variations": len(chats)
    }
    questions = [json.loads(row["messages"])[0]["content"] for row in chats]
    assert len(set(questions)) == len(questions) and not set(questions) & {story[0] for story in STORIES.values()}
    for row in chats:
        answer = json.loads(row["messages"])[1]["content"]
        assert (
            "<<" not in answer
            and re.search(r"The answer is [\d.,]+\.$", answer)
            and row["source"] == "seeds.jsonl#variations"
        )


def test_a_run_gives_the_same_again_and_fewer_are_the_first_of_more(tmp_path):
    sources = given_sources(tmp_path / "data")
    one, again, more = (
        compute(vary_problems, tmp_path / name, sources=sources, recipe=SeedVariationRecipe(per_seed=count))
        for name, count in (("one", 2), ("again", 2), ("more", 4))
    )
    assert one.digest == again.digest
    assert {row["id"] for row in rows(one, "chats.parquet")} < {row["id"] for row in rows(more, "chats.parquet")}


def test_a_directory_of_seeds_alone_is_enough_for_the_stage(tmp_path):
    write_jsonl(tmp_path / "seeds.jsonl", [{"question": CAKES[0], "answer": CAKES[2]}])
    manifest = tmp_path / "glm46-data.yaml"
    manifest.write_text("version: 1\nentries:\n  - {files: seeds.jsonl, role: prompts, kind: math}\n")
    assert [file.role for file in list_sources(tmp_path, needed="prompts").files] == ["prompts"]
    with pytest.raises(ValueError, match="no text to train on"):
        list_sources(tmp_path)
    manifest.write_text("version: 1\nentries:\n  - {files: seeds.jsonl, role: pretrain}\n")
    with pytest.raises(
        ValueError, match=r"no seed problems: give their files the role prompts .* role: prompts, kind: math}"
    ):
        list_sources(tmp_path, needed="prompts")


def test_none_are_made_where_none_are_asked_for(tmp_path):
    made = compute(
        vary_problems,
        tmp_path / "home",
        sources=given_sources(tmp_path / "data"),
        recipe=SeedVariationRecipe(per_seed=0),
    )
    assert made.record.num_chats == 0 and rows(made, "chats.parquet") == rows(made, "rejected.parquet") == []


def test_a_seed_and_its_variations_are_held_out_together_and_an_evaluation_item_drops_its_variation(tmp_path):
    """Seeds of 30 people; the question of one variation is an item of a benchmark."""
    data = tmp_path / "data"
    solved = {"answer": f"{CAKES[1]}\n#### {CAKES[2]}"}
    names = [
        f"{first}{last}"
        for first in ("Mo", "Li", "Ka")
        for last in ("na", "la", "ra", "ta", "sa", "ma", "da", "va", "ka", "ba")
    ]
    write_jsonl(data / "seeds.jsonl", [{"question": CAKES[0].replace("Mona", name), **solved} for name in names])
    write_jsonl(data / "text.jsonl", [{"text": "unused"}])
    roles = "  - {files: seeds.jsonl, role: prompts, kind: math}\n  - {files: text.jsonl, role: pretrain}\n"
    (data / "glm46-data.yaml").write_text(f"version: 1\nentries:\n{roles}")
    recipe = SeedVariationRecipe(per_seed=3)
    planted = rows(
        compute(vary_problems, tmp_path / "first", sources=list_sources(data), recipe=recipe), "chats.parquet"
    )[0]
    write_jsonl(data / "bench.jsonl", [{"question": json.loads(planted["messages"])[0]["content"], "answer": "none"}])
    (data / "glm46-data.yaml").write_text(
        f"version: 1\nentries:\n{roles}  - {{files: bench.jsonl, role: evaluation}}\n"
    )
    sources, given = list_sources(data), {"resources": RESOURCES}
    made = {
        "solutions": compute(verify_solutions, tmp_path, sources=sources),
        "variations": compute(vary_problems, tmp_path, sources=sources, recipe=recipe),
        "synthetic": compute(synthesize_problems, tmp_path, recipe=RECIPE.synthesize),
        "ingested": compute(ingest_documents, tmp_path, sources=sources, recipe=RECIPE.ingest, **given),
    }
    alike = RECIPE.deduplicate.model_copy(
        update={"threshold": 0.95}
    )  # seeds of one story are near-duplicates and would go one way
    held_out = RECIPE.chats.model_copy(update={"validation_share": 0.3})
    collection = RECIPE.chat_collection.model_copy(update={"chats": held_out, "deduplicate": alike})
    chats = compute(collect_chats, tmp_path, sources=sources, recipe=collection, **made, **given)
    sides: dict[int, set[str]] = {}
    kinds: dict[int, set[str]] = {}
    for row in rows(chats, "chats/*.parquet"):
        if row["source"].startswith("seeds.jsonl#"):
            sides.setdefault(row["offset"], set()).add(row["split"])
            kinds.setdefault(row["offset"], set()).add(row["source"])
    assert {len(values) for values in sides.values()} == {1} and set().union(*sides.values()) == {"train", "validation"}
    assert sum(len(values) == 2 for values in kinds.values()) > 20
    dropped = {row["id"]: row["reason"] for row in rows(chats, "dropped.parquet")}
    assert dropped[planted["id"]].startswith("overlaps_evaluation")


def test_slots_stand_where_numbers_stood():
    program = read_program(seed_of(*SALE))
    assert sum(isinstance(piece, Slot) for piece in program.question) == 3 and len(program.free) == 3
