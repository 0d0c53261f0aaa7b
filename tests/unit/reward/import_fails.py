"""A module of a user that does not import."""

raise OSError("licence server not reachable")
