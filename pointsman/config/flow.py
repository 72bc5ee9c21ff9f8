"""The `flowControl` of a document: limits, bands and the policies that they name."""

from copy import deepcopy
from typing import Any

import msgspec

from pointsman.config.building import Plugins
from pointsman.config.problems import FieldPath, Problems
from pointsman.config.schema import BandTemplate, FlowControlSpec, PickerBody
from pointsman.config.validation import INVALID, usable
from pointsman.routing.queue import BandSettings, FlowControl, SaturationDetector, UsageLimitPolicy

REQUEST_TTL_S = 60.0
BAND_REQUESTS = 5_000
BAND_BYTES = 1_000_000_000
DEFAULT_DETECTOR = "utilization-detector"
DEFAULT_POLICIES = {
    "fairness policy": "global-strict-fairness-policy",
    "ordering policy": "fcfs-ordering-policy",
    "usage limit policy": "static-usage-limit-policy",
}


class FlowControlPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that flow control needs to know. None: no limit; a time of 0: for ever."""

    bands: tuple[BandSettings, ...]
    default_band: BandSettings
    default_negative_band: BandSettings | None
    limits: UsageLimitPolicy
    detector: SaturationDetector
    max_requests: int | None
    max_bytes: int | None
    request_ttl_s: float
    no_endpoint_request_ttl_s: float
    enable_eviction: bool

    def build(self, first_wait_s: float | None = None) -> FlowControl:
        """An empty queue of this form. `first_wait_s`: in place of `noEndpointRequestTTL`."""
        return FlowControl(
            self.bands,
            default_band=self.default_band,
            default_negative_band=self.default_negative_band,
            limits=deepcopy(self.limits),  # a policy may count, and each queue counts for itself
            detector=self.detector,
            max_requests=self.max_requests,
            max_bytes=self.max_bytes,
            default_request_ttl_s=self.request_ttl_s,
            no_endpoint_request_ttl_s=self.no_endpoint_request_ttl_s,
            first_wait_s=first_wait_s,
        )


def saturation_detector(body: PickerBody, plugins: Plugins, path: FieldPath) -> Any:
    """The detector that a document refers to, in the new field or the old one; the default if in none."""
    if body.flow_control and body.flow_control.saturation_detector:
        name, field = body.flow_control.saturation_detector.plugin_ref, (*path, "flowControl", "saturationDetector")
    elif body.saturation_detector:
        name, field = body.saturation_detector.plugin_ref, (*path, "saturationDetector")
    else:
        name, field = "", path
    if name is INVALID:
        return INVALID
    reach = plugins.inject if name in ("", DEFAULT_DETECTOR) else plugins.referred
    return reach(name or DEFAULT_DETECTOR, "saturation detector", (*field, "pluginRef"))


class FlowControls:
    """Makes the plan of one `flowControl` section."""

    def __init__(self, plugins: Plugins, problems: Problems, path: FieldPath) -> None:
        self._plugins = plugins
        self._problems = problems
        self._path = (*path, "flowControl")

    def plan(self, spec: FlowControlSpec, detector: Any) -> FlowControlPlan:
        """The whole section. What is wrong with it has been noted."""
        ttl = REQUEST_TTL_S if spec.default_request_ttl is None else spec.default_request_ttl
        negative = spec.default_negative_priority_band
        if spec.band_selection_policy_plugin_ref:
            self._plugins.note("flowControl.bandSelectionPolicyPluginRef is ignored; bands go by priority")
        return FlowControlPlan(
            bands=self._bands(spec),
            default_band=self._band(spec.default_priority_band or BandTemplate(), "defaultPriorityBand"),
            default_negative_band=self._band(negative, "defaultNegativePriorityBand") if negative else None,
            limits=self._policy(spec.usage_limit_policy_plugin_ref, "usage limit policy", "usageLimitPolicyPluginRef"),
            detector=detector,
            max_requests=self._amount(spec.max_requests, "maxRequests") or None,
            max_bytes=self._amount(spec.max_bytes, "maxBytes") or None,
            request_ttl_s=ttl,
            no_endpoint_request_ttl_s=ttl if spec.no_endpoint_request_ttl is None else spec.no_endpoint_request_ttl,
            enable_eviction=spec.enable_eviction,
        )

    def _bands(self, spec: FlowControlSpec) -> tuple[BandSettings, ...]:
        bands: dict[int, BandSettings] = {}
        for place, band in usable(spec.priority_bands):
            if band.priority is not INVALID and band.priority in bands:
                message = f"there is already a band of priority {band.priority}"
                self._problems.add((*self._path, "priorityBands", place, "priority"), message)
            bands[band.priority] = self._band(band, "priorityBands", place)
        return tuple(bands.values())

    def _band(self, band: BandTemplate, *path: str | int) -> BandSettings:
        if band.default_request_ttl is not None:
            self._plugins.note("defaultRequestTTL of a band is ignored; that of flowControl holds for all")
        return BandSettings(
            priority=band.priority,
            max_requests=self._amount(band.max_requests, *path, "maxRequests") or BAND_REQUESTS,
            max_bytes=self._amount(band.max_bytes, *path, "maxBytes") or BAND_BYTES,
            fairness=self._policy(band.fairness_policy_ref, "fairness policy", *path, "fairnessPolicyRef"),
            ordering=self._policy(band.ordering_policy_ref, "ordering policy", *path, "orderingPolicyRef"),
        )

    def _policy(self, name: str, role: str, *path: str | int) -> Any:
        if name is INVALID:
            return INVALID
        default = DEFAULT_POLICIES[role]
        reach = self._plugins.inject if name in ("", default) else self._plugins.referred
        return reach(name or default, role, (*self._path, *path))

    def _amount(self, amount: int | None, *path: str | int) -> int | None:
        if amount and amount < 0:
            self._problems.add((*self._path, *path), f"must not be negative, found {amount}")
            return None
        return amount
