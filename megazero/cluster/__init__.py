"""Launch and end of ranks: rendezvous, limits, failures, agreement."""
