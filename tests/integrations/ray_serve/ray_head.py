"""`python ray_head.py FOLDER PORT`: a Ray cluster with Serve, until its standard input ends. Prints its address."""

import sys

import ray
from ray import serve


def main() -> None:
    folder, port = sys.argv[1], int(sys.argv[2])
    started = ray.init(
        _node_ip_address="127.0.0.2",
        num_cpus=64,  # every replica asks for some; they share those that there are
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        _temp_dir=folder,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print(started.address_info["address"], flush=True)
        sys.stdin.read()
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
