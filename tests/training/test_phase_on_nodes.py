"""A phase as a job on two nodes, of Slurm or reached by ssh, one of which goes down in mid-phase."""

from __future__ import annotations

import threading
import time

import pytest

from infra.jobs.launchers import JobLostError
from tasks.training.state.checkpoints import latest_step
from tests.support.cluster import slurm, ssh_hosts
from tests.support.cluster.default_queue import DEFAULT_QUEUE
from tests.support.training_inputs import NUM_STEPS, RESOURCES, TrainingInputs, small_recipe

TWO_RANKS = RESOURCES.model_copy(
    update={"num_ranks": 2, "ranks_per_node": 1, "micro_batch_sequences": 1, "save_interval_steps": 1}
)
CLUSTERS = {
    "slurm": (slurm.missing_programs, slurm.slurm_cluster, "job.sbatch"),
    "ssh": (ssh_hosts.missing_programs, ssh_hosts.ssh_hosts, "ssh.json"),
}


@pytest.mark.long
@pytest.mark.parametrize("launcher", CLUSTERS)
def test_a_phase_that_loses_a_node_continues_and_has_the_digest_of_this_machine(launcher, tmp_path):
    missing_programs, start_cluster, submitted = CLUSTERS[launcher]
    if reason := missing_programs():
        pytest.skip(reason)
    recipe = small_recipe()
    here = TrainingInputs(tmp_path / "here")
    expected = here.train(here.arguments(recipe, TWO_RANKS))
    there = TrainingInputs(tmp_path / "there")
    queue = DEFAULT_QUEUE.model_copy(update={"hostfile": str(tmp_path / "ssh" / "hostfile")})
    arguments = there.arguments(recipe, TWO_RANKS.model_copy(update={"launcher": launcher, "queue": queue}))
    killed_at: list[int] = []
    with start_cluster(tmp_path / launcher) as cluster:

        def kill_after_a_checkpoint() -> None:
            while (step := latest_step(there.work_dir(arguments))) < 1:
                time.sleep(0.02)
            cluster.kill_node("node2")
            killed_at.append(step)

        killer = threading.Thread(target=kill_after_a_checkpoint)
        killer.start()
        with pytest.raises(JobLostError, match="continues from the checkpoint of step"):
            there.train(arguments)
        killer.join()
        assert killed_at[0] < NUM_STEPS
        cluster.start_node("node2")
        trained = there.train(arguments)
    assert trained.digest == expected.digest
    assert trained.path(submitted).read_text()
