"""What the controller shows to Prometheus; docs/metrics.md defines each."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram
from vllm.v1.metrics.buckets import TIME_TO_FIRST_TOKEN_BUCKETS

from server.adaptive.controller import REASONS, Decision, Status


class AdaptiveMetrics:
    """Level, backlog, decisions by reason, and times as predicted and as measured."""

    def __init__(self, model_name: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            # Every process sees the same load; the last one to look is right.
            made = Gauge(name, text, ["model_name"], multiprocess_mode="mostrecent")
            return made.labels(model_name)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(
                name, text, ["model_name"], buckets=TIME_TO_FIRST_TOKEN_BUCKETS
            ).labels(model_name)

        self._level = gauge(
            "msdg_retention_level", "Retention that images get which leave it to the server."
        )
        self._backlog = gauge(
            "msdg_backlog_seconds", "Work that the engine was sent and has not finished."
        )
        decisions = Counter(
            "msdg_retention_decisions",
            "Images whose retention the server chose, by the reason.",
            ["model_name", "reason"],
        )
        self._decisions = {reason: decisions.labels(model_name, reason) for reason in REASONS}
        self._predicted = histogram(
            "msdg_predicted_time_to_first_token_seconds",
            "Time to first token that was predicted for requests whose retention was chosen.",
        )
        self._measured = histogram(
            "msdg_measured_time_to_first_token_seconds",
            "Time from that choice to the first token.",
        )

    def count(self, decision: Decision) -> None:
        """Count the images of a decided request."""
        for reason in decision.reasons:
            self._decisions[reason].inc()

    def observe(self, decision: Decision, now: float) -> None:
        """Add the times of a request that has its first token."""
        if decision.retentions:
            self._predicted.observe(decision.reservation.predicted)
            self._measured.observe(now - decision.reservation.sent)

    def show(self, status: Status) -> None:
        """Set the gauges."""
        self._level.set(status.level)
        self._backlog.set(status.backlog_seconds)
