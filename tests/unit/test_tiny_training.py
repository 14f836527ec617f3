"""Training: it learns, it repeats itself, and the command writes all of a checkpoint or nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import torch

from dspark_deploy.tiny import evaluate, loop, train, train_target
from dspark_deploy.tiny.checkpoint import MANIFEST, checkpoint_path, verify_folder
from dspark_deploy.tiny.data import Batch, agreed, encode, training_batches
from dspark_deploy.tiny.export import read_pair
from dspark_deploy.tiny.language import ACCURACY_SEEDS, problems, prompt
from dspark_deploy.tiny.loop import Recipe
from dspark_deploy.tiny.model import TARGET_SHAPE, Draft, DraftShape, Target
from dspark_deploy.tiny.muon import Muon, orthogonalise
from dspark_deploy.tiny.tokenizer import EOS
from dspark_deploy.tiny.train_draft import choose_blocks, train_draft

ROOT = checkpoint_path("tiny-qwen3/target").parent
TARGET, DRAFT, TOKENIZER = read_pair(ROOT)
SHORT = Recipe(target_steps=10, exactness=2.0, draft_steps=10, batch=4, warm_up=3)


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(loop, "LOSS_INTERVAL", 5)
    monkeypatch.setattr(loop, "CHECK_INTERVAL", 2)
    monkeypatch.setattr(train_target, "VALIDATION_PROBLEMS", 20)
    monkeypatch.setattr(evaluate, "EXACTNESS_PROBLEMS", 20)
    monkeypatch.setattr(evaluate, "ACCEPTANCE_PROBLEMS", 5)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _quiet(loss: float) -> None:
    assert loss > 0


def _target(recipe: Recipe) -> tuple[Target, list[loop.RecordedLoss]]:
    target = Target(TARGET_SHAPE, torch.Generator().manual_seed(recipe.seed))
    return target, train_target.train_target(target, recipe, TOKENIZER, _quiet)


def _draft(recipe: Recipe) -> tuple[Draft, list[loop.RecordedLoss]]:
    generator = torch.Generator().manual_seed(recipe.seed)
    draft = Draft(DraftShape(), TARGET, generator)
    return draft, train_draft(draft, TARGET, recipe, TOKENIZER, generator, _quiet)


def _same(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_target_learns_and_repeats_itself() -> None:
    target, losses = _target(SHORT)
    assert [loss.step for loss in losses] == [5, 10]
    assert losses[-1].loss < losses[0].loss - 0.5
    again, _ = _target(SHORT)
    assert _same(target, again)
    other, _ = _target(replace(SHORT, seed=1, target_steps=1))
    first, _ = _target(replace(SHORT, target_steps=1))
    assert not _same(first, other)


@pytest.mark.parametrize(("exactness", "steps"), [(0.0, 6), (1.1, 9)])
def test_target_training_ends_when_exact_enough(exactness: float, steps: int) -> None:
    recipe = replace(SHORT, target_steps=9, exactness=exactness, batch=1)
    _, losses = _target(recipe)
    assert losses[-1].step == steps


def test_draft_learns_repeats_itself_and_leaves_the_target_alone() -> None:
    before = {name: value.clone() for name, value in TARGET.state_dict().items()}
    draft, losses = _draft(SHORT)
    assert losses[-1].loss < losses[0].loss - 0.3
    again, _ = _draft(SHORT)
    assert _same(draft, again)
    assert all(torch.equal(before[name], value) for name, value in TARGET.state_dict().items())


def test_batches_hold_prompt_then_scored_solution_then_end() -> None:
    asked = problems(ACCURACY_SEEDS[0], 3)
    batch = encode(TOKENIZER, asked)
    for problem, tokens, response in zip(asked, batch.tokens, batch.response, strict=True):
        start, count = int(response.nonzero()[0]), int(response.sum())
        assert response[start : start + count].all()
        assert TOKENIZER.decode(tokens[:start].tolist()) == prompt(problem)
        assert TOKENIZER.decode(tokens[start : start + count - 1].tolist()) == f" {problem.solution}"
        assert tokens[start + count - 1] == EOS
        assert not tokens[start + count :].any()


def test_a_batch_holds_one_number_of_operations_and_no_prompt_comes_twice() -> None:
    seen = set()
    for batch in islice(training_batches(TOKENIZER, 0, 8), 30):
        texts = TOKENIZER.decode_batch(batch.tokens.tolist())
        assert len({text.count("=") for text in texts}) == 1
        seen.update(texts)
    assert len(seen) == 240


def _batch_and_logits(wrong_at: int) -> tuple[Batch, Any]:
    """Two prompts of 4 tokens, responses of 12; the target chooses all but one token of row 0."""
    tokens = torch.arange(3, 35).view(2, 16)
    response = (torch.arange(16) >= 4).expand(2, -1)
    logits = torch.zeros(2, 16, 50)
    logits.scatter_(2, tokens.roll(-1, 1)[..., None], 1.0)
    logits[0, wrong_at - 1] = 0
    return Batch(tokens, response), logits


def test_agreement_ends_at_the_first_token_that_the_target_would_not_choose() -> None:
    batch, logits = _batch_and_logits(wrong_at=9)
    expected = batch.response.clone()
    expected[0, 9:] = False
    assert torch.equal(agreed(logits, batch), expected)


def test_blocks_start_on_the_targets_path_and_learn_from_it_only() -> None:
    batch, logits = _batch_and_logits(wrong_at=9)
    recipe = Recipe(anchors=11)
    blocks = choose_blocks(logits, batch, 7, recipe, torch.Generator().manual_seed(0))
    on_path = agreed(logits, batch)
    assert blocks.valid.any(-1)[0].sum() == 4, (
        "anchors 4 to 7 have their next token on the path, and no others do"
    )
    assert blocks.valid.any(-1)[1].sum() == 11
    assert set(blocks.kept.flatten().tolist()) > {7}
    for row, column, slot in blocks.valid.nonzero().tolist():
        position = int(blocks.anchors[row, column]) + slot + 1
        assert on_path[row, position]
        assert slot < blocks.kept[row, column]
        assert blocks.tokens[row, column, slot + 1] == batch.tokens[row, position]
        assert blocks.tokens[row, column, 0] == batch.tokens[row, blocks.anchors[row, column]]


def test_blocks_are_never_cut_short_unless_asked() -> None:
    batch, logits = _batch_and_logits(wrong_at=15)
    blocks = choose_blocks(logits, batch, 7, Recipe(short_blocks=0.0), torch.Generator().manual_seed(0))
    assert (blocks.kept == 7).all()


@pytest.mark.parametrize("shape", [(96, 96), (32, 96), (256, 96), (96, 256)])
def test_muon_matches_torchs_within_its_bfloat16(shape: tuple[int, int]) -> None:
    reference = pytest.importorskip("torch.optim", reason="Muon is new in torch 2.9").Muon
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, generator=generator)
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    pairs = [
        (ours, Muon([ours], lr=0.02)),
        (theirs, reference([theirs], lr=0.02, momentum=0.95, weight_decay=0.01, adjust_lr_fn="original")),
    ]
    for _ in range(3):
        gradient = torch.randn(shape, generator=generator)
        for parameter, optimiser in pairs:
            parameter.grad = gradient.clone()
            optimiser.step()
    assert (ours - theirs).norm() < 0.02 * (theirs - start).norm()


@pytest.mark.parametrize("shape", [(2, 32, 96), (3, 96, 32)])
def test_orthogonalised_singular_values_are_near_one(shape: tuple[int, int, int]) -> None:
    matrices = 100 * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert 0.6 < values.min() <= values.max() < 1.3


def test_the_shipped_pair_is_worth_what_its_manifest_says() -> None:
    held_out = json.loads((ROOT / MANIFEST).read_text())["held_out"]
    assert (
        abs(
            evaluate.exactness(TARGET, TOKENIZER, problems(evaluate.SEED, 300))["all"]
            - held_out["exact"]["all"]
        )
        < 0.07
    )
    length = evaluate.acceptance_length(TARGET, DRAFT, TOKENIZER, problems(evaluate.SEED, 40), 5)
    assert length is not None
    assert abs(length - held_out["acceptance_length"]["k5"]) < 0.4
    assert length > 3.5


@pytest.mark.parametrize("right", [0, 2, 5])
def test_acceptance_length_counts_accepted_tokens_and_the_targets_own(
    monkeypatch: pytest.MonkeyPatch, right: int
) -> None:
    """A draft whose first `right` slots are always right."""

    def drafted(target: Any, draft: Any, tokens: Any, first: int, slots: int) -> Any:
        padded = torch.nn.functional.pad(tokens, (0, slots), value=-2)
        truth = padded.unfold(0, slots, 1)[first + 1 : len(tokens)].clone()
        truth[:, right:] = -2
        return truth

    monkeypatch.setattr(evaluate, "_drafted", drafted)
    length = evaluate.acceptance_length(TARGET, DRAFT, TOKENIZER, problems(evaluate.SEED, 40), 5)
    assert length is not None
    assert right + 0.5 < length <= right + 1


def test_command_writes_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "pair"
    assert train.main(["--out", str(out), "--target-steps", "3", "--draft-steps", "2"]) == 0
    verify_folder(out)
    assert [path.name for path in out.parent.iterdir()] == ["pair"]
    shipped = json.loads((ROOT / MANIFEST).read_text())
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["files"].keys() == shipped["files"].keys()
    assert manifest["recipe"] == {
        **asdict(Recipe()),
        **shipped["recipe"],
        "target_steps": 3,
        "draft_steps": 2,
    }
    assert manifest["shapes"] == shipped["shapes"]
    losses = json.loads((out / "losses.json").read_text())
    assert [losses[part][-1]["step"] for part in ("target", "draft")] == [3, 2]
    read_pair(out)
    printed = capsys.readouterr()
    assert json.loads(printed.out)["out"] == str(out)
    assert "target  step    3/3" in printed.err
    assert "draft   step    2/2" in printed.err
    assert "s left" in printed.err


def test_command_refuses_a_folder_that_holds_something(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").touch()
    assert train.main(["--out", str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize(("failure", "code"), [(KeyboardInterrupt, 130), (OSError, None)])
def test_a_run_that_ends_early_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException], code: int | None
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(evaluate, "report", fail)
    arguments = ["--out", str(tmp_path / "pair"), "--target-steps", "1", "--draft-steps", "1"]
    if code is None:
        with pytest.raises(failure):
            train.main(arguments)
    else:
        assert train.main(arguments) == code
    assert not list(tmp_path.iterdir())
