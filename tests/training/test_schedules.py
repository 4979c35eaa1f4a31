"""The report's numbers at the report's positions of a 23.1T-token course, and the cutting of a phase into steps."""

import pytest

from configs.load import load_scale
from configs.schema import CourseRecipe, RouterBiasRule, Scale, Waypoint
from tasks.training.schedule.schedules import batch_tokens_at, learning_rate_at, plan_step, trains_mtp, value_at

TRILLION = 10**12
TOTAL = 23_100_000_000_000
REPORT = CourseRecipe(
    name="pretraining",
    phases=("pretrain_general", "pretrain_code_reasoning", "mid_repo_code", "mid_reasoning", "mid_long_context"),
    peak_learning_rate=2.5e-4,
    final_learning_rate=2.5e-5,
    warmup_share=32 / 23_100,
    start_batch_tokens=16_000_000,
    peak_batch_tokens=64_000_000,
    batch_rampup_share=500 / 23_100,
    router_bias_rate=(Waypoint(until_share=15 / 23.1, value=0.001), Waypoint(until_share=1.0, value=0.0)),
    router_bias_rule=RouterBiasRule(kind="sign", max_bias=0.0),
    mtp_loss_weight=(Waypoint(until_share=15 / 23.1, value=0.3), Waypoint(until_share=1.0, value=0.1)),
    balance_loss_weight=1e-4,
)


