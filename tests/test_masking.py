"""No secret is stored or shown, by its name or by its looks; and what is none stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from warm_server import warm_server

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.masking import is_secret, keep_secret, masked, masked_text, masked_words, to_fill_in
from lmbench.records.codec import encode_run
from lmbench.records.measured import RunError
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.schema import fields
from lmbench.sweep.file import SweepFile, read_sweep_file
from lmbench.sweep.folder import SweepFolder, read_sweep_folder
from lmbench.sweep.outcome import new_record
from lmbench.sweep.plan import Plan, make_plan
from lmbench.wandb.content import config_of
from lmbench.wandb.publish import WandbProblem

SECRETS = """hf_token token secret client_secret db.password PASSWD passphrase GH_PAT pat auth basicAuth bearer api_key
    apiKey APIKEY access_key AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY privateKey credential credentials.user cookie
    session sentry_dsn CUDA_SECRET_TOKEN TORCH_password NCCL_Credentials X_KEY HFTOKEN model.init_args.hf_token
    auth.user accessToken hf_token_read SSH_PASSPHRASE OMP_BEARER wandb_key X_AUTH"""
INNOCENT = """path pattern author authors tokenizer num_tokens max_tokens tokens_per_s compat token_type_ids eos_token
    pad_token_id session_length auth_mode num_key_value_heads key_dim key target_key data.source patience patch_size
    passes keyword PATH PWD dispatch bypass trainer.accumulate_grad_batches CUDA_MODULE_LOADING joules_per_token"""


KEYS = [
    f"hf_{'a1B2' * 9}", f"ghp_{'a1B2' * 9}", f"github_pat_{'a1B2' * 9}", f"sk-{'a1B2' * 8}",
    f"sk-proj-{'a1-_' * 8}", "AKIA" + "ABCD1234" * 2, "xoxb-1234567890-abcdef",
    f"eyJ{'abcd' * 4}.eyJ{'abcd' * 4}.{'abcd' * 4}",
    "-----BEGIN RSA PRIVATE KEY-----\nabcd\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
ORDINARY = [
    "ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn", "0f" * 20, "task-2024-experiment-with-a-long-name",
    "git@github.com:a/b.git", "/home/me/hf_cache/models", "https://host/a@b", "https://host:80/a@b", "sk-learn",
    "me@example.org",
]  # fmt: skip


def test_a_secrets_name_is_known_by_its_words_and_a_name_that_looks_alike_is_none():
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in INNOCENT.split() if is_secret(name)] == []
    assert [name for kind in ("run", "step") for name in fields(kind) if is_secret(name)] == []


def test_a_key_is_known_by_its_looks_under_any_name_and_ordinary_text_stays():
    assert masked({"notes": [f"use {key} here" for key in KEYS]}) == {"notes": ["use *** here"] * len(KEYS)}
    assert masked(ORDINARY) == ORDINARY


def test_addresses_lose_their_user_and_password():
    assert masked_text("https://me:p@ss@host:80/x?token=abc&n=1") == "https://host:80/x?token=***&n=1"
    assert masked_text("https://me:pa/ss@host/x https://token@host") == "https://host/x https://host"
    assert masked_text("at postgresql+psycopg://u:p@db/x, redis://:p@r") == "at postgresql+psycopg://db/x, redis://r"


def test_a_configuration_is_masked_by_names_and_true_false_zero_and_nothing_stay():
    tree = {"auth": {"user": "me", "on": True}, "loggers": [{"api_key": "x"}], "token": None, "pin": 3, "password": 42}
    result = masked(tree)
    assert result == {**tree, "auth": {"user": "***", "on": True}, "loggers": [{"api_key": "***"}], "password": "***"}
    assert to_fill_in(result) == ["auth.user", "loggers.api_key", "password"]


def test_a_command_line_is_masked_in_both_forms():
    words = ["fit", "--model.hf_token", "abc", "--db_password=x y", "--token", "--quiet", "--url=https://u:p@h/x"]
    expected = ["fit", "--model.hf_token", "***", "--db_password=***", "--token", "--quiet", "--url=https://h/x"]
    assert masked_words(words) == expected


def test_messages_have_no_secret_that_this_process_was_given():
    keep_secret(["planted-for-this-test"])
    for error in (UsageError, WandbProblem):
        assert str(error("401 for planted-for-this-test at http://me:pw@host")) == "401 for *** at http://host"


def test_a_record_is_written_without_secrets_whoever_made_it():
    key = KEYS[0]
    record = RunRecord(SCHEMA_VERSION, "error", argv=["fit", "--model.token", "pw-argv"])
    record.config = {"model": {"token": "pw-config", "hub": f"https://u:pw-url@host/{key}"}}
    record.error = RunError("ValueError", f"bad {key}")
    text = encode_run(record).decode()
    assert "pw-" not in text
    assert key not in text
    assert "pw-" not in json.dumps(config_of(record))


MODULE = """
import torch
from lightning.pytorch import LightningModule

