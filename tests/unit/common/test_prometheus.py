from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from common.errors import ConfigError
from common.prometheus import metrics_served


def test_a_taken_port_is_a_configuration_error_and_free_again_afterwards() -> None:
    registry = CollectorRegistry()
    with (
        metrics_served(registry, host="127.0.0.1", port=0) as port,
        pytest.raises(ConfigError, match=f"metrics_port: 127.0.0.1:{port} cannot be bound"),
        metrics_served(registry, host="127.0.0.1", port=port),
    ):
        pass
    with metrics_served(registry, host="127.0.0.1", port=port) as again:
        assert again == port


def test_no_port_serves_nothing() -> None:
    with metrics_served(CollectorRegistry(), host="127.0.0.1", port=None) as port:
        assert port is None
