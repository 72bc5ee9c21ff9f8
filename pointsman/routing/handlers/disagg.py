"""The handler that splits a request into stages: encode, prefill and decode, each on its own endpoint."""

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias

from pointsman.parameters import Parameters, PluginRef
from pointsman.reasons import Reason
from pointsman.routing.endpoints import Endpoint
from pointsman.routing.plugins import NEAR, PREFIX_MATCH, Decider, Endpoints, RequestCycle
from pointsman.selection import Key, ProfileFailure, ProfileResult, Roster, SchedulingFailure, SchedulingResult
from pointsman.selection.scheduler import failed

# Deciders. Each decides whether a separate stage is worthwhile for one request.


class PrefixBasedPdDecider:
    """Prefills elsewhere if the endpoint that decodes would have to compute at least `non_cached_tokens` of the prompt.

    It never does so for prompts of fewer than `prompt_tokens`, if `non_cached_tokens` is 0, or if the cache of that
    endpoint is unknown.
    """

    def __init__(self, non_cached_tokens: int = 0, prompt_tokens: int = 0) -> None:
        for parameter, value in {"nonCachedTokens": non_cached_tokens, "promptTokens": prompt_tokens}.items():
            if value < 0:
                raise ValueError(f"{parameter} is {value}; it must be 0 or more")
        self.non_cached = non_cached_tokens
        self.prompt = prompt_tokens

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        found, prompt = cycle.get(PREFIX_MATCH), cycle.request.input_tokens
        if not self.non_cached or decode is None or found is None or prompt < max(self.prompt, self.non_cached):
            return False
        cached = found.cached[decode.row] * found.block_size[decode.row]
        return bool(prompt - cached >= self.non_cached)


class AlwaysDisaggPdDecider:
    """Always prefills on another endpoint."""

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        return True


class AlwaysDisaggMultimodalDecider:
    """Encodes on another endpoint if the prompt has parts that are not text."""

    def decides(self, cycle: RequestCycle, endpoints: Endpoints, decode: Endpoint | None) -> bool:
        return cycle.request.is_multimodal


Results: TypeAlias = Mapping[str, ProfileResult[Endpoint] | ProfileFailure[Endpoint]]

PREFILLER = "x-prefiller-host-port"
ENCODERS = "x-encoder-hosts-ports"


class StageProfiles(Parameters, frozen=True):
    """The profile of each stage."""

    decode: str = "decode"
    prefill: str = "prefill"
    encode: str = "encode"


class StageDeciders(Parameters, frozen=True):
    """The decider of each stage; a stage without one is skipped."""

    prefill: Annotated[Decider | None, PluginRef("decider")] = None
    encode: Annotated[Decider | None, PluginRef("decider")] = None


class DisaggProfileHandler:
    """Runs the stages of a request one after the other; it goes to the endpoint that decodes.

    `decode-first` runs decode, then encode and prefill if their deciders agree. `prefill-first` runs prefill, encode if
    its decider agrees, then decode. Only decode must succeed; engines manage without any other stage that failed.
    """

    def __init__(
        self,
        stage_order: str = "decode-first",
        profiles: StageProfiles | None = None,
        deciders: StageDeciders | None = None,
    ) -> None:
        order = stage_order.lower().replace("-", "").replace("_", "")
        if order not in ("decodefirst", "prefillfirst"):
            raise ValueError(f'stageOrder is "{stage_order}"; it must be decode-first or prefill-first')
        self.prefill_first = order == "prefillfirst"
        self.profiles = profiles or StageProfiles()
        self.deciders = deciders or StageDeciders()
        for stage, decider in {"prefill": self.deciders.prefill, "encode": self.deciders.encode}.items():
            if decider is not None and not isinstance(decider, Decider):
                raise ValueError(f"deciders.{stage} is of type {type(decider).__name__}; it must be a decider")
        if self.prefill_first and self.deciders.prefill is not None:
            raise ValueError("deciders.prefill is set with stageOrder prefill-first, where prefill always runs")
        self._skipped: Key[frozenset[str]] = Key("disagg: skipped stages")

    def pick_profiles(self, cycle: RequestCycle, profiles: Sequence[str], results: Results) -> Sequence[str]:
        encode, prefill, decode = self.profiles.encode, self.profiles.prefill, self.profiles.decode
        skipped = cycle.get(self._skipped) or frozenset()
        open_stages = set(profiles) - set(results) - skipped
        if self.prefill_first:
            if decode in results:
                return ()
            if prefill in open_stages:
                return (prefill,)
            self._stay_near(cycle, results, prefill)
            return (encode,) if encode in open_stages and self._agreed(cycle, encode, results) else (decode,)
        if decode not in results:
            return (decode,)
        if not chosen(results, decode):
            return ()
        self._stay_near(cycle, results, decode)
        for stage in (encode, prefill):
            if stage in open_stages and self._agreed(cycle, stage, results):
                return (stage,)
        return ()

    def _stay_near(self, cycle: RequestCycle, results: Results, stage: str) -> None:
        """Set NEAR. The KV cache moves between the stages, so topology scorers need the location of the first stage."""
        for endpoint in chosen(results, stage)[:1]:
            cycle[NEAR] = endpoint

    def _agreed(self, cycle: RequestCycle, stage: str, results: Results) -> bool:
        """Call the decider of a stage, once per cycle."""
        decider = self.deciders.encode if stage == self.profiles.encode else self.deciders.prefill
        decode = results.get(self.profiles.decode)
        targets = chosen(results, self.profiles.decode)
        endpoints = decode.ranked.candidates if isinstance(decode, ProfileResult) else Roster[Endpoint](())
        if decider is not None and decider.decides(cycle, endpoints, targets[0] if targets else None):
            return True
        cycle[self._skipped] = (cycle.get(self._skipped) or frozenset()) | {stage}
        return False

    def process_results(
        self, cycle: RequestCycle, results: Results
    ) -> SchedulingResult[Endpoint] | SchedulingFailure[Endpoint]:
        decode = self.profiles.decode
        if not chosen(results, decode):
            failures = failed(results)
            given = "" if decode in failures else Reason("profile-chose-none", {"profile": decode})
            return SchedulingFailure(given, failures)
        stages = (decode, self.profiles.prefill, self.profiles.encode)
        return SchedulingResult(
            {name: result for name in stages if isinstance(result := results.get(name), ProfileResult)}, decode
        )

    def request_headers(self, cycle: RequestCycle, result: SchedulingResult[Endpoint]) -> dict[str, str | None]:
        prefillers = chosen(result.results, self.profiles.prefill)
        encoders = chosen(result.results, self.profiles.encode)
        return {
            PREFILLER: address(prefillers[0]) if prefillers else None,
            ENCODERS: ",".join(map(address, encoders)) or None,
        }


def chosen(results: Results, profile: str) -> Sequence[Endpoint]:
    """The targets of a profile; an empty sequence if it failed or did not run."""
    result = results.get(profile)
    return result.targets if isinstance(result, ProfileResult) else ()


def address(endpoint: Endpoint) -> str:
    """host:port, with an IPv6 address in brackets."""
    host = endpoint.instance.host
    return f"[{host}]:{endpoint.instance.port}" if ":" in host else f"{host}:{endpoint.instance.port}"
