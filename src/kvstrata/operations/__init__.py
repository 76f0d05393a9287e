"""What operators do to a store: look at it, verify it, bring it down to a size. Prints nothing."""
