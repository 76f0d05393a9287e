"""The order in which chunks leave a full tier."""
