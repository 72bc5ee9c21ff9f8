"""`pointsman_scaling`: our scaling policies as the policy of Serve's autoscaler.

Enters: what Serve's controller reports about a deployment, and what our routers have measured. Leaves: a number of
replicas. The one rule: nothing here blocks or raises in Serve's controller, as that would stop all its applications.
The policy runs on a thread. While the policy is late or fails, the last target holds. Bounds, delays and factors come
from the deployment's `AutoscalingConfig`. Serve applies them to the number; before Ray 2.54, our guard applies them.
"""

import base64
import logging
import threading
import time
import weakref
from collections.abc import Mapping
from math import isfinite
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray import cloudpickle
from ray.serve import autoscaling_policy
from ray.serve.config import AutoscalingPolicy

from pointsman.config.problems import Problems
from pointsman.config.scaling import Unloadable
from pointsman.config.scaling import policy as scaling_policy
from pointsman.errors import ConfigError
from pointsman.integrations.ray_serve.records import EndedRequest, records_keeper
from pointsman.scaling import ScalingPolicy, TargetOngoing, policy_name
from pointsman.scaling.deployment import Load, ReplicaCounts, SavedDeployment, ScaledDeployment, scaling_status
from pointsman.scaling.limits import ScalingLimits, ScalingPlan
from pointsman.scaling.policy import TooSlow, invoke_with_state

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

SERVES_OWN = "target-ongoing-requests"
"""Serve's default: as many replicas as its `target_ongoing_requests` needs."""
LATENCIES = ("latency_ms", "ttft_ms", "tpot_ms")
"""Metrics of `record_autoscaling_stats` that policies get in place of the gateway's metrics."""
SERVE_DELAYS = hasattr(autoscaling_policy, "_apply_default_params")
"""Whether Ray applies a deployment's delays and factors to the number from any policy (2.54 and newer)."""
NAMED = "scaling_"
"""The prefix of those attributes of this module that stand for a policy with its arguments."""


def pointsman_scaling(
    policy: Any = SERVES_OWN,
    *,
    parameters: Mapping[str, Any] | None = None,
    time_limit_s: float = ScalingLimits().time_limit_s,
    interval_s: float = ScalingLimits().interval_s,
) -> AutoscalingPolicy:
    """The `policy` of an `AutoscalingConfig`. Raises `ConfigError` with all problems.

    `policy`: a built-in name, `module:name`, a function of a view, or an object with `desired_replicas`. With a name,
    `parameters` are as in YAML. The policy is called every `interval_s`, and a call may take `time_limit_s`.
    """
    kwargs: dict[str, Any] = {"time_limit_s": time_limit_s, "interval_s": interval_s}
    if isinstance(policy, str):
        if policy != SERVES_OWN:
            _built(policy, parameters or {})
        elif parameters:
            raise ConfigError([f'"{SERVES_OWN}" has no parameters; target_ongoing_requests is in AutoscalingConfig'])
        kwargs |= {"policy": policy, "parameters": dict(parameters or {})}
    elif callable(policy) or isinstance(policy, ScalingPolicy):
        if parameters:
            raise ConfigError([f"{policy_name(policy)} is made already; parameters go with a name"])
        kwargs |= {"policy": policy_name(policy), "pickled": base64.b64encode(cloudpickle.dumps(policy)).decode()}
    else:
        raise ConfigError([f"policy: expected a name, a function or a scaling policy, found {policy!r:.60}"])
    return _serve_policy(kwargs)


def _serve_policy(kwargs: Mapping[str, Any]) -> AutoscalingPolicy:
    """The policy for Serve. Ray 2.55 and newer call a class with arguments; older versions import a policy by name."""
    if "policy_kwargs" in AutoscalingPolicy.__annotations__:
        return AutoscalingPolicy(policy_function=ServeScaling, policy_kwargs=dict(kwargs))
    field = "policy_function" if "policy_function" in AutoscalingPolicy.__annotations__ else "name"
    return AutoscalingPolicy(**{field: f"{__name__}.{name_of(kwargs)}"})


def name_of(kwargs: Mapping[str, Any]) -> str:
    """The name of the attribute of this module that stands for a policy with these arguments."""
    return f"{NAMED}{msgspec.json.encode(kwargs).hex()}"


