"""What crosses a process border."""
