"""Losses of preference pairs and their gradients against plain references; pairs as rows; a reward model on disk."""

from __future__ import annotations

from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import logsigmoid

from model.architecture.losses import IGNORED
from model.architecture.transformer import Glm4Moe
from model.formats.checkpoint_names import to_checkpoint_tensors
from model.formats.hf_checkpoint import config_dict, is_reward_model, load_model, write_checkpoint
from tasks.training.loop.pair_data import divided_batches
from tasks.training.loop.pair_rows import PairRows
from tests.model.test_adapters import LORA, adapted_model, merge_one
from tests.support.model_recipes import GLM46, random_model, with_every_expert

pytestmark = pytest.mark.usefixtures("clear_routing")
CPU = torch.device("cpu")
PROMPTS = [[5, 6, 7], [9, 8], [4, 4, 4, 4]]
ANSWERS = [([11, 12], [13]), ([14], [15, 16, 17]), ([18, 19, 20], [21, 22])]
SCORED = with_every_expert(GLM46).model_copy(update={"num_nextn_predict_layers": 0})
REFERENCE = [(-3.0, -1.0), (-2.0, -6.0), (-4.0, -3.5)]
BETA = 0.3


def pair_rows(directory, reference=None) -> PairRows:
    """The three pairs in a file."""
    pairs = zip(PROMPTS, ANSWERS, strict=True)
    rows = [
        {"id": str(number), "answer_start": len(prompt), "chosen": prompt + chosen, "rejected": prompt + rejected}
        for number, (prompt, (chosen, rejected)) in enumerate(pairs)
    ]
    ids = pa.list_(pa.int32())
    schema = pa.schema([("id", pa.string()), ("answer_start", pa.int32()), ("chosen", ids), ("rejected", ids)])
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), directory / "pairs.parquet")
    if reference is None:
        return PairRows(directory / "pairs.parquet")
    named = [{"id": str(number), "chosen": c, "rejected": r} for number, (c, r) in enumerate(reference)]
    pq.write_table(pa.Table.from_pylist(named[::-1]), directory / "scores.parquet")
    return PairRows(directory / "pairs.parquet", directory / "scores.parquet", BETA)


def row_scores(model: Glm4Moe, batch) -> torch.Tensor:
    """Of each row, from the hidden state of its last token."""
    assert batch.preference is not None
    return model.score(model.hidden_states(batch.token_ids_BT), batch.preference.last_B)


