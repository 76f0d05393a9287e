"""The two halves an engine talks to, and what they promise each other."""
