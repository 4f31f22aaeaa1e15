"""Secrets are neither stored nor shown, whether their name or their look gives them away; other text stays."""

from __future__ import annotations

import json
import os
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import pytest
import warm_server
from fit_process import QUICK
from refusals import usage_error
from tables import cases, rows

from lmbench.masking import is_secret, masked, masked_message, masked_text, masked_words, to_fill_in
from lmbench.records.schema import fields
from lmbench.sweep.file import read_sweep_file
from lmbench.sweep.folder import SweepFolder, read_sweep_folder
from lmbench.sweep.outcome import new_record
from lmbench.sweep.plan import make_plan
from lmbench.sweep.progress import SweepProgress

SECRETS = """hf_token token secret client_secret db.password PASSWD passphrase GH_PAT pat auth basicAuth bearer api_key
    apiKey APIKEY access_key AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY privateKey credential credentials.user cookie
    session sentry_dsn CUDA_SECRET_TOKEN TORCH_password NCCL_Credentials X_KEY HFTOKEN model.init_args.hf_token
    auth.user accessToken hf_token_read SSH_PASSPHRASE OMP_BEARER wandb_key X_AUTH SLURM_JWT DB_PW MY_CREDS AZURE_SAS
    masterKey"""
INNOCENT = """path pattern author authors tokenizer num_tokens max_tokens tokens_per_s compat token_type_ids eos_token
    pad_token_id session_length auth_mode num_key_value_heads key_dim key target_key data.source patience patch_size
    passes keyword PATH PWD dispatch bypass trainer.accumulate_grad_batches CUDA_MODULE_LOADING joules_per_token"""