class Net(LightningModule):
    def __init__(self, hf_token: str, api_key: int = 0, fails: bool = False):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.hf_token == "planted-token"
        self.layer = torch.nn.Linear(8, 1)
        if fails:
            raise RuntimeError(f"401 for {hf_token} at https://me:planted-pw@host")

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
"""


def _fit(folder: Path, *words: str) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    (folder / "secretive.py").write_text(MODULE)
    quick = ["--measure.warmup_steps=1", "--measure.steps=2", "--measure.min_window_s=0", "--measure.probe_steps=0"]
    words = ("fit", *words, "--trainer.accelerator=cpu", "--wandb.mode=disabled", *quick)
    ended = warm_server().run(*words, folder=folder)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_modules_token_is_in_no_file_and_the_replay_says_what_to_fill_in(tmp_path):
    token = ["--model", "secretive.Net", "--model.hf_token", "planted-token"]
    words = ("--model.fails=false", "--model.fails=true", "--model.api_key=planted-key")
    codes, printed = zip(*(_fit(tmp_path, *token, word) for word in words), strict=True)
    assert codes == (0, 5, 2)
    assert "model.api_key is ***; allowed: a whole number" in printed[2]
    stored = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert len(stored) == 6
    assert not any("planted" in text for text in (*printed, *(path.read_text("latin-1") for path in stored)))

    config = next(path for path in stored if path.name == "config.yaml")
    run = json.loads(config.with_name("run.json").read_text())
    assert run["replay_command"].endswith("config.yaml '--model.init_args.hf_token=***'")
    code, line = _fit(tmp_path, "--config", str(config))
    assert (code, line.count("\n")) == (2, 1)
    assert "give its value, such as --model.init_args.hf_token VALUE" in line
    secret = "--model.init_args.hf_token=planted-token"
    assert _fit(tmp_path, "--config", str(config), secret, "--model.fails=false")[0] == 0


# sweeps


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep's file with secrets in its configuration, its options and its variables."""
    monkeypatch.chdir(tmp_path)
    config = "model: {size: tiny, hub: {hf_token: planted-config}}\ndata: {url: 'http://u:planted@h/x'}"
    Path("base.yaml").write_text(config)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "base: {config: base.yaml, model.auth: {password: planted-option}}\n"
        "matrix: {data.batch_size: [1, 2]}\n"
        "environments: {a: {variables: {GH_PAT: planted-variable, NORMAL: x}}}\n"
    )
    return path


def _begin(name: str, file: SweepFile) -> tuple[Plan, Path]:
    plan, folder = make_plan(name, file), SweepFolder(Path("results") / name)
    folder.open(plan)
    folder.close()
    return plan, folder.path


def test_a_sweeps_secrets_reach_its_processes_and_no_file(sweep):
    plan, folder = _begin("mine", read_sweep_file(sweep))
    words = plan.cells[0].words()
    assert "--model.hub.hf_token=planted-config" in words
    assert "--data.url=http://u:planted@h/x" in words
    assert '--model.auth={"password": "planted-option"}' in words
    assert plan.environment_of(plan.cells[0]).process_variables()["GH_PAT"] == "planted-variable"
    stored = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(stored) >= 3
    assert not any("planted" in text for text in stored)
    assert "planted" not in (new_record("x", words).replay_command or "")


def test_going_on_with_a_folder_says_what_to_fill_in_and_finds_its_cells_again(sweep, monkeypatch):
    plan, folder = _begin("mine", read_sweep_file(sweep))
    anew = {"model.auth": "{password: anew}", "model.hub.hf_token": "anew", "data.url": "http://u:anew@h/x"}
    for count in range(len(anew)):
        with pytest.raises(UsageError, match="not stored in a sweep's folder"):
            make_plan("mine", read_sweep_folder(folder).changed(dict(list(anew.items())[:count])))
    file = read_sweep_folder(folder).changed(anew)
    with pytest.raises(UsageError, match=r"environment a: GH_PAT is not stored .* export it"):
        make_plan("mine", file)
    monkeypatch.setenv("GH_PAT", "anew")
    again, _ = _begin("mine", file)
    assert [cell.id for cell in again.cells] == [cell.id for cell in plan.cells]
    assert "--model.hub.hf_token=anew" in again.cells[0].words()
    assert again.environment_of(again.cells[0]).process_variables()["GH_PAT"] == "anew"


def test_a_dry_run_lists_no_secret_and_a_secret_in_a_list_is_refused(sweep, capsys):
    assert main(["sweep", str(sweep), "--dry_run", "--model.pat", "planted-word"]) == 0
    out = capsys.readouterr().out
    assert "planted" not in out
    assert "'--model.pat=***'" in out
    Path("base.yaml").write_text("trainer: {logger: [{init_args: {api_key: planted-list}}]}")
    with pytest.raises(UsageError, match="is a secret in a list"):
        make_plan("mine", read_sweep_file(sweep))
