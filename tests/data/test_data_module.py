"""Batches of the data modules: their contents, device and order, and the settings that are refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from lightning.pytorch import LightningModule
from refusals import usage_error
from torch import nn

from lmbench.data.datamodule import TokenData
from lmbench.model.language_model import LanguageModel

from conftest import quiet_trainer

SMALL = {"batch_size": 3, "context_length": 16, "vocab_size": 500}
TINY = {"size": "tiny", "vocab_size": 500, "context_length": 16}
CODE = "".join(f"def function_{i}(value):\n    return value + {i}\n\n\n" for i in range(2000))


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    (folder / "code.txt").write_text(CODE)
    return {"source": "text", "text_files": [str(folder / "code.txt")], "cache_dir": str(folder / "cache")}


@pytest.fixture(params=["random device", "random pinned", "text device", "text pinned"])
def settings(request, text):
    source, placement = request.param.split()
    return {**SMALL, **(text if source == "text" else {}), "placement": placement}


def take(data, count):
    data.setup("fit")
    return list(itertools.islice(data.train_dataloader(), count))


def different(batches):
    return len({tuple(batch.tokens.flatten().tolist()) for batch in batches})


def test_batches_are_next_token_pairs_whatever_their_source_and_placement(settings):
    batches = take(TokenData(**settings), 8)
    assert different(batches) == 8
    for batch in batches:
        assert batch.tokens.shape == batch.targets.shape == (3, 16)
        assert batch.tokens.dtype is batch.targets.dtype is torch.int64
        assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
        assert 0 <= batch.tokens.min() <= batch.tokens.max() < 500
        assert batch.tokens.unique().numel() > 5
        assert batch.tokens.is_contiguous()
        assert batch.targets.is_contiguous()


def test_text_windows_are_text_and_what_the_data_was_is_told(text):
    data = TokenData(**SMALL, **text)
    (batch, *_) = take(data, 1)
    ids = data._text[1].tolist()
    window = [*batch.tokens[1].tolist(), int(batch.targets[1, -1])]
    assert any(ids[i : i + 17] == window for i in range(len(ids) - 16))
    facts = data.describe()
    assert (facts["source"], facts["corpus_bytes"], facts["corpus_files"]) == ("text", len(CODE), 1)
    assert (facts["num_batches"], len(facts["corpus_sha256"])) == (8, 64)
    assert TokenData(**SMALL, **text, placement="pinned").describe()["num_batches"] is None


def test_the_seed_decides_and_validation_draws_others(settings):
    first, again, other = (take(TokenData(**settings, seed=seed), 8) for seed in (1, 1, 2))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0].tokens, other[0].tokens)
    data = TokenData(**settings, seed=1)
    data.setup("validate")
    assert not torch.equal(next(iter(data.val_dataloader())).tokens, first[0].tokens)


def test_loader_processes_draw_different_text(text):
    assert different(take(TokenData(**SMALL, **text, placement="pinned", num_workers=2), 6)) == 6


def test_prebuilt_batches_come_again_where_they_lie():
    addresses = [batch.tokens.data_ptr() for batch in take(TokenData(**SMALL), 20)]
    assert len(set(addresses)) == 8
    assert addresses[:8] == addresses[8:16]


@pytest.mark.gpu
def test_on_a_gpu_device_batches_are_resident_and_pinned_ones_are_copied_without_blocking():
    for placement in ("device", "pinned"):
        data, model, places = TokenData(**SMALL, placement=placement), LanguageModel(**TINY), []
        model.on_train_batch_end = lambda outputs, batch, _: places.append(batch.tokens.is_cuda)  # noqa: B023
        quiet_trainer(accelerator="cuda", devices=1, max_steps=10).fit(model, data)
        assert places == [True] * 10
        loaded = next(iter(data.train_dataloader()))
        assert loaded.tokens.is_cuda if placement == "device" else loaded.tokens.is_pinned()


def test_text_shorter_than_a_batch_is_refused(text):
    data = TokenData(batch_size=1000, context_length=512, vocab_size=500, **text)
    for stage, part in (("fit", "training"), ("validate", "validation")):
        with usage_error(f"tokens for {part}, one batch needs 512001; give more text"):
            data.setup(stage)


def test_a_model_whose_vocabulary_is_smaller_than_the_datas_is_refused():
    model = LanguageModel(**{**TINY, "vocab_size": 400})
    with usage_error("500 token ids but the model's vocab_size is 400"):
        quiet_trainer(max_steps=1).fit(model, TokenData(**SMALL))


def test_a_module_whose_largest_embedding_is_smaller_than_the_datas_vocabulary_is_told_before_it_fails(capsys):
    class Embedder(LightningModule):
        def __init__(self):
            super().__init__()
            self.positions, self.tokens = nn.Embedding(16, 8), nn.Embedding(400, 8)

        def training_step(self, batch, _):
            return self.tokens(batch.tokens).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(IndexError):
        quiet_trainer(max_steps=1).fit(Embedder(), TokenData(**SMALL))
    assert "500 token ids but the module's largest embedding has 400 rows" in capsys.readouterr().err
