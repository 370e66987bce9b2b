"""Memory, FLOPs and time of a run before it starts, for any layout and GPU type, without GPUs (`--dry-run`).

    hardware      GPU types
    shards        exact sizes of what a rank holds, from the layout tables
    activations   what a micro-batch leaves on a rank
    memory        all parts in the order of a step; does it fit, and what to change if not
    workload      the responses of a step, drawn from typical lengths
    compute       FLOPs, the least and the expected time of each phase, imbalances
    plan          all of it together: `make_plan`

docs/scale.md says how far the numbers have been checked.
"""
