"""The process in which fake steps run: their changes to PyTorch cannot be undone."""

from __future__ import annotations

import multiprocessing
from functools import cache

from lmbench.fit.prediction import forecast
from lmbench.memory.fake_gpu import act_like_cuda
from lmbench.memory.forecast import Request, gpus_for


@cache
def _pool():
    return multiprocessing.get_context("fork").Pool(1, act_like_cuda)


def in_fork(work, *arguments):
    """The result of a function, called in a fork that all tests of a process share."""
    return _pool().apply(work, arguments)


def predict(*words, gpu=None, finds_largest=False):
    """The forecast for a configuration."""
    return in_fork(forecast, list(words), Request(gpus_for(gpu) if gpu else [], finds_largest))
