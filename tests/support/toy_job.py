"""A job for the launcher's tests: `python -m tests.support.toy_job WORK_DIR DEED`, once per rank."""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    work_dir, deed, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
    with open(work_dir / f"started-{rank}", "a") as file:
        file.write(
            f"{os.getpid()} {os.environ['GLM46_FENCING']} {os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}\n"
        )
    if deed.startswith("say "):
        name = deed.removeprefix("say ")
        print(" ".join(os.environ) if name == "all" else os.environ[name])
        return 0
    if deed == "fail" and rank == "1":
        print("the reason why", file=sys.stderr)
        return 7
    if deed == "lose a rank":
        lose_a_rank()
    if deed == "stop on request":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(os.EX_TEMPFAIL))
    if deed == "fill memory":
        bytearray(3 << 30)
    if deed != "succeed":
        time.sleep(600)
    return 0


def lose_a_rank() -> None:
    """Rank 1 dies inside a step; rank 0 waits for it in a collective, whose error is not the cause."""
    import torch
    import torch.distributed as dist

    store = dist.FileStore(os.environ["GLM46_RENDEZVOUS"], int(os.environ["WORLD_SIZE"]))
    dist.init_process_group("gloo", store=store, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    dist.barrier()
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    sys.exit(main())
