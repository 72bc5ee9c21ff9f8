"""The base of everything that is written as fields with values."""

import msgspec


class Section(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True, kw_only=True):
    """Snake case here, camel case in YAML; a field that nobody knows is an error."""
