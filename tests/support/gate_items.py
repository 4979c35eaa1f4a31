"""Evaluation items with given figures, for tests of decisions: forty good items of each kind, the same worse in one
figure, a gate."""

from __future__ import annotations

import json
import math

from configs.schema import GateRecipe, MarginRecipe
from tasks.evaluation.expert_use import ExpertUse
from tasks.evaluation.items import ARITHMETIC, CHAT_PROBLEM, CHOICE, DOCUMENT, SAFETY, TASK, WORKED, Item, text_digest

NUM_ITEMS = 40
MARGINS = MarginRecipe(
    bits_per_byte=0.1,
    domain_bits_per_byte=0.3,
    arithmetic_accuracy=0.2,
    pass_at_1=0.2,
    choice_accuracy=0.2,
    agentic_success=0.2,
    safe_answer_share=0.2,
)
GATE = GateRecipe(
    max_bits_per_byte=2.0,
    min_arithmetic_accuracy=0.25,
    min_pass_at_1=0.25,
    min_choice_accuracy=0.25,
    min_formed_answer_share=0.0,
    min_distinct_answer_share=0.5,
    min_harmful_refused_share=0.25,
    min_harmless_answered_share=0.25,
    min_pair_accuracy=0.0,
    max_calibration_error=1.0,
    own_figure="none",
    must_gain=False,
    start=MARGINS,
    champion=MARGINS,
    max_expert_load=1.5,
    max_expert_cv=0.6,
)


def document(number, bits_per_byte, domain="web", unit=""):
    log_probability = -bits_per_byte * 1000 * math.log(2)
    name = f"document/{number:03d}"
    return Item(
        name, DOCUMENT, domain, unit or name, text_digest(name), "", "", bits_per_byte, log_probability, 1000, 0, 0
    )


def worked_problem(number):
    name = f"{WORKED}/{number:03d}"
    return Item(name, WORKED, "synthetic", name, text_digest(name), "", "", 1.0, -100 * math.log(2), 100, 0, 0)


def problem(number, right):
    name = f"arithmetic/{number:03d}"
    return Item(name, ARITHMETIC, "synthetic", name, text_digest(name), "4", "4", float(right), -1.0, 1, 1, int(right))


def chat(number, answers):
    """A problem whose right answer is its number."""
    right, name = sum(answer == str(number) for answer in answers), f"chat_problem/{number:03d}"
    share, count = right / len(answers), len(answers)
    return Item(
        name,
        CHAT_PROBLEM,
        "synthetic",
        name,
        text_digest(name),
        str(number),
        json.dumps(answers),
        share,
        -1.0,
        4,
        count,
        right,
        num_formed=count,
    )


def question(number, right, benchmark="continuation"):
    name = f"choice/{benchmark}/{number:03d}"
    return Item(name, CHOICE, "web", name, text_digest(name), "0", "[-1, -2]", float(right), -1.0, 4, 1, int(right))


def request(number, right, label):
    name = f"{SAFETY}/{label}/{number:03d}"
    return Item(name, SAFETY, "safety", name, text_digest(name), "{}", "[]", float(right), -1.0, 4, 1, int(right))


def task(number, right, kind):
    name = f"{TASK}/{kind}/{number:03d}"
    return Item(name, TASK, "agentic", name, text_digest(name), "{}", "[]", float(right), -1.0, 4, 1, int(right))


def answers_of(share, number=NUM_ITEMS):
    """Ten answers to every problem, this share of them right."""
    num_right = round(share * 10)
    return [[str(n)] * num_right + [f"wrong {n}"] * (10 - num_right) for n in range(number)]


def items_of(
    bits=(1.0,) * NUM_ITEMS,
    arithmetic=1.0,
    answers=None,
    choice: float | None = 1.0,
    refused: float | None = 1.0,
    answered: float = 1.0,
    documents=None,
    num_items=NUM_ITEMS,
    solved=1.0,
):
    """Documents of one domain, or those given; a share of problems and questions right; answers to the problems asked
    as conversations; shares of harmful requests refused and of harmless ones answered, None without requests; the share
    of the tasks of two environments that were solved."""
    made = [document(number, value) for number, value in enumerate(bits)] if documents is None else list(documents)
    made += [problem(n, n < arithmetic * num_items) for n in range(num_items)]
    made += [worked_problem(n) for n in range(num_items)]
    made += [chat(n, given) for n, given in enumerate(answers_of(1.0) if answers is None else answers)]
    if refused is not None:
        for share, label in ((refused, "harmful"), (answered, "harmless")):
            made += [request(n, n < share * num_items, label) for n in range(num_items)]
    for kind in ("calculator", "retail"):
        made += [task(n, n < solved * num_items, kind) for n in range(num_items)]
    return made + ([] if choice is None else [question(n, n < choice * num_items) for n in range(num_items)])


def mixed(**domains):
    """Documents of several domains: (number of them, bits per byte)."""
    made = []
    for domain, (count, bits) in domains.items():
        made += [document(len(made) + number, bits, domain) for number in range(count)]
    return made


BALANCED = (ExpertUse(0, (50_000,) * 4, 100_000),)
WORSE = {
    "bits_per_byte": lambda loss: items_of([1.0 + loss] * NUM_ITEMS),
    "arithmetic_accuracy": lambda loss: items_of(arithmetic=1.0 - loss),
    "pass_at_1": lambda loss: items_of(answers=answers_of(1.0 - loss)),
    "choice_accuracy": lambda loss: items_of(choice=1.0 - loss),
    "safe_answer_share": lambda loss: items_of(refused=1.0 - loss, answered=1.0 - loss),
    "agentic_success": lambda loss: items_of(solved=1.0 - loss),
}
"""Items that are worse than items_of() in only one figure."""
