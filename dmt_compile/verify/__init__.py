"""Is the rewritten program the flat model? Layout check, lock-step cluster, equivalence checks, certificate."""
