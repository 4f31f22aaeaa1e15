"""A sweep's runs on a GPU are forks of a process that has imported Inductor, and each of them has the GPU.

python -m pytest -q -m gpu tests/gpu/test_gpu_sweep.py
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

FORK = """
import os, sys
from lmbench.sweep import fork_server
fork_server.import_everything()
fork_server.import_inductor()
import torch
pid = os.fork()
if not pid:
    function = torch.compile(lambda x: (x * 2).sum())
    loss = function(torch.ones(8, device="cuda", requires_grad=True))
    loss.backward()
    print("torch._inductor.compile_fx" in sys.modules, loss.item(), flush=True)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def test_a_fork_of_the_server_has_inductor_and_the_gpu():
    ended = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True 16.0\n"), ended.stderr
