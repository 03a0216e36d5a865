"""A side for tests of the benchmark's worker: it prints, fails in one row and lacks others."""

from __future__ import annotations

import os

from helicore.bench.kv_workload import Round, Workload


def version() -> str:
    print("a package greets on standard output")
    os.system("echo so does its child")
    return "1.2"


def steady(work: Workload) -> Round:
    print("preparing")
    return lambda: [0.5, 0.25, float(work.batch)]


def broken(work: Workload) -> Round:
    raise RuntimeError(f"no room for {work.batch} sequences")


def breaks_later(work: Workload) -> Round:
    def round_() -> list[float]:
        raise RuntimeError("lost its way")

    return round_


def dies(work: Workload) -> Round:
    os._exit(3)


ROWS = {"steady": steady, "broken": broken, "breaks_later": breaks_later, "dies": dies}
