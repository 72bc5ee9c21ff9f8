"""Configuration: YAML enters; plans leave, with everything built and nothing running.

The one rule: all or nothing. All problems of a file are reported at once, with their lines, and nothing in a bad file
is applied. `load` takes a file (`Path`), or text (`str`) and the folder that paths in the text are relative to. The
module `schema` has the documents; the module `registry` has the names.
"""

from pointsman.config.application import load_application
from pointsman.config.deployments import endpoint_engine, load_endpoints
from pointsman.config.json_schema import json_schema
from pointsman.config.loading import build_named, build_policy, load, load_manifest, load_picker
from pointsman.config.plan import ApplicationPlan, DeploymentPlan, PickerPlan, PointsmanPlan
from pointsman.config.problems import ConfigWarning, Problem

__all__ = [
    "load", "load_picker", "load_manifest", "load_application", "load_endpoints",
    "build_policy", "build_named", "endpoint_engine",
    "PickerPlan", "DeploymentPlan", "ApplicationPlan", "PointsmanPlan",
    "Problem", "ConfigWarning", "json_schema",
]  # fmt: skip
