"""A module that cannot be imported."""

raise ValueError("this module is broken")
