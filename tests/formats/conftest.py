"""Small models are slower on several threads, and tests share the machine."""

import torch

torch.set_num_threads(1)