_LETTERS, _HEX = "a1B2c3D4" * 12, "0123456789abcdef" * 4
KEYS = [
    f"hf_{_LETTERS[:34]}", f"ghp_{_LETTERS[:36]}", f"github_pat_{_LETTERS[:22]}_{_LETTERS[:59]}", f"sk-{_LETTERS[:48]}",
    f"sk-proj-{'a1-_' * 8}", f"sk-ant-api03-{_LETTERS}-AA", "AKIA" + "ABCD1234" * 2, "xoxb-1234567890-abcdef",
    f"SG.{_LETTERS[:22]}.{_LETTERS[:43]}", f"SK{_HEX[:32]}", f"npm_{_LETTERS[:36]}", f"pypi-AgEIcHlwaS5vcmc{_LETTERS}",
    f"dop_v1_{_HEX}", f"dapi{_HEX[:32]}", f"sk_test_{_LETTERS[:24]}", f"glpat-{_LETTERS[:20]}", f"hvs.{_LETTERS[:24]}",
    f"nvapi-{_LETTERS[:64]}", f"AIza{_LETTERS[:35]}", f"123456789:AA{_LETTERS[:33]}", f"{_HEX[:32]}-us12",
    f"shpat_{_HEX[:32]}", f"abc8Q~{_LETTERS[:34]}", f"eyJ{'abcd' * 4}.eyJ{'abcd' * 4}.{'abcd' * 4}",
    f"hf_{'aBcD' * 8}eF", f"csk-{_HEX[:48]}", f"pcsk_a1B2_{_LETTERS[:60]}", f"eyJhcGlf{_LETTERS[:60]}",
    f"{_HEX[:32]}-{_HEX[:8]}-{_HEX[:8]}",
    "-----BEGIN PGP PRIVATE KEY BLOCK-----\nabcd\n-----END PGP PRIVATE KEY BLOCK-----",
    "-----BEGIN RSA PRIVATE KEY-----\nabcd\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
#: Texts around a secret; `%` stands for the secret, `planted7value8text`.
AROUND = """Server=tcp:x,1433;Uid=me;Pwd=%;Encrypt=yes|AccountName=a;AccountKey=%;EndpointSuffix=core|{'api_key': '%'}
    |https://a.blob.core.windows.net/c?sv=2020&sig=%&se=1|Authorization: Basic %|{"Authorization": "Bearer %"}
    |Basic %|https://hooks.slack.com/services/%|password: %|--client_secret=%
    |{"password": "correct horse, %"}|token = %|tool --password % --user me|['--hub.token', '%']|--api-key=% -v
    |os.environ['HF_TOKEN'] = '%'|{'api_key': b'%'}|password => %"""
ORDINARY = rows("""
ampere_bf16_s16816gemm_bf16_128x256_ldg8_f2f_stages_64x3_tn
0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f
task-2024-experiment-with-a-long-name
git@github.com:a/b.git
/home/me/hf_cache/models
https://host/a@b
https://host:80/a@b
sk-learn
me@example.org
Basic information about Token classification-head
next_token = logits.argmax(-1)
self.token = tokenizer.encode(x)
token=os.environ["X1"]
unexpected token: foo
max_tokens=512, token: 5
skip-connections-of-the-model
fw_kernel_16_threads_of_attention_backward
--max_tokens 512 --tokenizer gpt2 --token_type_ids a --token 5
unknown option --token; give --model.hf_token VALUE, --password and --token to log in
""")


def test_a_name_is_secret_by_its_words_and_similar_names_are_not():
    assert [name for name in SECRETS.split() if not is_secret(name)] == []
    assert [name for name in INNOCENT.split() if is_secret(name)] == []
    assert [name for kind in ("run", "step") for name in fields(kind) if is_secret(name)] == []


def test_text_that_looks_like_a_key_is_masked_under_any_name_and_ordinary_text_stays():
    assert masked({"notes": [f"use {key} here" for key in KEYS]}) == {"notes": ["use *** here"] * len(KEYS)}
    assert masked(ORDINARY) == ORDINARY


def test_text_around_a_secret_stays():
    for text in map(str.strip, AROUND.split("|")):
        result = masked_text(text.replace("%", "planted7value8text"))
        assert "planted" not in result
        expected = text.replace("Bearer ", "").replace("correct horse, ", "").replace("%", "***")
        assert result == expected


def test_addresses_lose_their_user_and_password():
    assert masked_text("https://me:p@ss@host:80/x?token=abc&n=1") == "https://host:80/x?token=***&n=1"
    assert masked_text("https://me:pa/ss@host/x https://token@host") == "https://host/x https://host"
    assert masked_text("at postgresql+psycopg://u:p@db/x, redis://:p@r") == "at postgresql+psycopg://db/x, redis://r"


def test_a_configuration_is_masked_by_names_and_true_false_zero_and_none_stay():
    tree = {"auth": {"user": "me", "on": True}, "loggers": [{"api_key": "x"}], "token": None, "pin": 3, "password": 42}
    result = masked(tree)
    assert result == {**tree, "auth": {"user": "***", "on": True}, "loggers": [{"api_key": "***"}], "password": "***"}
    assert to_fill_in(result) == ["auth.user", "loggers.api_key", "password"]


def test_a_command_line_is_masked_in_both_forms():
    words = ["fit", "--model.hf_token", "abc", "--db_password=x y", "--token", "--quiet", "--url=https://u:p@h/x"]
    expected = ["fit", "--model.hf_token", "***", "--db_password=***", "--token", "--quiet", "--url=https://h/x"]
    assert masked_words(words) == expected


@cases("quoted", str, repr, json.dumps, quote)
def test_values_of_the_environment_are_masked_however_they_are_quoted(quoted, monkeypatch):
    for value in ("planted/env 'value' of\n\"two\" \\ lines", "correct horse battery"):
        monkeypatch.setenv("TEAM_API_KEY", value)
        assert masked_message(f"no {quoted(value)}!").replace("'", "").replace('"', "") == "no ***!"
    # A short word stays, although it is the value of a variable with a secret's name.
    monkeypatch.setenv("DESKTOP_SESSION", "ubuntu")
    assert masked_message("on ubuntu") == "on ubuntu"


def test_a_part_of_a_secret_of_several_lines_is_masked_and_so_is_the_secret_on_one_line(monkeypatch):
    secret = "planted-first\n  planted second line\nend\nplanted-third"
    monkeypatch.setenv("TEAM_API_KEY", secret)
    for text in (secret, secret.replace("\n", "\n    "), " ".join(secret.split()), repr(secret)):
        assert "planted" not in masked_message(f"401 for {text}: stop")
    assert masked_message("bad literal: 'planted second line'") == "bad literal: '***'"
    assert masked_message("the end") == "the end"


def seconds(text):
    began = time.process_time()
    masked_text(text)
    return time.process_time() - began


#: Pieces of text that, repeated, made some pattern look at all of the rest again for each of them.
REPEATED = "x= a- a. x=( token: --token= a:// a://b: https:// SG. eyJa. ab- x='"


@cases("piece", *REPEATED.split())
def test_masking_takes_time_in_proportion_to_the_text(piece):
    short, long = (min(seconds(piece * (size // len(piece)) + "1") for _ in range(3)) for size in (8_000, 64_000))
    assert long < 24 * short


def test_a_longer_text_is_cut_after_its_secrets_were_masked():
    key = f"hf_{_LETTERS[:34]}"
    text = masked_text(f"{key} " * 20_000)
    assert text.endswith("... (760,000 characters)")
    assert "hf_" not in text
    assert len(text) < 100_000


MODULE = """
import os

import torch
from lightning.pytorch import LightningModule

class Net(LightningModule):
    def __init__(self, hf_token: str, api_key: int = 0, fails: bool = False):
        super().__init__()
        self.save_hyperparameters()
        assert self.hparams.hf_token == "planted-token"
        self.layer = torch.nn.Linear(8, 1)
        if fails:
            from_environment = {"key": os.environ["TEAM_API_KEY"]}
            print(from_environment)
            raise RuntimeError(f"401 for {hf_token} at https://me:planted-pw@host, {from_environment}")

    def describe(self):
        return {"api_key": "planted-description", "note": os.environ["TEAM_API_KEY"], os.environ["TEAM_API_KEY"]: 1}

    def training_step(self, batch, index):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)
"""


def _fit(folder, *words):
    """Exit code and printed text of a fit of the secretive module."""
    (folder / "secretive.py").write_text(MODULE)
    words = ("fit", *words, "--trainer.accelerator=cpu", "--wandb.mode=disabled", *QUICK)
    variables = {**os.environ, "TEAM_API_KEY": "planted/'variable'\\"}
    ended = warm_server.run(*words, folder=folder, variables=variables)
    return ended.returncode, ended.stdout + ended.stderr


def test_a_modules_token_is_in_no_file_and_the_replay_says_what_to_fill_in(tmp_path):
    token = ["--model", "secretive.Net", "--model.hf_token", "planted-token"]
    words = ("--model.fails=false", "--model.fails=true", "--model.api_key=planted-key")
    codes, printed = zip(*(_fit(tmp_path, *token, word) for word in words), strict=True)
    assert codes == (0, 5, 2)
    assert "model.api_key is ***; allowed: a whole number" in printed[2]
    stored = [path for path in (tmp_path / "results").rglob("*") if path.is_file()]
    assert len(stored) == 6
    # The line that the module itself prints is not masked.
    printed = [text for text in "".join(printed).split("\n") if not text.startswith("{'key'")]
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
def sweep(here):
    """A sweep file with secrets in its configuration, options and variables."""
    config = "model: {size: tiny, hub: {hf_token: planted-config}}\ndata: {url: 'http://u:planted@h/x'}"
    Path("base.yaml").write_text(config)
    path = here / "mine.yaml"
    path.write_text(
        "base: {config: base.yaml, model.auth: {password: planted-option}}\n"
        "matrix: {data.batch_size: [1, 2]}\n"
        "environments: {a: {variables: {GH_PAT: planted-variable, NORMAL: x}}}\n"
    )
    return path


def _begin(file):
    plan = make_plan("mine", file)
    with closing(SweepFolder(plan, Path("results/mine"), SweepProgress(plan))) as folder:
        folder.open(plan.chosen)
    return plan, folder.path


def test_a_sweeps_secrets_reach_its_processes_and_no_file(sweep):
    plan, folder = _begin(read_sweep_file(sweep)[0])
    words = plan.cells[0].words()
    assert "--model.hub.hf_token=planted-config" in words
    assert "--data.url=http://u:planted@h/x" in words
    assert '--model.auth={"password": "planted-option"}' in words
    assert plan.cells[0].environment.process_variables()["GH_PAT"] == "planted-variable"
    stored = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert len(stored) >= 3
    assert not any("planted" in text for text in stored)
    replay = new_record("x", [*words, "--measure.results_dir=mine/runs", "--measure.run_id=x"]).replay_command or ""
    assert "planted" not in replay
    # A replay does not write into the sweep's folder, which has a run of this name.
    assert "--measure." not in replay


def test_resuming_a_folder_says_which_secrets_to_fill_in_and_finds_its_cells_again(sweep, monkeypatch):
    plan, folder = _begin(read_sweep_file(sweep)[0])
    anew = {"model.auth": "{password: anew}", "model.hub.hf_token": "anew", "data.url": "http://u:anew@h/x"}
    for count in range(len(anew)):
        with usage_error("not stored in a sweep's folder"):
            make_plan("mine", read_sweep_folder(folder).changed(dict(list(anew.items())[:count])))
    file = read_sweep_folder(folder).changed(anew)
    with usage_error(r"environment a: GH_PAT is not stored .* export it"):
        make_plan("mine", file)
    monkeypatch.setenv("GH_PAT", "anew")
    again, _ = _begin(file)
    assert [cell.id for cell in again.cells] == [cell.id for cell in plan.cells]
    assert "--model.hub.hf_token=anew" in again.cells[0].words()
    assert again.cells[0].environment.process_variables()["GH_PAT"] == "anew"


def test_a_dry_run_lists_no_secret_and_a_secret_in_a_list_is_refused(sweep, monkeypatch, printed):
    for check in ("campaign.sweep.check_options", "sweep.execute.Execution.check"):
        monkeypatch.setattr(f"lmbench.{check}", lambda *_: None)
    out = printed("sweep", sweep, "--dry_run", "--model.pat", "planted-word")
    assert "planted" not in out
    assert "'--model.pat=***'" in out
    assert not Path("results").exists()
    Path("base.yaml").write_text("trainer: {logger: [{init_args: {api_key: planted-list}}]}")
    with usage_error("is a secret in a list"):
        make_plan("mine", read_sweep_file(sweep)[0])
