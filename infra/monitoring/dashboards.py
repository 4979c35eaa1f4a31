"""Grafana's dashboards as code: training, RL, data, and machines (GPUs, nodes, network).

`python -m infra.monitoring.dashboards DIRECTORY` writes them for another Grafana. Each panel is a title, a unit and
expressions; a test asks a live Prometheus for each of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from grafana_foundation_sdk.builders.common import VizLegendOptions
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.builders.prometheus import Dataquery
from grafana_foundation_sdk.builders.timeseries import Panel as TimeSeries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

SOURCE = DataSourceRef(type_val="prometheus", uid="${source}")
COLUMNS, HEIGHT = 3, 8
GRID_WIDTH = 24
OF_SCALE = 'scale=~"$scale"'


@dataclass(frozen=True)
class Panel:
    """A picture; expressions by legend. `$scale` is the reader's choice."""

    title: str
    unit: str
    queries: dict[str, str]


DashboardRows = dict[str, list[Panel]]
"""Panels by the title of their row."""


def of_phase(metric: str, legend: str = "{{scale}} {{phase}}") -> dict[str, str]:
    return {legend: f"{metric}{{{OF_SCALE}}}"}


TRAINING = {
    "Progress": [
        Panel("Loss", "none", of_phase("training_loss")),
        Panel("Parts of the loss", "none", of_phase("training_loss_part", "{{phase}} {{part}}")),
        Panel("Held-out bits per byte", "none", of_phase("training_validation_bits_per_byte")),
        Panel("Learning rate", "none", of_phase("training_learning_rate")),
        Panel("Gradient norm", "none", of_phase("training_gradient_norm")),
        Panel("Share of the budget spent", "percentunit", of_phase("training_progress_ratio")),
        Panel("Steps", "none", of_phase("training_steps_total")),
        Panel(
            "Spikes",
            "none",
            {
                **of_phase("training_spikes_total", "{{phase}} spiked"),
                **of_phase("training_nonfinite_steps_total", "{{phase}} no number"),
                **of_phase("training_skipped_steps_total", "{{phase}} passed over"),
            },
        ),
        Panel("Jobs that are not committed", "none", of_phase("job_state", "{{stage}} {{state}}")),
    ],
    "Experts": [
        Panel("Balance (coefficient of variation)", "none", of_phase("glm46:expert_balance_cv:max")),
        Panel("Fullest expert, times the mean", "none", of_phase("training_expert_load", "{{phase}} layer {{layer}}")),
        Panel("Dead experts", "none", of_phase("training_dead_experts", "{{phase}} layer {{layer}}")),
    ],
    "Speed": [
        Panel("Tokens per second", "none", of_phase("training_tokens_per_second")),
        Panel("MFU", "percentunit", of_phase("training_mfu")),
        Panel("Peak memory of rank 0", "bytes", of_phase("training_memory_bytes")),
        Panel("Waits for data", "percentunit", of_phase("glm46:training_data_wait:ratio_rate10m")),
        Panel("Seconds in optimizer and pauses", "s", {
            **of_phase("training_optimizer_seconds_total", "{{phase}} optimizer"),
            **of_phase("training_pause_seconds_total", "{{phase}} pauses"),
        }),
        Panel("Effective training time", "percentunit", of_phase("training_effective_ratio")),
        Panel("Wall time by part", "s", of_phase("training_seconds", "{{phase}} {{part}}")),
        Panel("Waited in the queue", "s", of_phase("job_queue_seconds", "{{stage}}")),
    ],
    "Checkpoints": [
        Panel("Age of the newest checkpoint", "s", of_phase("glm46:training_checkpoint_age:seconds")),
        Panel("Steps since the newest checkpoint", "none", of_phase("glm46:training_unsaved:steps")),
    ],
}  # fmt: skip
RL = {
    "Reward": [
        Panel("Reward", "none", of_phase("training_reward")),
        Panel("Standard deviation of rewards", "none", of_phase("training_reward_deviation")),
        Panel("Verified answers", "percentunit", of_phase("training_pass_rate")),
        Panel("Groups with unequal rewards", "none", of_phase("training_informative_groups")),
    ],
    "Policy": [
        Panel("KL divergence", "none", of_phase("training_kl", "{{phase}} against {{against}}")),
        Panel("Entropy, estimated", "none", of_phase("training_entropy_estimate")),
        Panel("Clipped tokens", "percentunit", of_phase("training_clip_fraction")),
        Panel("Gradient norm", "none", {"{{phase}}": f"training_gradient_norm{{{OF_SCALE}}} and training_reward"}),
    ],
    "Sampling": [
        Panel("Sampled tokens per second", "none", of_phase("training_rollout_tokens_per_second")),
        Panel("Tokens of an answer", "none", of_phase("training_answer_tokens")),
        Panel("Seconds of a step", "s", of_phase("training_step_seconds", "{{phase}} {{part}}")),
    ],
}
DATA = {
    "Stages": [
        Panel("Seconds", "s", of_phase("stage_seconds", "{{stage}}")),
        Panel("Rows per second", "none", of_phase("stage_rows_per_second", "{{stage}}")),
        Panel("Rows", "none", of_phase("stage_rows", "{{stage}}")),
        Panel("Bytes read", "bytes", of_phase("stage_read_bytes", "{{stage}}")),
        Panel("Bytes written", "bytes", of_phase("stage_written_bytes", "{{stage}}")),
        Panel("Seconds of all stages", "s", of_phase("glm46:stage_seconds:sum", "{{scale}}")),
    ],
    "Verdicts": [
        Panel("Gates (1 accepted, 0 refused)", "none", of_phase("gate_accepted", "{{stage}}")),
        Panel("Evaluation", "none", of_phase("evaluation_figure", "{{phase}} {{figure}}")),
        Panel("Ends of the intervals", "none", {
            **of_phase("evaluation_low", "{{phase}} {{figure}} low"),
            **of_phase("evaluation_high", "{{phase}} {{figure}} high"),
        }),
    ],
}  # fmt: skip
MACHINES = {
    "GPUs": [
        Panel("Utilisation", "percent", {"{{instance}} {{gpu}}": "DCGM_FI_DEV_GPU_UTIL"}),
        Panel("Memory used", "percentunit", {"{{instance}} {{gpu}}": "glm46:gpu_memory:ratio"}),
        Panel("Temperature", "celsius", {"{{instance}} {{gpu}}": "DCGM_FI_DEV_GPU_TEMP"}),
        Panel("Power", "watt", {"{{instance}} {{gpu}}": "DCGM_FI_DEV_POWER_USAGE"}),
        Panel("Errors (XID)", "none", {"{{instance}} {{gpu}}": "DCGM_FI_DEV_XID_ERRORS"}),
    ],
    "Nodes": [
        Panel("Processors busy", "percentunit", {
            "{{instance}}": '1 - avg by (instance) (rate(node_cpu_seconds_total{mode="idle"}[5m]))'
        }),
        Panel("Memory available", "bytes", {"{{instance}}": "node_memory_MemAvailable_bytes"}),
        Panel("Disks busy", "percentunit", {"{{instance}} {{device}}": "rate(node_disk_io_time_seconds_total[5m])"}),
        Panel("Free space", "bytes", {"{{instance}} {{mountpoint}}": 'node_filesystem_avail_bytes{fstype!="tmpfs"}'}),
    ],
    "Network": [
        Panel("Received", "Bps", {"{{instance}} {{device}}": "rate(node_network_receive_bytes_total[5m])"}),
        Panel("Sent", "Bps", {"{{instance}} {{device}}": "rate(node_network_transmit_bytes_total[5m])"}),
        Panel("InfiniBand received", "Bps", {
            "{{instance}} {{device}}": "rate(node_infiniband_port_data_received_bytes_total[5m])"
        }),
        Panel("NCCL bus bandwidth, GB/s", "none", {"{{test}} {{size_bytes}} bytes": "nccl_busbw_gbps"}),
        Panel("NCCL bandwidth, GB/s", "none", {"{{test}} {{size_bytes}} bytes": "nccl_bandwidth_gbps"}),
        Panel("All-reduce", "ms", {"{{test}} {{size_bytes}} bytes": "nccl_allreduce_time_ms"}),
    ],
}  # fmt: skip
DASHBOARDS = {"training": TRAINING, "rl": RL, "data": DATA, "machines": MACHINES}