@pytest.mark.parametrize(
    ("tokens", "rate"),
    [
        (0, 0.0),
        (16_000_000_000, 1.25e-4),
        (32_000_000_000, 2.5e-4),
        ((TOTAL + 32_000_000_000) // 2, 1.375e-4),
        (TOTAL, 2.5e-5),
    ],
)
def test_the_rate_rises_to_its_peak_and_falls_by_cosine(tokens, rate):
    assert learning_rate_at(REPORT, TOTAL, tokens) == pytest.approx(rate, rel=1e-6)


def test_the_rate_never_rises_after_the_warm_up():
    rates = [learning_rate_at(REPORT, TOTAL, TOTAL * part // 100) for part in range(1, 101)]
    assert rates == sorted(rates, reverse=True)


@pytest.mark.parametrize(
    ("tokens", "batch"),
    [
        (0, 16_000_000),
        (83_333_333_333, 16_000_000),
        (83_333_333_334, 32_000_000),
        (249_999_999_999, 32_000_000),
        (250_000_000_000, 48_000_000),
        (416_666_666_667, 64_000_000),
        (TOTAL, 64_000_000),
    ],
)
def test_the_batch_grows_from_16m_to_64m_over_500b(tokens, batch):
    assert batch_tokens_at(REPORT, TOTAL, tokens) == batch


@pytest.mark.parametrize(("start", "peak", "multiple"), [(6, 15, 3), (4, 12, 4), (5, 7, 1), (8, 8, 8)])
def test_the_copies_that_divide_the_first_and_the_last_batch_divide_every_batch(start, peak, multiple):
    scale = load_scale("micro")
    recipe = scale.training_recipe(scale.phases[0])
    length, num_rows = recipe.sequence_length, 40 * peak
    batches = {"start_batch_tokens": start * length, "peak_batch_tokens": peak * length, "batch_rampup_share": 0.5}
    changes = {"course": recipe.course.model_copy(update=batches), "num_tokens": num_rows * length}
    recipe = recipe.model_copy(update=changes | {"course_num_tokens": num_rows * length, "course_start_tokens": 0})
    sizes, row = [], 0
    while row < num_rows:
        sizes.append(plan_step(recipe, row * length).num_rows)
        row += sizes[-1]
    *whole, last = sizes
    assert set(whole) == set(range(start, peak + 1, multiple)) and whole == sorted(whole)
    assert row == num_rows and 0 < last <= peak


@pytest.mark.parametrize(
    ("tokens", "rate", "weight"),
    [(0, 0.001, 0.3), (15 * TRILLION - 1, 0.001, 0.3), (15 * TRILLION, 0.0, 0.1), (TOTAL - 1, 0.0, 0.1)],
)
def test_bias_rate_and_mtp_weight_change_at_15t(tokens, rate, weight):
    assert value_at(REPORT.router_bias_rate, TOTAL, tokens) == rate
    assert value_at(REPORT.mtp_loss_weight, TOTAL, tokens) == weight


@pytest.mark.parametrize("shares", [(0.5,), (0.6, 0.5, 1.0), (0.5, 0.5, 1.0)])
def test_waypoints_that_do_not_rise_to_the_end_are_refused(shares):
    waypoints = [{"until_share": share, "value": 0.1} for share in shares]
    with pytest.raises(ValueError, match=r"mtp_loss_weight has until_share .*let them rise and end at 1.0"):
        CourseRecipe.model_validate(REPORT.model_dump() | {"mtp_loss_weight": waypoints})


@pytest.mark.parametrize("scale_name", ["micro", "tiny"])
def test_the_steps_of_a_phase_cover_its_rows_once(scale_name):
    scale = load_scale(scale_name)
    recipe = scale.training_recipe(scale.phases[0])
    num_tokens = next_row = 0
    while num_tokens < recipe.num_tokens:
        plan = plan_step(recipe, num_tokens)
        assert (
            plan.first_row == next_row
            and plan.num_rows > 0
            and plan.start_tokens == recipe.course_start_tokens + num_tokens
        )
        next_row += plan.num_rows
        num_tokens += plan.end_tokens - plan.start_tokens
    assert num_tokens == recipe.num_tokens and next_row * recipe.sequence_length == recipe.num_tokens


@pytest.mark.parametrize(("start", "expected"), [(0, True), (32, True), (64, False)])
def test_a_phase_whose_steps_all_weigh_mtp_with_nothing_does_not_train_it(start, expected):
    weights = [{"until_share": 0.5, "value": 0.3}, {"until_share": 1.0, "value": 0.0}]
    scale = load_scale("micro")
    recipe = scale.training_recipe(scale.phases[0])
    course = CourseRecipe.model_validate(recipe.course.model_dump() | {"mtp_loss_weight": weights})
    changes = {"course": course, "course_num_tokens": 128, "course_start_tokens": start, "num_tokens": 64}
    assert trains_mtp(recipe.model_copy(update=changes)) == expected


def test_a_longer_phase_has_other_keys_in_its_course_and_a_repeated_one_in_a_course_of_its_own_leaves_them():
    scale = load_scale("micro")

    def recipes(changed) -> dict:
        return {phase.name: changed.training_recipe(phase) for phase in changed.phases}

    def longer(phase):
        return phase.model_copy(
            update={"recipe": phase.recipe.model_copy(update={"num_tokens": 2 * phase.recipe.num_tokens})}
        )

    names = scale.courses[0].recipe.phases
    extended = scale.model_copy(
        update={"phases": tuple(longer(phase) if phase.name == names[0] else phase for phase in scale.phases)}
    )
    before, after = recipes(scale), recipes(extended)
    # The cosine ends with the course, so all of its phases change; those of other courses change only by their start.
    assert [name for name in before if before[name] != after[name]] == list(names)
    assert after[names[1]].course_start_tokens == 2 * before[names[0]].num_tokens

    again = f"{names[-1]}_2"
    phase = next(phase for phase in scale.phases if phase.name == names[-1]).model_copy(update={"name": again})
    course = scale.courses[0].model_copy(
        update={"recipe": scale.courses[0].recipe.model_copy(update={"name": "annealing", "phases": (again,)})}
    )
    index = [phase.name for phase in scale.phases].index(names[-1]) + 1
    repeated = Scale.model_validate(
        scale.model_copy(
            update={
                "courses": (scale.courses[0], course, *scale.courses[1:]),
                "phases": (*scale.phases[:index], phase, *scale.phases[index:]),
            }
        ).model_dump()
    )
    assert {name: recipe for name, recipe in recipes(repeated).items() if name != again} == before
    assert recipes(repeated)[again].course_start_tokens == 0
