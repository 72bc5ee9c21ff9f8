"""Whether something is worth telling again."""

import msgspec

EVERY_S = 60.0
"""What goes on in other words each time, or comes and goes, is told this often."""


class ReportThrottle(msgspec.Struct):
    """A state of affairs in words; empty: all is well. News is when it begins, when it has become another, but not
    every second, as words may have numbers in them; and when what was told is over."""

    words: str = ""
    """What was last told."""
    told_at: float | None = None

    def is_news(self, words: str, now: float) -> bool:
        """Take it in; True: tell it."""
        if words == self.words:
            return False
        if words and self.told_at is not None and 0 <= now - self.told_at < EVERY_S:
            return False
        self.words, self.told_at = words, now
        return True
