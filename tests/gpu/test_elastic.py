"""Elastic jobs on real devices: NCCL connects the ranks again after every change."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

import sparkhvd
from tests.gpu.devices import needs_gpu

pytestmark = [needs_gpu, pytest.mark.timeout(200)]

STEPS = 40


def train(folder):
    import torch  # noqa: PLC0415

    import sparkhvd.torch as hvd  # noqa: PLC0415
    from sparkhvd.comm import session  # noqa: PLC0415
    from tests.gpu.devices import take_device  # noqa: PLC0415

    hvd.init()
    take_device()
    weight = torch.nn.Parameter(torch.zeros(1000, device="cuda"))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0, momentum=0.5))
    model = torch.nn.ParameterList([weight])
    state = hvd.elastic.TorchState(model, optimizer, step=0, sizes=())

    @hvd.elastic.run
    def loop(state):
        take_device()
        state.sizes = (*state.sizes, hvd.size())
        while state.step < STEPS:
            if state.step == 10 and hvd.rank() == 1:
                try:
                    Path(folder, "killed").touch(exist_ok=False)
                except FileExistsError:
                    pass
                else:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            state.step += 1
            state.commit()
        return weight.detach().cpu().tolist(), state.sizes, session.current().counters()["on_device"]

    return loop(state)


def test_the_survivors_of_a_killed_rank_continue_with_nccl(tmp_path):
    results = sparkhvd.run_elastic(
        train,
        (str(tmp_path),),
        num_proc=3,
        min_num_proc=1,
        launcher="local",
        env={"SPARKHVD_GPU_OPERATIONS": "nccl"},
        verbose=0,
    )
    expected = momentum = 0.0
    for _ in range(STEPS):
        momentum = 0.5 * momentum + 1.0
        expected -= momentum
    for weights, sizes, on_device in results:
        assert weights == [pytest.approx(expected)] * 1000
        assert sizes[0] == 3
        assert len(sizes) > 1
        assert on_device > 0
