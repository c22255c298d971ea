"""Sums over the ranks of one host, and rows that engines of one GPU each exchange: right, and
microseconds by rows and kind. Each rank is a process."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import distributed

from asyncllm.graphs.pool import GraphPool
from asyncllm.kernels import all_reduce as sums_kernel
from asyncllm.kernels.records import Norm
from asyncllm.mesh_config import MeshConfig
from asyncllm.models.parallel.collectives import CollectiveMesh
from asyncllm.models.parallel.stores import find_store, open_store

SUM_SIZE = 4096
SUM_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
MOST = max(SUM_ROWS) * SUM_SIZE * 2  # bytes
EXCHANGED_SIZE = 2048
EXCHANGED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
TOP_K = 8
SUM_CALLS = 64  # of a captured graph: as many as an 8B model's decode step has
REPLAYS = 20


def run_sums(num_ranks: int) -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    named = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    ranks = []
    for rank in range(num_ranks):
        order = [named[rank], *(each for place, each in enumerate(named) if place != rank)]
        own = {**os.environ, "CUDA_VISIBLE_DEVICES": ",".join(order)}
        command = [sys.executable, __file__, str(rank), str(num_ranks), str(port)]
        ranks.append(subprocess.Popen(command, env=own))
    return max(abs(each.wait()) for each in ranks)


def sums_of_rank(rank: int, num_ranks: int, port: int) -> None:
    """In a process: compare and time; rank 0 prints. Ours also beyond the rows that it is for."""
    device = torch.device("cuda")
    if rank == 0:
        store = open_store(num_ranks, socket.create_server(("127.0.0.1", port)))
    else:
        store = wait_for_store(num_ranks, port)
    most = [
        sizes[num_ranks] for sizes in (sums_kernel.MOST_IN_ONE_SHOT, sums_kernel.MOST_IN_TWO_SHOTS)
    ]
    sums_kernel.MOST_IN_ONE_SHOT[num_ranks] = sums_kernel.MOST_IN_TWO_SHOTS[num_ranks] = MOST
    mesh = CollectiveMesh(MeshConfig(tp=num_ranks, rank=rank), store, "127.0.0.1", device, SUM_SIZE)
    assert mesh.sums is not None, "the ranks do not reach each other's memory"
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):
        print_table(
            rank,
            f"{torch.cuda.get_device_name()}; bf16 rows of {SUM_SIZE}; at most {most} bytes",
            ("rows", "NCCL, us", "and norm", "one shot", "and norm", "two shots", "and norm"),
            ((rows, sums_of_rows(mesh, num_ranks, rank, rows)) for rows in SUM_ROWS),
        )
        sums_kernel.MOST_GATHERED[num_ranks] = max(EXCHANGED_ROWS)
        config = MeshConfig(dp=num_ranks, engine=rank)
        engines = distributed.distributed_c10d.PrefixStore("engines", store)
        shared = CollectiveMesh(config, None, "127.0.0.1", device, EXCHANGED_SIZE, engines)
        assert shared.rows is not None
        print_table(
            rank,
            f"Rows of {EXCHANGED_SIZE}, experts and gates, of engines that share experts",
            ("rows of each", "gathered by NCCL, us", "ours", "scattered by NCCL", "ours"),
            ((n, exchange_of_rows(shared, num_ranks, rank, n)) for n in EXCHANGED_ROWS),
        )
    mesh.close()
    os._exit(0)


def print_table(
    rank: int, title: str, columns: Sequence[str], us: Iterable[tuple[int, Sequence[str]]]
) -> None:
    """By rank 0, a row at a time; all ranks measure."""
    lines = (f"| {' | '.join((str(rows), *each))} |" for rows, each in us)
    head = title, f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"
    for line in itertools.chain(head, lines):
        if rank == 0:
            print(line, flush=True)


def sums_of_rows(mesh: CollectiveMesh, num_ranks: int, rank: int, rows: int) -> list[str]:
    from asyncllm.kernels.all_reduce.kernel import all_reduce
    from asyncllm.kernels.rms_norm.kernel import add_rms_norm

    torch.manual_seed(rows)
    every = torch.randn(num_ranks, rows, SUM_SIZE, device="cuda", dtype=torch.bfloat16)
    norm = Norm(torch.ones(SUM_SIZE, dtype=torch.bfloat16, device="cuda"), 1e-5)
    x, residual = every[rank].clone(), torch.zeros_like(every[0])

    def by_nccl() -> torch.Tensor:
        own, mesh.sums = mesh.sums, None
        try:
            return mesh.reduce(x)
        finally:
            mesh.sums = own

    us = [captured_us(by_nccl), captured_us(lambda: add_rms_norm(by_nccl(), residual, norm))]
    assert mesh.sums is not None
    for max_rows, sums in mesh.sums.forms:
        if rows > max_rows:
            continue
        for _ in range(5):
            found = every[rank].clone()
            all_reduce(found, sums)
            assert (found.float() - every.float().sum(0)).abs().max() < 0.06, (rank, rows)
        us.append(captured_us(lambda form=sums: all_reduce(x, form)))
        us.append(captured_us(lambda form=sums: add_rms_norm(x, residual, norm, form)))
    return [f"{each:.1f}" for each in us]


def exchange_of_rows(mesh: CollectiveMesh, num_ranks: int, rank: int, rows: int) -> list[str]:
    torch.manual_seed(rows)
    every = torch.randn(num_ranks, rows, EXCHANGED_SIZE, device="cuda", dtype=torch.bfloat16)
    gates = torch.rand(num_ranks, rows, TOP_K, device="cuda")
    ids = (gates * 100).int()
    parts = torch.randn(num_ranks * rows, EXCHANGED_SIZE, device="cuda", dtype=torch.bfloat16)
    own, memory, us = (every[rank], ids[rank], gates[rank]), mesh.rows, []
    by_nccl: list[torch.Tensor] = []
    for which in (None, memory):
        mesh.rows = which
        for _ in range(5):
            found = mesh.gather_rows(*own)
            for ours, expected in zip(found, (every, ids, gates), strict=True):
                assert torch.equal(ours, expected.flatten(0, 1)), (rank, rows)
        by_nccl.append(mesh.sum_rows(parts))
        us.append((captured_us(lambda: mesh.gather_rows(*own)),
                   captured_us(lambda: mesh.sum_rows(parts))))  # fmt: skip
    torch.testing.assert_close(by_nccl[0], by_nccl[1], atol=0.06, rtol=0.02)
    return [f"{pair[kind]:.1f}" for kind in (0, 1) for pair in us]


def captured_us(run: Any) -> float:
    def many() -> tuple[()]:
        for _ in range(SUM_CALLS):
            run()
        return ()

    recorded = GraphPool().record(many)
    recorded.replay()
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        recorded.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / REPLAYS / SUM_CALLS


def wait_for_store(num_ranks: int, port: int) -> Any:
    for _ in range(600):
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return find_store(num_ranks, "127.0.0.1", port)
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("rank 0 does not listen")


if __name__ == "__main__":
    sums_of_rank(*map(int, sys.argv[1:]))
