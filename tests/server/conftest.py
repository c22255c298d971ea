"""Small models are slower on several threads, and tests share the machine."""

import os

import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # the servers that tests start as processes