def __getattr__(name: str) -> "ServeScaling":
    if not name.startswith(NAMED):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return ServeScaling(**msgspec.json.decode(bytes.fromhex(name.removeprefix(NAMED))))


def _built(name: str, parameters: Mapping[str, Any], *, was_in_force: bool = False) -> Any:
    """A policy from its name. If it cannot be loaded: with `was_in_force`, the result is a policy that reports this;
    otherwise raises `ConfigError`."""
    problems = Problems("")
    problems.was_in_force = was_in_force
    made = scaling_policy(name, parameters, problems, ())
    problems.raise_if_any()
    return made


NOT_YET = object()
"""Stands for the result of a call that still runs. It is not None, because None is a valid result."""


class PolicyCall:
    """One call of a policy on its own thread."""

    def __init__(self, policy: Any, view: Any) -> None:
        self.view = view
        self.began = time.monotonic()
        self._answer: SimpleQueue[object] = SimpleQueue()

        def work() -> None:
            try:
                self._answer.put(invoke_with_state(policy, view))
            except BaseException as error:
                self._answer.put(error)

        threading.Thread(target=work, name="pointsman scaling", daemon=True).start()

    def answer(self, limit_s: float) -> object:
        """The result or error of the call. While the call still runs: `NOT_YET`, or `TooSlow` after the limit."""
        try:
            return self._answer.get_nowait()
        except Empty:
            taken_s = time.monotonic() - self.began
            return TooSlow(taken_s) if taken_s > limit_s else NOT_YET


