"""Draw pictures without layout and with few pixels: drawing would be a quarter of a small run."""

import functools


def quick(savefig):
    """Return a quick version of ``Figure.savefig``."""

    @functools.wraps(savefig)
    def wrapped(self, *args, **options):
        self.set_layout_engine("none")
        savefig(self, *args, **options | {"dpi": 20})

    return wrapped
