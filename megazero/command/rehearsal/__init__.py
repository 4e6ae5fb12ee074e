"""Rehearsals: ranks of a world that does not exist run real steps on stand-in tensors."""
