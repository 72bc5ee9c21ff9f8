"""What tests of commands share."""

from tests.cli.planes import plane as plane
