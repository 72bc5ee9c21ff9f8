"""The manifest for KubeRay on the page of the Ray runtime has only fields that the operator documents, of their types.

The structs are the part of the documented `ray.io/v1` API (RayCluster), and of pods, that the manifest may use. The
operator's whole schema is larger; the manifest was not run.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
import yaml
from msgspec import Meta

from pointsman.runtimes.ray.cluster import HEALTH_CHECKS, PRIORITY

PAGE = Path(__file__).parents[2] / "docs" / "ray.md"
Count = Annotated[int, Meta(ge=0)]
Named = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class Documented(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Other fields are errors, as with a strict validation of Kubernetes."""


class Environment(Documented):
    name: str
    value: str = ""


class Mount(Documented):
    name: Named
    mount_path: str


class Resources(Documented):
    limits: dict[str, int | str] = {}
    requests: dict[str, int | str] = {}


class Container(Documented):
    name: Named
    image: str
    env: list[Environment] = []
    resources: Resources = msgspec.field(default_factory=Resources)
    volume_mounts: list[Mount] = []


class ClaimSource(Documented):
    claim_name: Named


class Volume(Documented):
    name: Named
    persistent_volume_claim: ClaimSource


class PodSpec(Documented):
    containers: Annotated[list[Container], Meta(min_length=1)]
    volumes: list[Volume] = []


class PodTemplate(Documented):
    spec: PodSpec
    metadata: dict[str, Any] = {}


class HeadGroup(Documented):
    template: PodTemplate
    ray_start_params: dict[str, str] = {}
    enable_ingress: bool = False
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = "ClusterIP"


class WorkerGroup(Documented):
    group_name: str
    template: PodTemplate
    ray_start_params: dict[str, str] = {}
    replicas: Count = 0
    min_replicas: Count = 0
    max_replicas: Count = 2**31 - 1
    idle_timeout_seconds: Count | None = None
    num_of_hosts: Count = 1


class AuthOptions(Documented):
    mode: Literal["disabled", "token"] = "token"
    secret_name: str = ""
    enable_k8s_token_auth: bool = msgspec.field(default=False, name="enableK8sTokenAuth")


class ClusterSpec(Documented):
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup] = []
    ray_version: str = ""
    auth_options: AuthOptions = msgspec.field(default_factory=AuthOptions)
    enable_in_tree_autoscaling: bool = False
    suspend: bool = False


class Metadata(Documented):
    name: Named
    labels: dict[str, str] = {}


class RayClusterManifest(Documented):
    api_version: Literal["ray.io/v1"]
    kind: Literal["RayCluster"]
    metadata: Metadata
    spec: ClusterSpec


def manifest() -> Any:
    [text] = re.findall(r"```text\n(apiVersion: ray.io/v1\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return yaml.safe_load(text)


def test_the_manifest_has_documented_fields_only() -> None:
    cluster = msgspec.convert(manifest(), RayClusterManifest)
    [head] = cluster.spec.head_group_spec.template.spec.containers
    assert {one.name: one.value for one in head.env} == HEALTH_CHECKS | PRIORITY, "as a cluster that we start ourselves"
    for group in cluster.spec.worker_group_specs:
        assert group.min_replicas <= group.replicas <= group.max_replicas
    pods = [cluster.spec.head_group_spec.template, *(group.template for group in cluster.spec.worker_group_specs)]
    for pod in (one.spec for one in pods):
        [container] = pod.containers
        assert {one.name: one.value for one in container.env}.items() >= PRIORITY.items()
        mounted = {mount.name for container in pod.containers for mount in container.volume_mounts}
        assert mounted == {volume.name for volume in pod.volumes}
        assert [container.image for container in pod.containers] == [head.image], "one version everywhere"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "headGroupSpecs"), {}),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "workerGroupSpecs", 0, "replicas"), "2"),
        (("apiVersion",), "ray.io/v1alpha1"),
    ],
    ids=["an unknown field", "a parameter that is no string", "a number as text", "another version"],
)
def test_the_check_can_fail(path: tuple[str | int, ...], value: object) -> None:
    changed = manifest()
    inside = changed
    for name in path[:-1]:
        inside = inside[name]
    inside[path[-1]] = value
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(changed, RayClusterManifest)
