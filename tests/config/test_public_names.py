"""What the package offers; changing this list is a decision."""

import pointsman.config as config


def test_public_names() -> None:
    assert sorted(config.__all__) == [
        "DeploymentPlan", "PickerPlan", "PointsmanPlan", "Problem",
        "build_named", "build_policy", "json_schema", "load", "load_deployments", "load_picker",
    ]  # fmt: skip
    assert all(hasattr(config, name) for name in config.__all__)
