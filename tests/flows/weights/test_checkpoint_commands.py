"""`glm46 checkpoint`: committed and saved weights are listed, verified and taken out as directories that load."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file

from model.formats.hf_checkpoint import load_model
from tests.support.pipeline import here
from tests.support.training_inputs import TrainingInputs, small_recipe
from tests.training.adapters.test_adapters import WEIGHTS, adapter_recipe
from tests.training.test_phase import SAVE_EVERY_STEP, train_until_killed


@pytest.fixture(scope="module")
def phases(tmp_path_factory):
    """A home, a committed phase, and the work directory of an adapter's phase that was killed."""
    inputs = TrainingInputs(tmp_path_factory.mktemp("checkpoints") / "home")
    base = inputs.train(inputs.arguments(small_recipe(model=WEIGHTS)))
    arguments = inputs.chat_arguments(adapter_recipe(), SAVE_EVERY_STEP, start=base)
    train_until_killed(inputs, arguments)
    return inputs.home.root, base, inputs.work_dir(arguments)


def test_committed_and_saved_checkpoints_are_listed(phases):
    home, base, work_dir = phases
    listed = here("checkpoint", "list", home=home).stdout.splitlines()
    assert listed[0].split()[:4] == [base.key[:12], "pretrain_general", "step", "6"] and "committed" in listed[0]
    assert len(listed) > 1
    assert all(line.startswith(work_dir.name[:12]) and str(work_dir) in line and " sft " in line for line in listed[1:])


def test_weights_of_both_are_taken_out_and_load(phases, tmp_path):
    home, base, work_dir = phases
    for key in (base.key, work_dir.name[:9]):
        assert here("checkpoint", "consolidate", key, str(tmp_path / key), home=home).exit_code == 0
        assert load_model(tmp_path / key).recipe.hidden_size == WEIGHTS["hidden_size"]
        assert (tmp_path / key / "tokenizer.json").read_bytes() == base.path("hf/tokenizer.json").read_bytes()
    assert not (tmp_path / base.key / "adapter").exists()
    adapter = load_file(tmp_path / work_dir.name[:9] / "adapter" / "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if name.endswith("lora_B.weight"))
    again = here("checkpoint", "consolidate", base.key, str(tmp_path / base.key), home=home)
    assert again.exit_code == 2 and "exists: name a new directory" in again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([base.key, work_dir.name[:9]])


def test_a_damaged_checkpoint_is_found(phases):
    home, base, work_dir = phases
    assert here("checkpoint", "verify", base.key[:20], home=home).stdout.endswith("committed  intact\n")
    newest = work_dir / "checkpoints" / (work_dir / "checkpoints" / "latest").read_text() / "rank-00000.bin"
    data = newest.read_bytes()
    newest.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = here("checkpoint", "verify", work_dir.name, home=home)
    newest.write_bytes(data)
    assert damaged.exit_code == 1 and "rank-00000.bin: the block at byte 0 has another digest" in damaged.stdout
    unknown = here("checkpoint", "verify", "zz", home=home)
    assert unknown.exit_code == 2 and "no checkpoint has a key that begins with zz" in unknown.stderr
