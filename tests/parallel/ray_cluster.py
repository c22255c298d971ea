"""Starts a Ray cluster of two local nodes, prints its address, and ends it when its input ends.

Ray forks the process that starts its nodes. A process of the tests may be too large for that:
the kernel refuses to copy what it has mapped (ENOMEM).
"""

from __future__ import annotations

import sys
from typing import Any

NODE: dict[str, Any] = {
    "num_cpus": 1,
    "object_store_memory": 100 << 20,
    "include_dashboard": False,
}


def main() -> None:
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args=NODE)
    try:
        nodes.add_node(**NODE)
        print(nodes.address, flush=True)
        sys.stdin.read()
    finally:
        nodes.shutdown()


if __name__ == "__main__":
    main()
