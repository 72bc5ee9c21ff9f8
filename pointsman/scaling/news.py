"""Whether something is worth telling again."""

import msgspec

OTHER_WORDS_EVERY_S = 60.0
"""What goes on, in other words each time, is told this often."""


class News(msgspec.Struct):
    """A state of affairs in words; empty: all is well. News is when it begins, when it ends, and when it has become
    another, but the latter not every second: words may have numbers in them."""

    words: str = ""
    told_at: float | None = None

    def is_news(self, words: str, now: float) -> bool:
        """Take it in; True: tell it."""
        if words == self.words:
            return False
        goes_on = bool(words) and bool(self.words)
        if goes_on and self.told_at is not None and 0 <= now - self.told_at < OTHER_WORDS_EVERY_S:
            return False
        self.words, self.told_at = words, now
        return True
