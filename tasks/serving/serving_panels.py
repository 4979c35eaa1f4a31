"""What Grafana shows of a server that glm46 planned: requests and speed, from the metrics of each engine."""

from __future__ import annotations

from infra.monitoring.dashboards import DashboardRows, Panel

SECONDS_OF = "histogram_quantile(0.95, sum by (le) (rate({}_bucket[5m])))"


def _ratio(above: str, below: str) -> str:
    return f"sum(rate({above}[5m])) / sum(rate({below}[5m]))"


PANELS: dict[str, DashboardRows] = {
    "vllm": {
        "Requests": [
            Panel("Computed", "none", {"{{instance}}": "vllm:num_requests_running"}),
            Panel("Waiting", "none", {"{{instance}}": "vllm:num_requests_waiting"}),
            Panel("Cache used", "percentunit", {"{{instance}}": "vllm:kv_cache_usage_perc"}),
        ],
        "Speed": [
            Panel("First token, 95 %", "s", {"p95": SECONDS_OF.format("vllm:time_to_first_token_seconds")}),
            Panel("Between tokens, 95 %", "s", {"p95": SECONDS_OF.format("vllm:inter_token_latency_seconds")}),
            Panel("Tokens per second", "none", {"generated": "sum(rate(vllm:generation_tokens_total[5m]))"}),
        ],
    },
    "sglang": {
        "Requests": [
            Panel("Computed", "none", {"{{instance}}": "sglang:num_running_reqs"}),
            Panel("Waiting", "none", {"{{instance}}": "sglang:num_queue_reqs"}),
            Panel("Cache used", "percentunit", {"{{instance}}": "sglang:token_usage"}),
        ],
        "Speed": [
            Panel("First token, 95 %", "s", {"p95": SECONDS_OF.format("sglang:time_to_first_token_seconds")}),
            Panel("Between tokens, 95 %", "s", {"p95": SECONDS_OF.format("sglang:inter_token_latency_seconds")}),
            Panel("Tokens per second", "none", {"generated": "sum(rate(sglang:generation_tokens_total[5m]))"}),
        ],
    },
    "llamacpp": {
        "Requests": [
            Panel("Computed", "none", {"{{instance}}": "llamacpp:requests_processing"}),
            Panel("Waiting", "none", {"{{instance}}": "llamacpp:requests_deferred"}),
            Panel("Busy slots", "none", {"{{instance}}": "llamacpp:n_busy_slots_per_decode"}),
        ],
        "Speed": [
            Panel(
                "Seconds a token",
                "s",
                {
                    "of prompts": _ratio("llamacpp:prompt_seconds_total", "llamacpp:prompt_tokens_total"),
                    "generated": _ratio("llamacpp:tokens_predicted_seconds_total", "llamacpp:tokens_predicted_total"),
                },
            ),
            Panel("Prompt tokens per second", "none", {"read": "sum(rate(llamacpp:prompt_tokens_total[5m]))"}),
            Panel("Tokens per second", "none", {"generated": "sum(rate(llamacpp:tokens_predicted_total[5m]))"}),
        ],
    },
}
"""Of the engines' own metrics at /metrics, which vLLM and SGLang answer without a key."""
