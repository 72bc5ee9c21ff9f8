"""A model of engines, learned from what a gateway observes: when it sent requests, when first tokens came, and when
answers ended.

Enters: the durations of busy periods with the work done in them, and the pace and lengths of answers. Leaves: the time
to read a prompt, the time of a step, and the share of answers that are longer than a number of tokens. The one rule: a
deployment starts from a prior, and an instance starts from what its deployment has learned. So the first request has
an estimate too. Times are milliseconds.
"""

from collections.abc import Sequence
from operator import mul

BIN = 8
"""Tokens per bin of the lengths of answers."""
BINS = 1024
"""Answers of 8,192 tokens and more count as equally long."""


class TimeFit:
    """A linear fit of times with at most three coefficients, held near a prior. Each new observation reduces the weight
    of the earlier ones.

    Observations count by their relative error. For each coefficient, the prior counts as much as `strength`
    observations at its `typical` value. The equations are written out because loops over rows and columns take ten
    times as long, and every answer is an observation.
    """

    __slots__ = ("_decay", "_held", "_least", "_padding", "_size", "_sums", "_towards", "coefficients")

    def __init__(self, prior: Sequence[float], typical: Sequence[float], strength: float, decay: float) -> None:
        self._size = len(prior)
        self._padding = (0.0,) * (3 - self._size)
        held = [strength * x / value for x, value in zip(typical, prior, strict=True)]
        a, b, c = self._held = (*held, *(1.0 for _ in self._padding))
        d, e, f = (*prior, *self._padding)
        self._towards = (a * d, b * e, c * f)
        self._least = tuple(0.02 * value for value in prior)
        """Minimum coefficients: more work never takes less time."""
        self._decay = decay
        self._sums = (0.0,) * 9
        """Decaying sums: of the products of the xs, row by row from the diagonal on; then of the xs themselves."""
        self.coefficients = tuple(prior)

    def add(self, xs: Sequence[float], ms: float) -> None:
        """Learn that work `xs` took this long."""
        keep, weight = self._decay, 1.0 / ms
        x, y, z = (*xs, *self._padding)
        aa, ab, ac, bb, bc, cc, a, b, c = self._sums
        by_x, by_y = weight * x, weight * y
        aa, ab, ac = aa * keep + by_x * x, ab * keep + by_x * y, ac * keep + by_x * z
        bb, bc, cc = bb * keep + by_y * y, bc * keep + by_y * z, cc * keep + weight * z * z
        a, b, c = a * keep + x, b * keep + y, c * keep + z
        self._sums = (aa, ab, ac, bb, bc, cc, a, b, c)
        # Gaussian elimination; the equations are symmetric.
        (held_a, held_b, held_c), (to_a, to_b, to_c) = self._held, self._towards
        aa, bb, cc, a, b, c = aa + held_a, bb + held_b, cc + held_c, a + to_a, b + to_b, c + to_c
        second, third = ab / aa, ac / aa
        bb, bc, b = bb - second * ab, bc - second * ac, b - second * a
        cc, c = cc - third * ac, c - third * a
        third = bc / bb
        z = (c - third * b) / (cc - third * bc)
        y = (b - bc * z) / bb
        x = (a - ab * y - ac * z) / aa
        self.coefficients = tuple(map(max, (x, y, z)[: self._size], self._least))


class Ratio:
    """Actual divided by expected time of one instance: 1 until it is known to differ from its deployment.

    A deployment learns from times that are divided by the instance's ratio relative to the mean of all ratios. So
    ratios say how instances differ, and the model of the deployment says how long work takes.
    """

    __slots__ = ("_actual", "_expected", "value")

    MEMORY = 64.0
    """Number of observations that count."""
    PRIOR = 16.0
    """The initial ratio of 1 counts as this many observations."""

    def __init__(self) -> None:
        self._actual = self._expected = 0.0
        self.value = 1.0

    def add(self, actual: float, expected: float) -> None:
        keep = 1.0 - 1.0 / self.MEMORY if self._expected else self.PRIOR
        before = (self._actual, self._expected) if self._expected else (expected, expected)
        self._actual, self._expected = before[0] * keep + actual, before[1] * keep + expected
        self.value = self._actual / self._expected


class PooledFit(TimeFit):
    """A linear fit that instances of different speeds share."""

    __slots__ = ("_mean",)

    def __init__(self, prior: Sequence[float], typical: Sequence[float], strength: float, decay: float) -> None:
        super().__init__(prior, typical, strength, decay)
        self._mean = 1.0
        """The mean of the instances' ratios."""

    def learn(self, xs: Sequence[float], ms: float, ratio: Ratio) -> None:
        """Learn from an instance with this ratio, whose work took this long."""
        expected = sum(map(mul, self.coefficients, xs))
        # A single observation counts as at most four times, and at least a quarter of, the expected time.
        ms = min(max(ms, 0.25 * expected * ratio.value), 4.0 * expected * ratio.value)
        self._mean += 0.02 * (ratio.value - self._mean)
        self.add(xs, ms * self._mean / ratio.value)
        ratio.add(ms, expected)


class OutputLengths:
    """How long answers are: out of `longer[0]` answers, `longer[n]` have at least n * BIN tokens."""

    __slots__ = ("longer", "mean")

    PRIOR_MEAN = 256.0
    PRIOR_COUNT = 16.0
    MEMORY = 4_000.0
    """Number of answers that count."""

    def __init__(self) -> None:
        step = 0.5 ** (BIN / (self.PRIOR_MEAN * 0.6931))
        self.longer = [max(self.PRIOR_COUNT * step**index, 1e-9) for index in range(BINS)]
        self.mean = self.PRIOR_MEAN

    def add(self, tokens: int) -> None:
        longer, shorter = self.longer, min(tokens // BIN, BINS - 1) + 1
        longer[:shorter] = [count + 1.0 for count in longer[:shorter]]
        self.mean += (tokens - self.mean) / min(longer[0], self.MEMORY)
        if longer[0] > self.MEMORY:
            self.longer = [max(count / 2, 1e-9) for count in longer]


class EngineModel:
    """What a deployment has learned about its engines."""

    __slots__ = ("lengths", "reading", "step")

    def __init__(self) -> None:
        self.reading = PooledFit((10.0, 60.0, 1.5), (5.0, 8.0, 20.0), strength=3.0, decay=0.99)
        """Times per prompt, per 1,000 tokens to compute, and per million pairs of a token and an earlier token."""
        self.step = PooledFit((15.0, 0.03), (1.0, 50.0), strength=3.0, decay=0.99)
        """Times per step, and per 1,000 tokens of context."""
        self.lengths = OutputLengths()

    def reading_ms(self, prompts: int, tokens: float, pairs: float) -> float:
        """The time to read prompts on an instance of average speed."""
        each, per_token, per_pair = self.reading.coefficients
        return each * prompts + per_token * tokens * 1e-3 + per_pair * pairs * 1e-6

    def step_ms(self, context: float) -> float:
        """The time of a step that reads no prompts."""
        base, per_token = self.step.coefficients
        return base + per_token * context * 1e-3