def reward_model(seed: int = 0) -> Glm4Moe:
    model, trunk = Glm4Moe(SCORED, is_scored=True), random_model(SCORED, seed)
    model.load_state_dict(
        {name: tensor for name, tensor in trunk.state_dict().items() if name != "lm_head.weight"}
        | {"score.weight": torch.randn(1, SCORED.hidden_size, generator=torch.Generator().manual_seed(seed))}
    )
    return model


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def losses_of(model, batches) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and gradients over the pairs of micro-batches, as the training step accumulates them."""
    model.zero_grad()
    total, num_pairs = 0.0, sum(batch.num_lm_targets for batch in batches)
    for batch in batches:
        loss = model(batch.token_ids_BT, **batch.model_arguments).losses.lm * batch.num_lm_targets / num_pairs
        loss.backward()
        total += loss.item()
    return total, gradients(model)


def answer_log_probability(model, prompt, answer) -> torch.Tensor:
    logits_TV = model(torch.tensor([prompt + answer])).logits_BTV[0, len(prompt) - 1 : -1]
    return logits_TV.log_softmax(-1).gather(1, torch.tensor(answer)[:, None]).sum()


def assert_equal_gradients(ours, theirs) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-3, atol=1e-6, msg=name)


def test_dpo_is_the_loss_of_the_paper_and_has_its_gradient(tmp_path):
    """arXiv 2305.18290, equation 7, by autograd through the logits of one answer at a time."""
    model = random_model(with_every_expert(GLM46))
    model.runs_mtp = False
    rows = pair_rows(tmp_path, REFERENCE)
    loss, ours = losses_of(model, [rows.micro_batch([0, 1], CPU), rows.micro_batch([2], CPU)])
    model.zero_grad()
    terms = []
    for prompt, answers, reference in zip(PROMPTS, ANSWERS, REFERENCE, strict=True):
        chosen, rejected = (answer_log_probability(model, prompt, answer) for answer in answers)
        terms.append(-logsigmoid(BETA * ((chosen - reference[0]) - (rejected - reference[1]))))
    plain = torch.stack(terms).mean()
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    assert_equal_gradients(ours, gradients(model))


def test_dpo_of_an_adapter_has_the_gradient_of_the_merged_matrices(tmp_path):
    model = adapted_model(GLM46, LORA)
    model.runs_mtp = False
    rows = pair_rows(tmp_path, REFERENCE)
    loss, ours = losses_of(model, [rows.micro_batch([0, 1], CPU), rows.micro_batch([2], CPU)])
    own = {
        name: value.detach().clone().requires_grad_() for name, value in model.named_parameters() if value.requires_grad
    }
    plain = random_model(GLM46)
    merged = {name: merge_one(name, value, own, LORA) for name, value in plain.state_dict().items()}

    def answer(tokens_BT):
        return functional_call(plain, merged, (tokens_BT,))

    terms = []
    for prompt, answers, reference in zip(PROMPTS, ANSWERS, REFERENCE, strict=True):
        chosen, rejected = (answer_log_probability(answer, prompt, tokens) for tokens in answers)
        terms.append(-logsigmoid(BETA * ((chosen - reference[0]) - (rejected - reference[1]))))
    expected = torch.stack(terms).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-4)
    for name, value in own.items():
        torch.testing.assert_close(ours[name], value.grad, rtol=2e-3, atol=1e-5, msg=name)


def test_the_reward_loss_is_that_of_bradley_and_terry_and_has_its_gradient(tmp_path):
    model, rows = reward_model(), pair_rows(tmp_path)
    loss, ours = losses_of(model, [rows.micro_batch([0, 1], CPU), rows.micro_batch([2], CPU)])
    model.zero_grad()
    terms = []
    for prompt, answers in zip(PROMPTS, ANSWERS, strict=True):
        chosen, rejected = (
            model.hidden_states(torch.tensor([prompt + answer]))[0, -1] @ model.score.weight[0] for answer in answers
        )
        terms.append(-(chosen.exp() / (chosen.exp() + rejected.exp())).log())
    plain = torch.stack(terms).mean()
    plain.backward()
    assert loss == pytest.approx(plain.item(), rel=1e-5)
    assert_equal_gradients(ours, gradients(model))


@pytest.mark.parametrize(("num_ranks", "num_sequences"), [(1, 2), (1, 6), (2, 2), (3, 4)])
def test_rows_of_pairs_have_the_numbers_of_their_phase_on_any_rank(num_ranks, num_sequences, tmp_path):
    rows, found = pair_rows(tmp_path), {}
    for rank in range(num_ranks):
        axis = SimpleNamespace(rank=rank, size=num_ranks)
        for batch in divided_batches(rows, [2, 0, 1], axis, num_sequences, CPU, first_row=10):
            if not batch.is_filler:
                tokens = [tuple(filter(None, row)) for row in batch.token_ids_BT.tolist()]
                found |= dict(zip(batch.row_numbers_B.tolist(), tokens, strict=True))
    expected = [tuple(PROMPTS[pair] + answer) for pair in (2, 0, 1) for answer in ANSWERS[pair]]
    assert [found[number] for number in range(10, 16)] == expected and len(found) == 6


def test_rows_of_pairs_end_where_ranks_can_divide_them(tmp_path):
    pair_rows(tmp_path)
    rows = PairRows(tmp_path / "pairs.parquet", num_slices=4)
    batch = rows.micro_batch([0, 2], CPU)
    assert batch.token_ids_BT.shape == (4, 8) and batch.gaps_BT.sum() == 32 - (5 + 4 + 7 + 6)
    assert batch.preference.last_B.tolist() == [4, 3, 6, 5]


def test_a_filler_weighs_nothing_and_pairs_are_its_terms(tmp_path):
    batch = pair_rows(tmp_path).micro_batch([0, 2], CPU)
    assert batch.num_lm_targets == 2
    assert batch.target_ids_BT.tolist()[:2] == [
        [IGNORED] * 2 + [11, 12] + [IGNORED] * 3,
        [IGNORED] * 2 + [13] + [IGNORED] * 4,
    ]
    assert batch.attended.tolist() == [5 + 4 + 7 + 6, 25 + 16 + 49 + 36]
    assert pair_rows(tmp_path).micro_batch([0], CPU, is_filler=True).attended.tolist() == [0, 0]


def test_a_reference_without_a_pair_is_refused_by_its_id(tmp_path):
    with pytest.raises(ValueError, match="lacks pair 2"):
        pair_rows(tmp_path, REFERENCE[:2])


def test_a_reward_model_reads_back_and_scores_as_transformers_does(tmp_path):
    """transformers has no such class for this architecture: its generic one around its model is what it would be."""
    from transformers.modeling_layers import GenericForSequenceClassification
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoePreTrainedModel

    class Glm4MoeForSequenceClassification(GenericForSequenceClassification, Glm4MoePreTrainedModel):
        pass

    model = reward_model()
    tensors = to_checkpoint_tensors(model.state_dict())
    config = config_dict(SCORED, dtype=torch.float32, eos_token_ids=[1], pad_token_id=0, is_scored=True)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    write_checkpoint(tensors.__getitem__, shapes, config, tmp_path, dtype=torch.float32, max_shard_bytes=1 << 30)
    assert is_reward_model(tmp_path)
    batch = pair_rows(tmp_path).micro_batch([0, 1, 2], CPU)
    with torch.no_grad():
        scores_B = row_scores(model.eval(), batch)
        assert torch.equal(row_scores(load_model(tmp_path, is_scored=True), batch), scores_B)
        theirs = Glm4MoeForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
        torch.testing.assert_close(theirs(batch.token_ids_BT).logits[:, 0], scores_B, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="holds a reward model, a language model is needed"):
        load_model(tmp_path)