def dashboard_json(name: str) -> str:
    """The file of one of DASHBOARDS."""
    return board_json(name, DASHBOARDS[name])


def board_json(name: str, rows: DashboardRows) -> str:
    """The file that Grafana reads. It asks for its data source, and for scales where it shows any."""
    board = Dashboard(f"glm46 {name}").uid(f"glm46-{name}").tags(["glm46"]).refresh("15s").time("now-1h", "now")
    board = board.readonly().with_variable(DatasourceVariable("source").label("Prometheus").type("prometheus"))
    if OF_SCALE in "".join(expressions_of(rows)):
        scales = QueryVariable("scale").label("Scale").datasource(SOURCE).query("label_values(stage_seconds, scale)")
        scales = scales.refresh(VariableRefresh.ON_TIME_RANGE_CHANGED).include_all(True).multi(True).all_value(".*")
        board = board.with_variable(scales)
    for row, panels in rows.items():
        board = board.with_row(Row(row))
        for panel in panels:
            board = board.with_panel(_drawn(panel))
    return json.dumps(board.build(), cls=JSONEncoder, sort_keys=True, indent=1)


def expressions(name: str) -> list[str]:
    """Every expression of one of DASHBOARDS."""
    return expressions_of(DASHBOARDS[name])


def expressions_of(rows: DashboardRows) -> list[str]:
    """Every expression of a dashboard."""
    return [expression for panels in rows.values() for panel in panels for expression in panel.queries.values()]


def _drawn(panel: Panel) -> TimeSeries:
    drawn = TimeSeries().title(panel.title).unit(panel.unit).datasource(SOURCE)
    legend = VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM).show_legend(True)
    drawn = drawn.span(GRID_WIDTH // COLUMNS).height(HEIGHT).legend(legend)
    for number, (legend, expression) in enumerate(panel.queries.items()):
        query = Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number)).datasource(SOURCE)
        drawn = drawn.with_target(query)
    return drawn


if __name__ == "__main__":
    for each in DASHBOARDS:
        Path(sys.argv[1], f"{each}.json").write_text(dashboard_json(each))
