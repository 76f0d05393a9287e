"""The decisions of a connector that is made of several of an engine's own kind.

    settings    who they are, as configured
    guard       one of them beside the scheduler, with its faults kept inside
    rank_guard  one of them beside a rank
    rounds      which of them loads a request
    loads       loads under way, beside the scheduler and beside a rank
    saves       saves under way, in both places
    payload     their counts, as plain data

No engine is imported here: adapters are thin, and this is tested without an engine.
"""
