"""The options of the tokenization, as they stand in the YAML file."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TokenizeConfig:
    """The YAML's ``tokenize`` section.

    Args:
        output: folder of the shards; None is tokens in the output folder.
        max_tokens: stops at the document that reaches so many; None takes dataset.max_tokens.
        shard_tokens: tokens per file; what a kill can cost.
        verify: reads all shards again at the end and compares their checksums.
    """

    output: str | None = None
    max_tokens: int | None = None
    shard_tokens: int = 100_000_000
    verify: bool = True

    def __post_init__(self):
        for key in ("max_tokens", "shard_tokens"):
            value = getattr(self, key)
            if value is None and key == "max_tokens":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"tokenize.{key} must be an int; got {value!r}")
            if value < 1:
                raise ValueError(f"tokenize.{key} must be at least 1; got {value}")
        if not isinstance(self.verify, bool):
            raise TypeError(f"tokenize.verify must be True or False; got {self.verify!r}")
        if self.output is not None and not isinstance(self.output, str):
            raise TypeError(f"tokenize.output must be a path; got {self.output!r}")
