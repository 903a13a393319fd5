"""See docs/spec.md."""

__all__: list[str] = []
