"""A tensor's memory without a claim to it: whose allocator takes it back may give it to others.

So a graph's outputs are read where every replay writes them, while the pool has their memory for
the graphs that are captured later. The graph keeps the pool, and the pool its memory.
"""

from __future__ import annotations

import torch


class _Memory:
    """What torch makes a tensor of that does not own its memory: CUDA's array interface, as bytes,
    since that knows no bfloat16."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
        }


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers at the same place, contiguous as they must be; off CUDA `tensor` itself."""
    if not tensor.is_cuda:
        return tensor
    assert tensor.is_contiguous()
    memory = torch.as_tensor(_Memory(tensor), device=tensor.device)
    assert memory.data_ptr() == tensor.data_ptr(), "torch has copied it"
    return memory.view(tensor.dtype).view(tensor.shape)
