"""What `/metrics` says of deployments that are scaled."""

from collections.abc import Iterable

from pointsman.gateway.metrics import Page
from pointsman.runtimes.local.scaling.scaled import Scaled


def scaling_metrics(page: Page, scaled: Iterable[Scaled]) -> None:
    """Add them to the page."""
    each = [((("deployment", one.name), ("policy", one.policy_name)), one) for one in scaled]
    page.gauge("scaling_target", "Instances that were decided on.", {labels: one.target for labels, one in each})
    page.gauge(
        "scaling_wanted",
        "Instances that the policy wants, before limits and delays.",
        {labels: one.wanted for labels, one in each if one.wanted is not None},
    )
    page.counter("scaling_changes", "Changes of the target.", {labels: one.changes for labels, one in each})
    page.counter(
        "scaling_policy_errors",
        "Times that a scaling policy raised, was too slow, or returned nonsense.",
        {labels: one.errors for labels, one in each},
    )
