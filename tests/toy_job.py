"""A job for the launcher's tests: `python -m tests.toy_job WORK_DIR DEED`, once per rank."""

import os
import signal
import sys
import time
from pathlib import Path


def main() -> int:
    work_dir, deed, rank = Path(sys.argv[1]), sys.argv[2], os.environ["RANK"]
    with open(work_dir / f"started-{rank}", "a") as file:
        file.write(f"{os.getpid()} {os.environ['GLM46_FENCING']} {os.environ['WORLD_SIZE']} {os.environ['MASTER_PORT']}\n")
    if deed == "fail" and rank == "1":
        print("the reason why", file=sys.stderr)
        return 7
    if deed == "stop on request":
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    if deed != "succeed":
        time.sleep(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
