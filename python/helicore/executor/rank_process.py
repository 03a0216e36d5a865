"""`python -m helicore.executor.rank_process PORT RANK SIZE`: a rank that `LLM` starts."""

import sys

from helicore.executor.launch import worker_main

if __name__ == "__main__":
    worker_main(*map(int, sys.argv[1:4]))