class ServeScaling:
    """Serve's controller calls this object several times a second, with the state of one deployment."""

    def __init__(
        self,
        policy: str = SERVES_OWN,
        parameters: Mapping[str, Any] | None = None,
        pickled: str = "",
        time_limit_s: float = 0.5,
        interval_s: float = 1.0,
    ) -> None:
        self._name, self._parameters, self._pickled = policy, parameters or {}, pickled
        self._limits = {"time_limit_s": time_limit_s, "interval_s": interval_s}
        self._one: ScaledDeployment | None = None
        self._call: PolicyCall | None = None
        self._hangs: PolicyCall | None = None
        """A call that was too slow and still runs. No other call begins until this call has ended."""
        self._called_at = 0.0
        self._measured: SimpleQueue[tuple[int, list[EndedRequest]]] = SimpleQueue()
        self._arrived = 0
        self._to_tell: dict[str, Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        given = self._name, self._parameters, self._pickled, self._limits["time_limit_s"], self._limits["interval_s"]
        return ServeScaling, given

    def __call__(self, ctx: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        try:
            return self._decide(ctx), {}
        except Exception:  # a bug in Pointsman must not stop other applications
            logging.getLogger("ray.serve").exception("pointsman: scaling of %s failed", ctx.deployment_name)
            return ctx.target_num_replicas, {}

    def _decide(self, ctx: "AutoscalingContext") -> int:
        now, one = time.time(), self._one
        if one is None:
            one = self._one = self._began(ctx)
        one.guard.limits = self._limits_of(ctx)
        load = self._observe(one, ctx, now)
        self._take_answer(one)
        if self._call is None and not 0 <= now - self._called_at < self._limits["interval_s"]:
            self._called_at = now
            self._begin_call(one, load, now)
        return one.target

    def _began(self, ctx: "AutoscalingContext") -> ScaledDeployment:
        plan = ScalingPlan(policy=self._policy(ctx), policy_name=self._name, limits=self._limits_of(ctx), recipe="")
        name = f"{ctx.app_name}/{ctx.deployment_name}"
        thread = threading.Thread(target=exchange, args=(weakref.ref(self), name), name="pointsman exchange")
        thread.daemon = True
        thread.start()
        return ScaledDeployment(name, plan, plan, SavedDeployment(), running=ctx.target_num_replicas)

    def _limits_of(self, ctx: "AutoscalingContext") -> ScalingLimits:
        limits = ScalingLimits(
            min_replicas=ctx.capacity_adjusted_min_replicas,
            max_replicas=max(ctx.capacity_adjusted_max_replicas, 1),
            down_delay_s=0.0,
            idle_timeout_s=0.0,
            time_limit_s=self._limits["time_limit_s"],
            interval_s=self._limits["interval_s"],
        )
        if SERVE_DELAYS:
            return limits
        config = ctx.config
        return msgspec.structs.replace(
            limits,
            up_delay_s=config.upscale_delay_s,
            down_delay_s=config.downscale_delay_s,
            up_factor=min(config.get_upscaling_factor(), 1.0),
            down_factor=min(config.get_downscaling_factor(), 1.0),
        )

    def _policy(self, ctx: "AutoscalingContext") -> Any:
        if self._name == SERVES_OWN and not self._pickled:
            # Serve's numbers are already means over its look-back period.
            return TargetOngoing(ctx.config.get_target_ongoing_requests(), self._limits["interval_s"])
        try:
            if self._pickled:
                return cloudpickle.loads(base64.b64decode(self._pickled))
            return _built(self._name, self._parameters, was_in_force=True)
        except Exception as error:  # the controller lacks the policy's module
            return Unloadable(f"{type(error).__name__}: {error}")

    def _observe(self, one: ScaledDeployment, ctx: "AutoscalingContext", now: float) -> Load:
        measurements = one.observed.measurements
        while True:
            try:
                self._arrived, ended = self._measured.get_nowait()
            except Empty:
                break
            for request in ended:
                measurements.ended(now, latency_ms=request.latency_ms, met_slo=request.met_deadline)
        for name, values in (ctx.aggregated_metrics or {}).items():
            for value in values.values():
                if isinstance(value, int | float) and isfinite(value):
                    measurements.metric(now, name, float(value))
                    if name in LATENCIES:
                        measurements.ended(now, **{name: float(value)})  # type: ignore[arg-type]
        ready = ctx.current_num_replicas
        waiting = round(getattr(ctx, "total_queued_requests", None) or 0.0)  # Ray 2.50 does not report this number
        load = Load(running=max(round(ctx.total_num_requests) - waiting, 0), waiting=waiting, arrived=self._arrived)
        starting = max(ctx.target_num_replicas - ready, 0)
        one.observed.observe_replicas(ReplicaCounts(ready=ready, starting=starting), now)
        one.observed.observe_load(load, now)
        return load

    def _take_answer(self, one: ScaledDeployment) -> None:
        limit_s = self._limits["time_limit_s"]
        if self._hangs is not None and not isinstance(self._hangs.answer(limit_s), TooSlow):
            self._hangs = None
        if self._call is None:
            return
        answer = self._call.answer(limit_s)
        if answer is not NOT_YET:
            call, self._call = self._call, None
            one.decide(call.view, answer)
            if isinstance(answer, TooSlow):
                self._hangs = call

    def _begin_call(self, one: ScaledDeployment, load: Load, now: float) -> None:
        view = one.view(load, now)
        if self._hangs is not None:
            one.decide(view, TooSlow(time.monotonic() - self._hangs.began))
        else:
            self._call = PolicyCall(one.plan.policy, view)
        self._to_tell = scaling_status(one, load, now)

    def take_measured(self, measured: tuple[int, list[EndedRequest]]) -> dict[str, Any] | None:
        """Take in measurements from the other thread. Returns the status and records to report."""
        self._measured.put(measured)
        told, self._to_tell = self._to_tell, None
        return told


def exchange(of: "weakref.ref[ServeScaling]", deployment: str) -> None:
    """Until the policy is gone, fetch the measurements of routers, and report the policy's decisions."""
    after, keeper = 0, None
    while True:
        time.sleep(1.0)
        scaling = of()
        if scaling is None or not ray.is_initialized():  # looking up an actor would start another Ray
            return
        try:
            keeper = keeper or records_keeper()
            arrived, ended = ray.get(keeper.measured.remote(deployment, after), timeout=5.0)
            after = ended[-1].number if ended else after
            told = scaling.take_measured((arrived, ended))
            if told is not None:
                keeper.scaled.remote(deployment, msgspec.json.decode(msgspec.json.encode(told, enc_hook=str)))
        except Exception as error:  # the actor restarts, or the cluster ends
            keeper = None
            logging.getLogger("ray.serve").warning("pointsman: no measurements of %s: %s", deployment, error)
        del scaling
