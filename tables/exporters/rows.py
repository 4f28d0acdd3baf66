"""Long lists of numbers in lines: what `textwrap.fill` gives, in a fraction of its time."""


def rows(text: str, width: int, spaces: int) -> str:
    """Return the words of `text` in lines of at most `width` characters, each indented by `spaces`.

    A word that is longer has a line of its own.
    """
    lines: list[list[str]] = []
    length = width  # of the last line; the first word begins one
    for word in text.split():
        length += 1 + len(word)
        if length > width:
            lines.append([])
            length = spaces + len(word)
        lines[-1].append(word)
    return "\n".join(" " * spaces + " ".join(line) for line in lines)
