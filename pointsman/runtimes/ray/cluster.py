"""The only module that uses Ray: connecting, nodes, actors, and bookings with Ray's scheduler.

Everything that may wait for Ray is called on a thread; calls of actors are awaited on the event loop.
"""

import asyncio
import logging
import os
from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from pointsman.errors import NotStored, PointsmanError
from pointsman.parameters import quantity
from pointsman.placement.asks import Claim, Place
from pointsman.placement.gpu_models import known_gpu
from pointsman.reasons import Reason
from pointsman.runtimes.ray.keeper import Keeper
from pointsman.runtimes.ray.node import NodeAgent
from pointsman.types import Gpu, Worker

HEALTH_CHECKS = {
    "RAY_health_check_initial_delay_ms": "500",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""Settings of a cluster that we start: a killed node is noticed after 1.3 s, a frozen one after 4.4 s. See
docs/ray.md."""
PRIORITY = {"RAY_worker_niceness": "0"}
"""Settings of each node that we start. By default, Ray gives its workers, and so our engines, a niceness of 15."""
LOOPBACK = "127.0.0.1"
"""The address of a cluster that we start."""
LOOPBACK_ONLY = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""If 0, Ray listens on loopback only. Otherwise it takes 127.0.0.1 for the machine's address, and listens on all."""
OBJECT_STORE_BYTES = 80 * 2**20
"""Size of the object store of a cluster that we start. It is small, because values do not go through Ray."""
STOP_GRACE_S = 1.0
"""Time from SIGTERM to SIGKILL when the lease of a node is over."""
BOOKED_S = 5.0
"""Time limit for Ray to book what an instance uses."""
SAVED_S = 2.0
GPU_MEMORY_LABEL = "pointsman.io/gpu-memory"
"""A label for the GPU memory of a Ray node whose GPUs no driver describes, such as 24Gi."""
BOOKING = "pointsman-"


class RaySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a plane uses a cluster."""

    address: str = ""
    """host:port of the head; if empty, a cluster is started on this machine, and ended with the plane."""
    host: str = ""
    """The address of this machine in the cluster; if empty, the address that Ray finds."""
    namespace: str = "pointsman"
    """The namespace, which has only one plane."""
    storage: str = ""
    """A folder that all nodes reach, for the state; if empty, the state is lost with the node that holds it."""
    lease_s: float = 3.0
    """A node that receives nothing from the plane for this long ends its engines."""
    orphan_grace_s: float = 60.0
    """How long engines keep running without a plane."""
    node_state: str = "~/.local/state/pointsman/nodes"
    """The folder of sockets and logs, on each node."""


class NoAnswer(PointsmanError):
    """Ray, or an actor, cannot be reached."""


class Late(NoAnswer):
    """An actor has not answered in time. It may still exist."""


async def called(method: Any, *args: Any, limit_s: float) -> Any:
    """The answer of an actor. Raises `NoAnswer`, or what the method raised."""
    try:
        async with asyncio.timeout(limit_s):
            return await method.remote(*args)
    except TimeoutError:
        raise Late(f"no answer within {limit_s:g} s") from None
    except Exception as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, PointsmanError | OSError):
            raise cause from None
        raise NoAnswer(_first_line(error)) from error


class NotBooked(PointsmanError):
    """Ray has not booked what an instance uses: other jobs use it."""


class RayNode(msgspec.Struct, frozen=True):
    """A live node of the cluster."""

    id: str
    name: str
    host: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def worker(self, seen: Worker) -> Worker:
        """The worker. Ray reports the number of its GPUs, and drivers report the properties of these GPUs."""
        number = int(self.resources.get("GPU", 0))
        labels = {name: value for name, value in self.labels.items() if name != "ray.io/node-id"}
        cpus = self.resources.get("CPU", 0.0)
        gpus = seen.gpus[:number] if len(seen.gpus) >= number else self._undetected(number)
        return msgspec.structs.replace(seen, name=self.name, cpus=cpus, gpus=gpus, labels=labels)

    def _undetected(self, number: int) -> tuple[Gpu, ...]:
        kind = next((one.partition(":")[2] for one in self.resources if one.startswith("accelerator_type:")), "")
        known = known_gpu(kind) if kind else None
        size = quantity(self.labels[GPU_MEMORY_LABEL]) if GPU_MEMORY_LABEL in self.labels else 0
        size = size or (0 if known is None else known.memory_bytes)
        return tuple(Gpu(index=index, memory_bytes=size, model=kind) for index in range(number)) if size else ()

    def problem(self, seen: Worker) -> Reason | None:
        """The GPUs that cannot be used; None if all GPUs can be used."""
        number = int(self.resources.get("GPU", 0))
        if len(self.worker(seen).gpus) >= number:
            return None
        return Reason("ray-gpus-unknown", {"worker": self.name, "gpus": number, "label": GPU_MEMORY_LABEL})


class RayCluster:
    """A connection to Ray. Call `connect` before any other method."""

    def __init__(self, settings: RaySettings) -> None:
        self.settings = settings
        self.address = settings.address
        self.host = ""
        """The id of the node that the plane runs on."""
        self.bookings = Bookings()
        self._ray: Any = None
        self._constants: Any = None
        self._is_ours = not settings.address
        self._is_of_program = False
        """Whether the program that this plane runs in had connected to Ray before."""
        self._keeper: Any = None

    async def connect(self) -> None:
        """Join the cluster; without an address, start one on this machine. Raises `PointsmanError`."""
        try:
            import ray
            from ray._private import ray_constants
        except ImportError as error:
            raise PointsmanError(
                f"the Ray runtime needs packages that are not installed ({error.name}); "
                "run: pip install 'pointsman[ray]'"
            ) from error
        self._ray, self._constants = ray, ray_constants
        try:
            await asyncio.to_thread(self._init)
        except Exception as error:  # many kinds of exceptions
            where = self.settings.address or "on this machine"
            raise PointsmanError(f"no Ray cluster can be used at {where}: {_first_line(error)}") from error

    def _init(self) -> None:
        if self._ray.is_initialized():  # a process has only one connection
            context = self._ray.get_runtime_context()
            if self.settings.address not in ("", context.gcs_address):
                raise PointsmanError(f"this program is connected to another cluster, {context.gcs_address}")
            self._is_of_program, self._is_ours = True, False
            self.address, self.host = context.gcs_address, self._ray.util.get_node_ip_address()
            return
        settings: dict[str, Any] = {"address": self.settings.address}
        if self._is_ours:
            for name, value in (HEALTH_CHECKS | PRIORITY).items():
                os.environ.setdefault(name, value)
            os.environ[LOOPBACK_ONLY], self._constants.ENABLE_RAY_CLUSTER = "0", False  # Ray read it at its import
            settings = {
                "address": "local",
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": LOOPBACK,
            }
        elif self.settings.host or self.settings.address.startswith("127."):
            settings["_node_ip_address"] = self.settings.host or self.settings.address.partition(":")[0]
        logging.getLogger("ray").setLevel(logging.ERROR)  # Ray warns about signals that the plane handles
        namespace = self.settings.namespace
        context = self._ray.init(namespace=namespace, log_to_driver=False, configure_logging=False, **settings)
        self.address = context.address_info["gcs_address"]
        self.host = context.address_info["node_ip_address"]

    async def disconnect(self) -> None:
        if self._ray is not None and not self._is_of_program:
            await asyncio.to_thread(self._ray.shutdown)

    # Nodes

    async def nodes(self) -> list[RayNode]:
        """The nodes that Ray reports as alive. Raises `NoAnswer`."""
        try:
            found = await asyncio.to_thread(self._ray.nodes)
        except Exception as error:  # many kinds of exceptions
            raise NoAnswer(_first_line(error)) from error
        return [
            RayNode(
                one["NodeID"], one["NodeName"], one["NodeManagerAddress"], one["Resources"], one.get("Labels") or {}
            )
            for one in found
            if one["Alive"]
        ]

    def agent(self, node: RayNode) -> Any:
        """The actor of a node. It is created if it does not exist."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        folder = f"{self.settings.node_state}/{self.settings.namespace}/{node.name}"
        return self._actor(NodeAgent, f"node-{node.name}", NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            node.name, folder, node.host, STOP_GRACE_S
        )

    async def keeper(self) -> Any:
        """The actor that keeps the state. If it does not exist, it is created, if possible on the node of the plane."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        here = next((one.id for one in await self.nodes() if one.host == self.host), None)
        pinned = None if here is None else NodeAffinitySchedulingStrategy(here, soft=True)
        settings = self.settings
        made = self._actor(Keeper, "keeper", pinned, max_restarts=-1)
        terms = settings.orphan_grace_s, settings.lease_s, STOP_GRACE_S
        self._keeper = made.remote(settings.storage, *terms, settings.namespace)
        return self._keeper

    def _actor(self, kind: type, name: str, pinned: Any, **more: Any) -> Any:
        return self._ray.remote(kind).options(
            name=name,
            namespace=self.settings.namespace,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            num_gpus=0,
            scheduling_strategy=pinned,
            **more,
        )

    async def end(self, actor: Any) -> None:
        """Kill an actor."""
        await asyncio.to_thread(self._ray.kill, actor)

    def save_now(self, epoch: int, number: int, image: bytes) -> None:
        """Wait until the keeper has an image of the store. Raises `NotStored`."""
        try:
            self._ray.get(self._keeper.save.remote(epoch, number, image), timeout=SAVED_S)
        except Exception as error:  # an exception of Ray, or of the storage
            raise NotStored(f"nothing was changed, because the state cannot be stored: {_first_line(error)}") from error


class Bookings:
    """Bookings with Ray, so that other jobs do not use the same resources: a placement group per placed instance."""

    async def book(self, instance_id: str, place: Place, nodes: Mapping[str, RayNode]) -> None:
        """Book the resources of workers that an instance uses. Raises `NotBooked`."""
        await asyncio.to_thread(_book, instance_id, place, nodes)

    async def free(self, instance_id: str) -> None:
        """Release a booking."""
        await asyncio.to_thread(_free, instance_id)

    async def keep(self, instance_ids: Collection[str]) -> None:
        """Release the bookings of all other instances, even those of a plane that was killed before it started one."""
        await asyncio.to_thread(_keep, instance_ids)


def _book(instance_id: str, place: Place, nodes: Mapping[str, RayNode]) -> None:
    from ray.util.placement_group import placement_group, placement_group_table

    bundles = [bundle(place, nodes[worker]) for worker in place.workers]
    _free(instance_id)
    group = placement_group(bundles, strategy="PACK", name=f"{BOOKING}{instance_id}", lifetime="detached")
    if not group.wait(BOOKED_S):
        state = placement_group_table(group)["stats"]["scheduling_state"]
        _free(instance_id)
        wanted = "; ".join(f"{amount:g} {name}" for one in bundles for name, amount in one.items())
        raise NotBooked(f"Ray does not have {wanted} free ({state.lower()}): other jobs use it; see: ray status")


def _free(instance_id: str) -> None:
    from ray.util.placement_group import get_placement_group, remove_placement_group

    try:
        group = get_placement_group(f"{BOOKING}{instance_id}")
    except ValueError:  # the group does not exist
        return
    remove_placement_group(group)


def _keep(instance_ids: Collection[str]) -> None:
    from ray.util.placement_group import placement_group_table

    for one in placement_group_table().values():
        name = one["name"]
        if name.startswith(BOOKING) and one["state"] != "REMOVED" and name.removeprefix(BOOKING) not in instance_ids:
            _free(name.removeprefix(BOOKING))


def bundle(place: Place, node: RayNode) -> dict[str, float]:
    """What Ray is to book on a node: whole GPUs, or the share of one."""
    claims = [claim for claim in place.claims if claim.worker == node.name]
    shares = [_share(claim) for claim in claims if claim.gpu is not None]
    gpus = float(len(shares)) if len(shares) != 1 else min(max(round(shares[0], 4), 0.01), 1.0)
    amounts = {"GPU": gpus, "CPU": float(sum(claim.cpus for claim in claims))}
    return {f"node:{node.host}": 0.001, **{name: amount for name, amount in amounts.items() if amount}}


def _share(claim: Claim) -> float:
    if claim.exclusive or not claim.gpu_total_bytes:
        return 1.0
    return claim.gpu_share or claim.gpu_bytes / claim.gpu_total_bytes


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {lines[-1] if lines[-1] else lines[0]}"
