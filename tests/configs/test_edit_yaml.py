"""`glm46 config`: single values change, everything else stays, and every mistake names the key."""

from __future__ import annotations

import pytest

from configs.edit_yaml import changed
from configs.load import CONFIGS_DIR, changed_scale, load_scale

TINY = (CONFIGS_DIR / "tiny.yaml").read_text()


def test_only_the_values_that_were_set_change(tmp_path):
    text = changed_scale(
        "tiny", ["scale=mine", "phases.sft.recipe.mixture={chat: 1.0}", "courses.0.recipe.balance_loss_weight=2.0e-4"]
    )
    differing = [(old, new) for old, new in zip(TINY.splitlines(), text.splitlines(), strict=True) if old != new]
    assert [new.strip() for _, new in differing] == [
        "scale: mine",
        "balance_loss_weight: 2.0e-4",
        "mixture: {chat: 1.0}",
    ]
    (tmp_path / "mine.yaml").write_text(text)
    mine, tiny = load_scale(str(tmp_path / "mine.yaml")), load_scale("tiny")
    assert mine.phases[5].recipe.mixture == {"chat": 1.0} != tiny.phases[5].recipe.mixture


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.recipe.hidden_sise=1", "no key hidden_sise in model.recipe; the nearest is hidden_size"),
        ("phases.sftt.recipe.num_tokens=1", "no key sftt in phases; the nearest is sft"),
        ("model=1", "model is a section; set its keys one by one"),
        ("scale.name=1", "scale is one value and has no key name"),
        ("phases.sft.name=x", "sft is the name by which settings and other phases find this entry"),
        ("scale", "write KEY=VALUE"),
        ("model.recipe.hidden_size={", "the value is no YAML"),
        ("data.recipe.ingest.max_record_bytes=1, max_source_bytes: 2", "put it into quotes"),
        ("scale=a\nb: 1", "put it into quotes"),
    ],
)
def test_a_mistake_names_the_key_and_the_fix(setting, message):
    with pytest.raises(ValueError, match=message):
        changed(TINY, setting)


def test_the_result_is_validated_as_a_run_would():
    with pytest.raises(ValueError, match=r"tiny with .*num_tokens=-1: phases.sft.recipe.num_tokens: .*than 0"):
        changed_scale("tiny", ["phases.sft.recipe.num_tokens=-1"])


@pytest.mark.parametrize("value", ["true", "'163840'"])
def test_neither_a_boolean_nor_text_is_an_integer(value):
    with pytest.raises(
        ValueError, match=r": phases.sft.recipe: num_tokens: (True|'163840') is no integer; write a num"
    ):
        changed_scale("tiny", [f"phases.sft.recipe.num_tokens={value}"])
