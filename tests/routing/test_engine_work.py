from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pointsman.routing.engine_model import BIN, EngineModel, OutputLengths, PooledFit, Ratio
from pointsman.routing.engine_work import EngineWork, Reading


def prompt(ms: float, now: float, *, tokens: float = 1000.0, streams: bool = True, ttft: float = 0.0) -> Reading:
    return Reading(ms, tokens, tokens, now, now + 5000.0, 100.0, ttft, streams=streams)


def busy_periods(
    model: EngineModel, works: list[EngineWork], per_token: list[float], count: int, seed: int = 0
) -> None:
    """Engines read one to three prompts at a time, so many ms per token each."""
    rng, now = Random(seed), 0.0
    for number in range(count):
        at = number % len(works)
        sizes = [rng.randrange(200, 20_000) for _ in range(rng.randrange(1, 4))]
        for index, size in enumerate(sizes):
            works[at].sent(f"{number}.{index}", prompt(1.0, now, tokens=float(size)))
        for index, size in enumerate(sizes):
            now += per_token[at] * size
            works[at].first_token(f"{number}.{index}", now)
            works[at].ended(f"{number}.{index}", None, now)
        now += 1000.0


@pytest.mark.parametrize("per_token", [0.02, 0.06, 0.12, 0.24])
def test_a_wrong_prior_is_corrected_within_a_hundred_requests(per_token: float) -> None:
    model = EngineModel()
    work = EngineWork(model)
    busy_periods(model, [work], [per_token], 50)
    estimate = work.slowness.value * model.reading_ms(1, 8000.0, 8000.0 * 4000.0)
    assert estimate == pytest.approx(8000 * per_token, rel=0.2)


def test_instances_of_two_speeds_are_distinguished() -> None:
    model = EngineModel()
    works = [EngineWork(model) for _ in range(4)]
    busy_periods(model, works, [0.05, 0.05, 0.1, 0.1], 400)
    fast, slow = works[0].slowness.value, works[3].slowness.value
    assert slow / fast == pytest.approx(2.0, rel=0.15)
    assert fast * model.reading_ms(1, 8000.0, 3.2e7) == pytest.approx(400.0, rel=0.2)


def test_one_absurd_time_does_not_decide() -> None:
    line, ratio = PooledFit((10.0,), (1.0,), strength=3.0, decay=0.99), Ratio()
    for _ in range(20):
        line.learn((1.0,), 10.0, ratio)
    line.learn((1.0,), 100_000.0, ratio)
    assert ratio.value * line.coefficients[0] < 15.0


def test_lengths_start_from_a_prior_and_follow_what_ended() -> None:
    lengths = OutputLengths()

    def share(tokens: int) -> float:
        longer: list[float] = lengths.longer
        return longer[tokens // BIN] / longer[0]

    assert 0.3 < share(256) < 0.45
    for _ in range(200):
        lengths.add(64)
    assert share(32) > 0.9
    assert share(96) < 0.1
    assert all(a >= b for a, b in zip(lengths.longer, lengths.longer[1:], strict=False))


def test_an_answer_is_delayed_by_what_is_read_meanwhile() -> None:
    work = EngineWork(EngineModel())
    work.sent("a", prompt(100.0, 0.0))
    work.first_token("a", 100.0)
    work.sent("b", prompt(300.0, 1000.0))
    assert work.read_at(1200.0) - work.writing["a"].read == 200.0
    work.first_token("b", 1300.0)
    assert work.read_at(9000.0) - work.writing["a"].read == 300.0


def test_prompts_without_first_tokens_are_read_when_their_time_is_over() -> None:
    work = EngineWork(EngineModel())
    work.sent("a", prompt(100.0, 0.0, streams=False))
    work.sent("b", prompt(200.0, 0.0, streams=False))
    work.settle(150.0)
    assert (list(work.reading), list(work.writing)) == (["b"], ["a"])
    work.settle(299.0)
    assert list(work.reading) == ["b"]
    work.ended("b", 20, 299.5)  # sooner than estimated
    assert (list(work.reading), list(work.writing), work.left_ms) == ([], ["a"], 0.0)


def test_ends_alone_correct_a_wrong_prior() -> None:
    model, now, rng = EngineModel(), 0.0, Random(2)
    work = EngineWork(model)
    for number in range(120):
        tokens, answer = rng.randrange(500, 20_000), rng.randrange(5, 60)
        work.sent(str(number), prompt(model.reading_ms(1, tokens, 0.0), now, tokens=float(tokens), streams=False))
        now += 0.15 * tokens + 30.0 * answer
        work.settle(now)
        work.ended(str(number), answer, now)
        now += 500.0
    estimate = work.slowness.value * model.reading_ms(1, 8000.0, 3.2e7)
    assert estimate == pytest.approx(8000 * 0.15, rel=0.25)


def test_a_first_token_says_that_prompts_before_it_are_read() -> None:
    work = EngineWork(EngineModel())
    work.sent("a", prompt(100.0, 0.0, streams=False))
    work.sent("b", prompt(100.0, 0.0, ttft=200.0))
    assert work.first_token("b", 120.0) == 200.0
    assert not work.reading
    assert work.first_token("b", 130.0) is None


EVENTS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.floats(0.0, 900.0), st.booleans()), max_size=60)


@given(EVENTS)
def test_sums_equal_a_recount_after_any_events(events: list[tuple[int, int, float, bool]]) -> None:
    work, now = EngineWork(EngineModel()), 0.0
    for kind, number, passed, streams in events:
        now += passed
        name = str(number)
        if kind == 0 and name not in work.reading and name not in work.writing:
            work.sent(name, prompt(50.0 + 10 * number, now, tokens=100.0 * number + 1, streams=streams))
        elif kind == 1:
            work.first_token(name, now)
        elif kind == 2:
            work.ended(name, 5 + number if streams else None, now)
        elif kind == 3:
            work.settle(now)
        assert work.left_ms == pytest.approx(sum(one.ms for one in work.reading.values()), abs=1e-6)
        written = sum(one.prompt for one in work.writing.values())
        assert work.context == pytest.approx(sum(one.prompt for one in work.reading.values()) + written, abs=1e-6)
        assert work.patient == sum(not one.streams for one in work.reading.values())
        assert work.head_ms == (next(iter(work.reading.values())).ms if work.reading else 0.0)
        assert not work.reading.keys() & work.writing.keys()
        assert work.read_at(now) >= 0.0
