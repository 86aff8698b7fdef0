"""Kinds of the notices of a kernel that is traced with a key value whose size is symbolic, on any machine."""

SYMBOLIC = ("compiled", "symbolic_key")
