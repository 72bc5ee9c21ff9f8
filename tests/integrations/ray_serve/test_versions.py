"""What older versions of Ray are given in place of what they lack: they import scaling policies by their names."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.ray


def context(**facts: Any) -> Any:
    """What Serve's controller tells of a deployment; Ray 2.50 leaves out the rest."""
    config = SimpleNamespace(
        upscale_delay_s=30.0,
        downscale_delay_s=600.0,
        get_upscaling_factor=lambda: 1.0,
        get_downscaling_factor=lambda: 0.5,
        get_target_ongoing_requests=lambda: 2.0,
    )
    known = {"app_name": "app", "deployment_name": "d", "current_num_replicas": 1, "target_num_replicas": 1}
    bounds = {"capacity_adjusted_min_replicas": 1, "capacity_adjusted_max_replicas": 4, "aggregated_metrics": None}
    return SimpleNamespace(**known, **bounds, config=config, total_num_requests=8.0, **facts)


def test_a_policy_is_found_by_a_name_that_has_its_arguments() -> None:
    from pointsman.integrations.ray_serve import scaling

    name = scaling.name_of({"policy": "slo-attainment", "parameters": {"target": 0.9}, "interval_s": 0.25})
    assert name.isidentifier()
    found = pickle.loads(pickle.dumps(getattr(scaling, name)))  # as Serve sends it to its controller
    assert (found._name, found._parameters) == ("slo-attainment", {"target": 0.9})
    assert found._limits == {"time_limit_s": 0.5, "interval_s": 0.25}
    with pytest.raises(AttributeError):
        scaling.nothing  # noqa: B018 (looked up on purpose)


@pytest.mark.parametrize("serve_delays", [True, False])
def test_delays_are_ours_where_serve_applies_none(monkeypatch: pytest.MonkeyPatch, serve_delays: bool) -> None:
    from pointsman.integrations.ray_serve import scaling

    monkeypatch.setattr(scaling, "SERVE_DELAYS", serve_delays)
    limits = scaling.ServeScaling()._limits_of(context())
    assert (limits.min_replicas, limits.max_replicas) == (1, 4)
    wanted = (0.0, 0.0, 1.0) if serve_delays else (30.0, 600.0, 0.5)
    assert (limits.up_delay_s, limits.down_delay_s, limits.down_factor) == wanted
