"""Several tiers as one: look-up, lease, promote, demote, deadlines, breakers."""
